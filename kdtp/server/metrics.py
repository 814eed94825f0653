"""Figures for Prometheus, named as vLLM's where the meaning is the same, with the prefix `kdtp:`."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from kdtp.messages import Failed, Finished, Refused, Status, Tokens, Usage
from kdtp.server.journal import Job, Told

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_PER_ROUND = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0)
_COUNTS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
_TALLIES = {  # of the engine's steps: how they are called here, and their bounds
    "tree_nodes": ("tree_nodes", (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024)),
    "tree_depth": ("tree_depth", tuple(range(1, 17))),
    "accepted": ("accepted_path_length", tuple(range(17))),
    "step_rows": ("iteration_tokens_total", (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)),
}
_DROPPED = ("malformed", "stranger", "stale", "malformed_rpc", "unreachable_client")
STATES = ("loading", "ready", "restarting", "draining", "dead")
KIND = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """Counts by upper bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value that came so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, name: str) -> Iterator[str]:
        """As Prometheus reads it: cumulative."""
        name = f"kdtp:{name}"
        yield f"# TYPE {name} histogram"
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{"+Inf" if bound == float("inf") else bound}"}} {total}'
        yield f"{name}_sum {self._sum:.6g}"
        yield f"{name}_count {total}"


class Metrics:
    """What the endpoint's requests have come to since the server started; engines that died are in it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.accepted: Counter[int] = Counter()
        self.histograms = {
            "time_to_first_token_seconds": Histogram(_SECONDS),
            "inter_token_latency_seconds": Histogram(_SHORT),
            "e2e_request_latency_seconds": Histogram(_SECONDS),
            "request_prompt_tokens": Histogram(_COUNTS),
            "request_generation_tokens": Histogram(_COUNTS),
            "request_params_max_tokens": Histogram(_COUNTS),
            "request_queue_time_seconds": Histogram(_SECONDS),
            "request_prefill_time_seconds": Histogram(_SECONDS),
            "request_decode_time_seconds": Histogram(_SECONDS),
            "request_tokens_per_round": Histogram(_PER_ROUND),
        }

    def begun(self, job: Job) -> None:
        """A job was taken."""
        self.counts["prompt_tokens"] += len(job.prompt)
        self.histograms["request_prompt_tokens"].add(len(job.prompt))
        self.histograms["request_params_max_tokens"].add(job.params.max_tokens)

    def told(self, job: Job, event: Told) -> None:
        """A job's event."""
        now = time.monotonic()
        match event:
            case Tokens():
                self._tokens(job, len(event.tokens), now)
            case Finished():
                self._usage(event.usage)
                self.ended(job, event.reason)
            case Failed():
                self.ended(job, f"error_{event.code}")
            case Refused():
                self.counts["admission_rejections"] += 1

    def _tokens(self, job: Job, count: int, now: float) -> None:
        if job.heard is None:
            self.histograms["time_to_first_token_seconds"].add(now - job.started)
        else:
            self.histograms["inter_token_latency_seconds"].add((now - job.heard) / count, count)
        job.heard = now
        self.counts["generation_tokens"] += count

    def _usage(self, usage: Usage) -> None:
        self.counts["prompt_tokens_cached"] += usage.cached_tokens
        self.counts["spec_decode_num_drafts"] += usage.drafted_by_depth[0] if usage.drafted_by_depth else 0
        self.counts["spec_decode_num_accepted_tokens"] += sum(usage.accepted_by_depth)
        self.accepted.update(dict(enumerate(usage.accepted_by_depth)))
        self.histograms["request_queue_time_seconds"].add(usage.queued_ms / 1e3)
        prefill = usage.timings_ms.get("prefill", 0.0)
        self.histograms["request_prefill_time_seconds"].add(prefill / 1e3)
        self.histograms["request_decode_time_seconds"].add((sum(usage.timings_ms.values()) - prefill) / 1e3)
        if usage.rounds:
            self.histograms["request_tokens_per_round"].add(usage.committed / usage.rounds)

    def ended(self, job: Job, reason: str) -> None:
        """A job is over; "abort" if its client ended it."""
        self.reasons[reason] += 1
        self.histograms["e2e_request_latency_seconds"].add(time.monotonic() - job.started)
        self.histograms["request_generation_tokens"].add(len(job.given))

    def engine_died(self, last: Status | None) -> None:
        """An engine is no more; what it said last."""
        self.counts["desync_failures"] += last.counters.get("desync_failures", 0) if last else 0

    def text(self, status: Status | None, silence: float, state: str, ratio: float, restarts: int) -> str:
        """The page of /metrics; silence: seconds since `status` came."""
        names = ("prompt_tokens", "prompt_tokens_cached", "generation_tokens", "admission_rejections")
        spec = ("spec_decode_num_drafts", "spec_decode_num_accepted_tokens")
        lines = list(_gauges(status, silence, state, ratio))
        lines += _family("engine_restarts_total", "counter", {"": restarts})
        lines += _family("desync_failures_total", "counter", {"": self.counts["desync_failures"]})
        for name in (*names, *spec):
            lines += _family(f"{name}_total", "counter", {"": self.counts[name]})
        lines += _family("corrupted_requests_total", "counter", {"": self.reasons["error_no_token"]})
        lines += _family("request_success_total", "counter", _labelled("finished_reason", self.reasons))
        per = _labelled("position", self.accepted)
        lines += _family("spec_decode_num_accepted_tokens_per_pos_total", "counter", per)
        for name, histogram in self.histograms.items():
            lines += histogram.family(name)
        return "\n".join(lines) + "\n"


def _gauges(status: Status | None, silence: float, state: str, ratio: float) -> Iterator[str]:
    """The engine as it is now. Its own counters begin anew with each engine, as Prometheus expects of a restart."""
    yield from _family("engine_state", "gauge", _labelled("state", {name: int(name == state) for name in STATES}))
    yield from _family("load_progress_ratio", "gauge", {"": round(ratio, 6)})
    if status is None:
        return
    used = status.pages_total - status.pages_free
    gauges = {
        "num_requests_running": status.running,
        "num_requests_waiting": status.waiting,
        "num_tokens_waiting": status.waiting_tokens,
        "kv_cache_usage_perc": round(used / status.pages_total, 6) if status.pages_total else 0,
        "kv_cache_pages_idle": status.pages_idle,
        "step_number": status.step,
    }
    for name, value in gauges.items():
        yield from _family(name, "gauge", {"": value})
    up = dict.fromkeys(range(status.tp), int(status.state == "ready"))  # an engine that loses a rank is no more
    yield from _family("worker_up", "gauge", _labelled("rank", up))
    ages = {rank: round(age + silence, 3) for rank, age in enumerate(status.step_ages)}
    yield from _family("worker_last_step_age_seconds", "gauge", _labelled("rank", ages))
    counters = status.counters
    for name, key in (
        ("prefix_cache_queries", "prefix_queries"),
        ("prefix_cache_hits", "prefix_hits"),
        ("num_preemptions", "preemptions"),
        ("desync_checks", "desync_checks"),
        ("spec_decode_num_draft_tokens", "drafted"),
        ("spec_decode_num_rounds_not_drafted", "rounds_not_drafted"),
    ):
        yield from _family(f"{name}_total", "counter", {"": counters.get(key, 0)})
    dropped = {reason: counters[reason] for reason in _DROPPED if reason in counters}
    yield from _family("dropped_frames_total", "counter", _labelled("reason", dropped))
    seconds = {stage: round(ms / 1e3, 6) for stage, ms in status.stage_ms.items()}
    yield from _family("step_stage_seconds_total", "counter", _labelled("stage", seconds))
    tallies = {"accepted": dict(enumerate(status.accepted)), **status.tallies}
    for key, (name, bounds) in _TALLIES.items():
        histogram = Histogram(bounds)
        for value, times in tallies.get(key, {}).items():
            histogram.add(value, times)
        yield from histogram.family(name)


def _labelled(label: str, values: Mapping[str, float] | Mapping[int, float]) -> dict[str, float]:
    return {f'{{{label}="{key}"}}': value for key, value in sorted(values.items())}


def _family(name: str, kind: str, values: Mapping[str, float]) -> Iterator[str]:
    yield f"# TYPE kdtp:{name} {kind}"
    for labels, value in values.items():
        yield f"kdtp:{name}{labels} {value}"
