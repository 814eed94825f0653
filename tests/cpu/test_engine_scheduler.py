"""Queue, admission, shares, prefix cache and preemption: exact cases, and a machine that does everything at random.

The target stores tokens where a model stores KV (tests/fake_target.py), so a page that is shared wrongly, lost or
overwritten changes a text or meets a row that was never written.
"""

from __future__ import annotations

import dataclasses
import random
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine_coordinator import check_empty, engine, known, oracle, run

from kdtp.config import DrafterConfig, EngineConfig
from kdtp.engine.pages import Content, PagePool, empty_text, page_key
from kdtp.engine.request import Request
from kdtp.engine.scheduler import QueueFull, Scheduler, share
from kdtp.messages import Tokens
from kdtp.types import PAGE_ROWS, SamplingParams
from tests.fake_target import VOCAB, continuation, model

LONG = tuple(i % VOCAB for i in range(150))
LIMIT = 420  # positions in a storm


# ---------------------------------------------------------------- pages


def keys_of(tokens, salt=""):
    keys = [empty_text(salt)]
    for first in range(0, len(tokens) - PAGE_ROWS + 1, PAGE_ROWS):
        keys.append(page_key(keys[-1], tokens[first : first + PAGE_ROWS]))
    return keys


def fill(pool, tokens, salt=""):
    """Pages for a text, kept for what they hold."""
    keys = keys_of(tokens, salt)
    pages = pool.take(len(keys) - 1)
    for i, page in enumerate(pages):
        pool.keep(page, keys[i + 1], Content(keys[i], tuple(tokens[i * PAGE_ROWS : (i + 1) * PAGE_ROWS])))
    return pages


def test_a_text_is_found_by_its_beginning():
    pool = PagePool(8)
    pages = fill(pool, LONG[:128])
    other = (*LONG[:64], *range(64))
    assert pool.find(keys_of(LONG), LONG) == pages
    assert pool.find(keys_of(other), other) == pages[:1]
    assert pool.find(keys_of(LONG[1:]), LONG[1:]) == []
    assert pool.find(keys_of(LONG, "salt"), LONG) == []
    # The same 64 tokens behind another beginning are another page.
    assert pool.find(keys_of(LONG[64:]), LONG[64:]) == []


def test_equal_keys_of_unequal_texts_are_no_hit():
    pool = PagePool(4)
    fill(pool, LONG[:64])
    assert pool.find(keys_of(LONG[:64]), (*LONG[:63], 0)) == []


def test_pages_are_evicted_longest_idle_and_last_of_their_text_first():
    pool = PagePool(4)
    first, second = fill(pool, LONG[:128]), fill(pool, LONG[1:129])
    pool.give(second)
    pool.give(first)
    assert (pool.free, pool.idle) == (4, 4)
    pool.take(1)
    assert pool.find(keys_of(LONG[1:]), LONG[1:]) == second[:1]
    pool.hold(second[:1])  # in use, so the others go first
    assert pool.take(2) == first[::-1] and pool.evictions == 3 and pool.free == 0
    assert pool.find(keys_of(LONG[1:]), LONG[1:]) == second[:1]
    assert pool.take(1) is None


def test_two_that_make_one_text_keep_it_once():
    pool = PagePool(4)
    first, second = fill(pool, LONG[:64]), fill(pool, LONG[:64])
    pool.check([first, second])
    pool.give(first)
    pool.give(second)
    pool.check([])
    assert pool.idle == 1 and pool.find(keys_of(LONG[:64]), LONG) == first


# ---------------------------------------------------------------- shares


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(1, 600), st.lists(st.integers(0, 900), max_size=12))
def test_shares(budget, rows):
    given_rows = share(budget, rows)
    assert all(0 <= g <= r for g, r in zip(given_rows, rows, strict=True))
    assert sum(given_rows) == min(budget, sum(rows))
    if any(rows):
        first = next(i for i, r in enumerate(rows) if r)
        assert given_rows[first] >= min(rows[first], budget / 2)


def test_half_is_for_the_first_and_the_rest_for_the_shortest():
    assert share(100, [0, 900, 300, 20]) == [0, 50, 30, 20]
    assert share(100, [10, 900, 0]) == [10, 90, 0]
    assert share(100, [100, 100]) == [100, 0]
    assert share(1, [5, 5]) == [1, 0]


def test_a_long_prompt_holds_up_a_stream_by_one_chunk_a_round():
    coordinator, workers = engine(prefill_chunk=16, kv_tokens=1024)
    coordinator.submit(Request(1, (1, 2), SamplingParams(max_tokens=30)))
    coordinator.step()
    for i in range(3):
        coordinator.submit(Request(2 + i, LONG[i:], SamplingParams(max_tokens=3)))
    widths = []
    original = workers[0].handle

    def watch(message):
        widths.append([len(seq.tokens) for seq in getattr(message, "seqs", ())])
        original(message)

    workers[0].link.handle = watch
    for _ in range(20):
        events = coordinator.step()
        assert any(event.message.request == 1 for event in events), "the stream stood still"
    assert all(sum(sizes) <= 1 + 16 + 3 for sizes in widths)
    while not coordinator.idle:
        coordinator.step()
    check_empty(coordinator, workers)


# ---------------------------------------------------------------- prefix cache


def one(coordinator, request_id, prompt, count=4, **fields):
    coordinator.submit(Request(request_id, tuple(prompt), SamplingParams(max_tokens=count), **fields))
    tokens, end = run(coordinator)[request_id]
    assert tokens == continuation(prompt, count)
    return end.usage


@pytest.mark.parametrize("drafter", [DrafterConfig(), DrafterConfig("ngram", budget=20)], ids=["plain", "ngram"])
def test_whole_pages_are_found_again_and_at_least_one_token_is_run(drafter):
    coordinator, workers = engine(drafter)
    assert one(coordinator, 1, LONG[:128]).cached_tokens == 0
    assert one(coordinator, 2, LONG[:128]).cached_tokens == 64  # the last token must be run
    assert one(coordinator, 3, LONG[:129]).cached_tokens == 128
    assert one(coordinator, 4, LONG[:63]).cached_tokens == 0
    assert one(coordinator, 5, (*LONG[:64], 9)).cached_tokens == 64
    assert one(coordinator, 6, LONG[:129], salt="other").cached_tokens == 0
    assert one(coordinator, 7, LONG[:129], salt="other").cached_tokens == 128
    totals = coordinator.totals()
    assert totals["prefix_hits"] == 64 + 128 + 64 + 128
    assert totals["prefix_queries"] == 128 + 128 + 129 + 63 + 65 + 129 + 129
    check_empty(coordinator, workers)


def test_an_answer_is_part_of_the_next_prompt():
    coordinator, _ = engine(oracle(block=8, budget=16), known(LONG[:10]))
    answer = continuation(LONG[:10], 140)
    assert one(coordinator, 1, LONG[:10], 140).cached_tokens == 0
    # 10 + 140 tokens, of which the last has no row; two whole pages.
    assert one(coordinator, 2, (*LONG[:10], *answer)).cached_tokens == 128


@pytest.mark.parametrize("length", range(112, 125))
def test_a_page_that_the_last_round_fills_is_kept_as_it_should_be(length):
    """Its rows are moved into place, though the request ends with that round."""
    prompt = LONG[:length]
    coordinator, workers = engine(oracle(block=8, budget=30, rank=4, seed=length), known(prompt))
    one(coordinator, 1, prompt, 17)
    assert workers[0].moved
    text = (*prompt, *continuation(prompt, 17))
    # The last token has a row only if it was a node of the last tree.
    assert one(coordinator, 2, (*text, 5)).cached_tokens == 128
    check_empty(coordinator, workers)


def test_without_the_cache_nothing_is_found():
    coordinator, workers = engine(prefix_cache=False)
    assert one(coordinator, 1, LONG).cached_tokens == one(coordinator, 2, LONG).cached_tokens == 0
    assert coordinator.pool.idle == 0
    check_empty(coordinator, workers)


def test_samples_of_one_prompt_run_it_once():
    coordinator, workers = engine(max_batch=4, prefill_chunk=40)
    for i in range(6):
        coordinator.submit(Request(i, LONG[:130], SamplingParams(max_tokens=3)))
    coordinator.submit(Request(6, LONG[1:30], SamplingParams(max_tokens=3)))  # not held up by those that wait
    coordinator.step()
    assert [r.id for r in coordinator.scheduler.running] == [0, 6]
    done = run(coordinator)
    assert [end.usage.cached_tokens for _, (_, end) in sorted(done.items())] == [0, 128, 128, 128, 128, 128, 0]
    assert all(tokens == continuation(LONG[:130], 3) for i, (tokens, _) in done.items() if i < 6)
    check_empty(coordinator, workers)


def test_who_waits_for_anothers_pages_runs_when_that_one_is_cancelled():
    coordinator, workers = engine(prefill_chunk=40)
    for i in range(2):
        coordinator.submit(Request(i, LONG[:130], SamplingParams(max_tokens=3)))
    coordinator.step()
    coordinator.cancel(0)
    assert run(coordinator)[1][0] == continuation(LONG[:130], 3)
    check_empty(coordinator, workers)


# ---------------------------------------------------------------- order and limits


def test_priority_then_order():
    coordinator, _ = engine(max_batch=1)
    for i, priority in enumerate((0, 5, 0, 5, -1)):
        coordinator.submit(Request(i, (i,), SamplingParams(max_tokens=2), priority=priority))
    assert list(run(coordinator)) == [1, 3, 0, 2, 4]


def test_the_last_in_order_is_preempted():
    coordinator, workers = engine(kv_tokens=320)
    for i, priority in enumerate((0, 0, 1)):
        coordinator.submit(Request(i, (i, i), SamplingParams(max_tokens=180), priority=priority))
    done = run(coordinator)
    assert list(done) == [2, 0, 1]
    assert [done[i][1].usage.preemptions > 0 for i in range(3)] == [True, True, False]
    assert all(tokens == continuation((i, i), 180) for i, (tokens, _) in done.items())
    check_empty(coordinator, workers)


def test_a_tree_takes_no_page_from_a_request():
    """Two requests fill the pool with their last pages; wide trees would need more, and are cut."""
    prompts = [tuple(range(i, i + 60)) for i in range(2)]
    answers = {p: tuple(continuation(p, 220)) for p in prompts}
    coordinator, _ = engine(oracle(budget=60, hit=(0.5,)), answers, kv_tokens=256)
    for i, prompt in enumerate(prompts):
        coordinator.submit(Request(i, prompt, SamplingParams(max_tokens=68)))
    done = run(coordinator)
    assert all(done[i][0] == continuation(p, 68) for i, p in enumerate(prompts))
    assert not coordinator.totals()["preemptions"]


@pytest.mark.parametrize("budget", [0, 1, 5, None, 99])
def test_a_request_has_its_own_width(budget):
    coordinator, workers = engine(oracle(budget=16), known((1, 2)))
    widths = []
    original = workers[0].handle

    def watch(message):
        widths.extend(len(seq.tokens) for seq in getattr(message, "seqs", ()) if seq.start >= 2)
        original(message)

    workers[0].link.handle = watch
    one(coordinator, 1, (1, 2), 40, budget=budget)
    assert max(widths) == 1 + {0: 0, 1: 1, 5: 5}.get(budget, 16)


def test_limits_of_the_queue():
    now = [0.0]
    coordinator, _ = engine(max_queue=3, max_queue_tokens=10)
    coordinator.scheduler._clock = lambda: now[0]
    coordinator.submit(Request(1, (1,) * 60, SamplingParams()))  # one alone may be longer
    with pytest.raises(QueueFull, match=r"60 tokens are waiting, this prompt has 1, .* max_queue_tokens 10") as caught:
        coordinator.submit(Request(2, (1,), SamplingParams()))
    assert caught.value.retry_after == 1.0  # nothing has left yet
    coordinator.cancel(1)
    for i in range(3):
        coordinator.submit(Request(3 + i, (1,), SamplingParams(max_tokens=1)))
    with pytest.raises(QueueFull, match="3 requests are waiting, the limit is max_queue 3"):
        coordinator.submit(Request(9, (1,), SamplingParams()))
    for i in range(3):
        now[0] += 4.0
        coordinator.cancel(3 + i)
    coordinator.submit(Request(11, (1,) * 10, SamplingParams()))
    with pytest.raises(QueueFull) as caught:
        coordinator.submit(Request(12, (1,), SamplingParams()))
    assert 2.0 < caught.value.retry_after < 4.0


# ---------------------------------------------------------------- everything at once


class Storm:
    """Random requests, steps and aborts against one engine; every text is checked as it comes."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        drafter = rng.choice(
            [
                DrafterConfig(),
                DrafterConfig("ngram", block=6, budget=12),
                oracle(block=5, budget=20, hit=(0.7,), rank=3),
            ]
        )
        # Texts of few kinds, so that they begin alike.
        self.stems = [tuple(rng.randrange(VOCAB) for _ in range(190)) for _ in range(3)]
        prompts = {s[:n]: tuple(continuation(s[:n], 60)) for s in self.stems for n in (40, 64, 100, 128)}
        self.coordinator, self.workers = engine(
            drafter, prompts, kv_tokens=rng.choice([448, 512, 640]), max_batch=rng.randint(2, 8), max_queue=6,
            prefill_chunk=rng.choice([7, 32, 128]), prefix_cache=rng.random() < 0.9,
            changes={"max_position_embeddings": LIMIT},
        )  # fmt: skip
        self.open: dict[int, Request] = {}
        self.texts: dict[int, list[int]] = {}
        self.count = self.refused = 0

    def submit(self) -> None:
        rng, stem = self.rng, self.rng.choice(self.stems)
        length = rng.choice([5, 40, 64, 100, 128, rng.randint(1, 190)])
        count = rng.choice([1, 3, 200, rng.randint(1, 300)])
        fields = {"priority": rng.choice((0, 0, 0, 1, 2)), "budget": rng.choice((None, None, 0, 3))}
        self.count += 1
        request = Request(self.count, stem[:length], SamplingParams(max_tokens=count), rng.random() < 0.8, **fields)
        request.salt = rng.choice(("", "", "b"))
        try:
            self.coordinator.submit(request)
        except QueueFull:
            self.refused += 1
        else:
            self.open[request.id], self.texts[request.id] = request, []

    def step(self) -> None:
        if not self.coordinator.idle:
            for event in self.coordinator.step():
                self.take(event.message)

    def abort(self) -> None:
        if self.open:
            event = self.coordinator.cancel(self.rng.choice(list(self.open)))
            self.take(event.message)

    def take(self, message) -> None:
        text, request = self.texts[message.request], self.open[message.request]
        if isinstance(message, Tokens):
            assert message.position == len(text)
            text += message.tokens
            return
        assert message.reason in ("length", "cancelled")
        want = min(request.params.max_tokens, LIMIT - len(request.prompt) + 1)
        assert message.reason == "cancelled" or len(text) == want
        assert text == continuation(request.prompt, len(text))
        del self.open[message.request]

    def check(self) -> None:
        scheduler = self.coordinator.scheduler
        self.coordinator.pool.check([r.pages for r in scheduler.running])
        assert not any(r.pages or r.start or r.begun for r in scheduler.waiting)
        assert scheduler.waiting_tokens == sum(r.goal for r in scheduler.waiting)
        assert scheduler.running == sorted(scheduler.running, key=lambda r: r.rank)
        assert {r.id for r in (*scheduler.running, *scheduler.waiting)} == set(self.open)
        assert set(self.workers[0].tables) == {r.id for r in scheduler.running if r.begun}
        assert self.coordinator._drafting <= {r.id for r in scheduler.running}


def storm(seed: int, operations: int) -> Storm:
    s = Storm(seed)
    for _ in range(operations):
        s.rng.choices((s.submit, s.step, s.abort), (3, 30, 1))[0]()
        s.check()
    while s.open:
        s.step()
    check_empty(s.coordinator, s.workers)
    return s


class Bare:
    """The scheduler alone. Texts are invented, alike for all that begin alike."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        config = EngineConfig("m", kv_tokens=64 * self.rng.randint(4, 14), max_batch=6, prefill_chunk=96, max_queue=9)
        config = dataclasses.replace(config, drafter=DrafterConfig("ngram", budget=self.rng.choice((0, 8, 70))))
        self.pool = PagePool(config.kv_tokens // PAGE_ROWS)
        self.scheduler = Scheduler(config, model(max_position_embeddings=256), self.pool)
        self.open: list[Request] = []
        self.count = 0

    def submit(self) -> None:
        rng = self.rng
        self.count += 1
        prompt = ((rng.randrange(3),) + (7,) * 200)[: rng.choice((5, rng.randint(1, 190)))]
        params = SamplingParams(max_tokens=rng.choice((3, 250 - len(prompt))))
        request = Request(self.count, prompt, params, priority=rng.randrange(2))
        with suppress(QueueFull):
            self.scheduler.check(request)
            self.scheduler.submit(request)
            self.open.append(request)

    def step(self) -> None:
        plan = self.scheduler.next()
        assert bool(plan.turns) == bool(self.open), "nobody gets on"
        assert sum(turn.rows for turn in plan.turns if turn.chunk) <= 96
        for turn in plan.turns:
            self.run(turn)

    def run(self, turn) -> None:
        request = turn.request
        request.begun = True
        if turn.chunk:
            request.start += turn.rows
            new = 0 if request.tokens or request.prefilling else 1
        else:
            assert turn.rows >= 1
            most = min(self.scheduler.budget(request), turn.rows - 1, 255 - request.start)
            new = 1 + self.rng.randint(0, max(0, most))
            request.start += new
        assert request.start <= PAGE_ROWS * len(request.pages)
        _, reason = request.extend([7] * new, 256)
        self.scheduler.keep(request)
        if reason:
            self.end(request)

    def end(self, request: Request) -> None:
        self.open.remove(request)
        self.scheduler.remove(request)

    def abort(self) -> None:
        if self.open:
            self.end(self.rng.choice(self.open))


@pytest.mark.parametrize("seed", range(10))
def test_ten_times_ten_thousand_operations_leave_every_page_where_it_belongs(seed):
    bare = Bare(seed)
    for turn in range(10_000):
        bare.rng.choices((bare.submit, bare.step, bare.abort), (20, 80, 1))[0]()
        if turn % 50 == 0:
            bare.pool.check([r.pages for r in bare.scheduler.running])
            assert bare.scheduler.waiting_tokens == sum(r.goal for r in bare.scheduler.waiting)
            assert len(bare.scheduler.running) + len(bare.scheduler.waiting) == len(bare.open)
    while bare.open:
        bare.step()
    bare.pool.check([])
    assert bare.count > 1500 and min(bare.scheduler.counters.values()) > 5


@pytest.mark.parametrize("seed", range(8))
def test_nothing_leaks_and_no_text_changes(seed):
    s = storm(seed, 500)
    assert s.count > 20


def test_the_storms_see_everything():
    total = {"preemptions": 0, "prefix_hits": 0, "prefix_evictions": 0}
    for seed in range(100, 106):
        s = storm(seed, 300)
        for name in total:
            total[name] += s.coordinator.totals()[name]
        total["refused"] = total.get("refused", 0) + s.refused
    assert min(total.values()) > 5, total
