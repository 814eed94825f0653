"""The coordinator's bookkeeping against a target that stores tokens for KV: text, cuts, pages, counts, faults."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtp import draft
from kdtp.config import DrafterConfig, EngineConfig
from kdtp.engine.coordinator import Coordinator
from kdtp.engine.fleet import Fleet
from kdtp.engine.handshake import Handshake
from kdtp.engine.link import EngineFault, LocalLink
from kdtp.engine.request import Request
from kdtp.engine.scheduler import QueueFull
from kdtp.engine.watched import scores
from kdtp.messages import Failed, Finished, Ids, Tokens
from kdtp.proposals import Grown
from kdtp.types import ROOT, SamplingParams, SeqRows, Tree
from kdtp.watch import Round
from tests.fake_target import VOCAB, FakeWorker, continuation, model

EPOCH = 7


def engine(drafter: DrafterConfig | None = None, known=None, ranks: int = 1, changes=None, **settings):
    """A coordinator over fake workers: (coordinator, workers)."""
    config = EngineConfig("fake", tp=ranks, drafter=drafter or DrafterConfig(), **settings)
    target = model(**(changes or {}))
    links = [LocalLink(rank) for rank in range(ranks)]
    workers = [FakeWorker(link, config.pages(target), link.rank, ranks) for link in links]
    fleet = Fleet(links, EPOCH, config.step_timeout)
    coordinator = Coordinator(config, target, fleet, draft.make(config.drafter, known or {}, VOCAB))
    assert Handshake(fleet, config, 1).advance(0.1)
    return coordinator, workers


def run(coordinator: Coordinator, rounds=None) -> dict[int, tuple[list[int], Finished | Failed]]:
    """Every open request to its end: its tokens and terminal event; positions must be gapless. What is shown goes to
    `rounds`."""
    texts: dict[int, list[int]] = {}
    ends: dict[int, Finished | Failed] = {}
    while not coordinator.idle:
        for event in coordinator.step():
            message = event.message
            assert message.request not in ends, "an event after the terminal one"
            if isinstance(message, Round) and rounds is not None:
                rounds.append(message)
            elif isinstance(message, Tokens):
                text = texts.setdefault(message.request, [])
                assert message.position == len(text)
                text += message.tokens
            else:
                ends[message.request] = message
    return {request: (texts.get(request, []), end) for request, end in ends.items()}


def check_empty(coordinator: Coordinator, workers) -> None:
    coordinator.pool.check([])
    assert coordinator.pool.free == coordinator.pool.total
    assert not coordinator.scheduler.waiting_tokens and not coordinator._drafting
    assert all(not worker.tables for worker in workers)


def oracle(**changes) -> DrafterConfig:
    return DrafterConfig("oracle", **changes)


def known(prompt, count=220):
    return {tuple(prompt): tuple(continuation(prompt, count))}


def test_perfect_oracle_commits_a_full_block_each_round():
    prompt = (1, 2, 3)
    coordinator, workers = engine(oracle(block=8, budget=16), known(prompt))
    coordinator.submit(Request(1, prompt, SamplingParams(max_tokens=24)))
    tokens, end = run(coordinator)[1]
    assert tokens == continuation(prompt, 24) and end.reason == "length"
    assert (end.usage.rounds, end.usage.committed, end.usage.forwards) == (3, 24, 4)
    assert end.usage.accepted_by_depth == (3,) * 7
    check_empty(coordinator, workers)


def test_a_watched_request_shows_its_trees_as_often_as_was_asked():
    prompt = (1, 2, 3)
    coordinator, workers = engine(oracle(block=6, budget=12, hit=(1, 0.5), rank=2), known(prompt))
    coordinator.submit(Request(1, prompt, SamplingParams(max_tokens=40)))
    coordinator.submit(Request(2, prompt, SamplingParams(max_tokens=40)))
    coordinator.watch(1, 5)
    coordinator.watch(3, 5)  # ended, or never there
    rounds: list[Round] = []
    tokens, end = run(coordinator, rounds)[1]
    assert [r.request for r in rounds] == [1] * 5 and end.usage.rounds > 5 and not coordinator.watched
    text = tokens[:1]
    for shown in rounds:
        path = [shown.tokens[node] for node in shown.path]
        assert shown.position == len(text) and path[0] == text[-1] and 1 < len(shown.tokens) <= 13
        assert all(shown.parents[b] == a for a, b in zip(shown.path, shown.path[1:], strict=False))
        assert all(shown.scores[node] <= shown.scores[parent] <= 0 for node, parent in enumerate(shown.parents) if node)
        assert set(shown.timings_ms) == {"draft", "build", "verify", "accept", "commit"}
        text += [*path[1:], shown.bonus]
    assert text == tokens[: len(text)]
    assert sum(n * rounds for n, rounds in coordinator.accepted.items()) == coordinator.counters["accepted"]
    coordinator.submit(Request(4, prompt, SamplingParams(max_tokens=9)))
    coordinator.watch(4, 5)
    coordinator.watch(4, 0)
    run(coordinator, rounds)
    coordinator.submit(Request(5, prompt, SamplingParams(max_tokens=9), speculate=False))
    coordinator.watch(5, 5)
    coordinator.cancel(5)
    assert len(rounds) == 5 and not coordinator.watched
    check_empty(coordinator, workers)


def test_what_a_grammar_leaves_of_a_tree_keeps_its_scores():
    grown = Grown(Tree((9, 1, 2, 3, 1), (ROOT, 0, 0, 1, 2)), [0.0, -0.5, -1.0, -1.5, -2.0])
    left = SeqRows(1, 0, (9, 2, 1), (ROOT, 0, 1), 3)
    assert scores(left, grown) == [0.0, -1.0, -2.0]


def test_clients_can_be_told_before_a_step_that_may_take_long(monkeypatch):
    monkeypatch.setattr("kdtp.engine.fleet.time", SimpleNamespace(monotonic=lambda: 0.0))
    coordinator, _ = engine(step_timeout=0.5, prefill_chunk=100)
    told: list[float] = []
    coordinator.fleet.on_long = told.append
    coordinator.submit(Request(1, (1,) * 30, SamplingParams(max_tokens=4)))
    run(coordinator)
    assert told == [60.0], "nothing is known of a local rank before its first step; then it is quick"
    coordinator.fleet._seconds_per_row = 0.01
    coordinator.submit(Request(2, (2,) * 80, SamplingParams(max_tokens=1)))
    run(coordinator)
    assert told[1:] == [pytest.approx(8.0)], "ten times what its rows took before"


@pytest.mark.parametrize("budget", [0, 16])
def test_no_draft_is_plain_decoding_forward_for_forward(budget):
    coordinator, workers = engine(DrafterConfig("ngram", budget=budget) if budget == 0 else DrafterConfig("none"))
    coordinator.submit(Request(1, (5,), SamplingParams(max_tokens=30)))
    tokens, end = run(coordinator)[1]
    assert tokens == continuation((5,), 30)
    assert (end.usage.rounds, end.usage.forwards, end.usage.committed) == (29, 30, 29)
    assert workers[0].forwards == 30


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_any_draft_gives_the_text_of_plain_decoding(data):
    draw = data.draw
    batch = draw(st.integers(1, 8))
    prompts = [tuple(draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=90))) for _ in range(batch)]
    counts = [draw(st.integers(1, 40)) for _ in prompts]
    config = DrafterConfig(
        draw(st.sampled_from(["oracle", "ngram", "none"])),
        block=draw(st.integers(1, 12)),
        budget=draw(st.integers(0, 64)),
        topk=draw(st.integers(4, 16)),
        shape=draw(st.sampled_from(["tree", "chain"])),
        hit=tuple(draw(st.lists(st.floats(0, 1), min_size=1, max_size=6))),
        rank=draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 99)),
    )
    answers = {p: tuple(continuation(p, 60)) for p in prompts}
    coordinator, workers = engine(
        config, answers, max_batch=draw(st.integers(1, 8)), prefill_chunk=draw(st.integers(1, 70))
    )
    for i, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        coordinator.submit(Request(i, prompt, SamplingParams(max_tokens=count), speculate=draw(st.booleans())))
    for i, (tokens, end) in run(coordinator).items():
        assert tokens == continuation(prompts[i], counts[i])
        assert end.reason == "length" and end.usage.completion_tokens == counts[i]
    check_empty(coordinator, workers)


def test_stop_token_cuts_inside_an_accepted_run():
    prompt = (9, 9)
    text = continuation(prompt, 24)
    for stop_at in range(1, 20):
        stop = text[stop_at]
        first = text.index(stop)
        coordinator, workers = engine(oracle(block=8, budget=16), known(prompt))
        coordinator.submit(Request(1, prompt, SamplingParams(max_tokens=24, stop_tokens=(stop,))))
        tokens, end = run(coordinator)[1]
        assert tokens == text[: first + 1] and end.reason == "stop"
        assert end.usage.completion_tokens == first + 1
        assert end.usage.committed <= first + 1
        check_empty(coordinator, workers)


def test_stop_wins_over_length_when_both_fall_on_one_token():
    text = continuation((3,), 5)
    coordinator, _ = engine()
    coordinator.submit(Request(1, (3,), SamplingParams(max_tokens=5, stop_tokens=(text[4],))))
    tokens, end = run(coordinator)[1]
    assert end.reason == "stop" and tokens == text[: text.index(text[4]) + 1]


@pytest.mark.parametrize("ignore", [False, True])
def test_end_tokens_of_the_model(ignore):
    text = continuation((4,), 12)
    coordinator, _ = engine(changes={"eos_token_ids": (text[6],)})
    coordinator.submit(Request(1, (4,), SamplingParams(max_tokens=12, ignore_eos=ignore)))
    tokens, end = run(coordinator)[1]
    assert (tokens, end.reason) == ((text, "length") if ignore else (text[: text.index(text[6]) + 1], "stop"))


@pytest.mark.parametrize("length", range(56, 65))
@pytest.mark.parametrize("name", ["none", "oracle"])
def test_context_end_cuts_exactly_there(length, name):
    limit = 64
    prompt = tuple(i % VOCAB for i in range(length))
    coordinator, workers = engine(DrafterConfig(name, block=8, budget=16), known(prompt),
                                  changes={"max_position_embeddings": limit})  # fmt: skip
    coordinator.submit(Request(1, prompt, SamplingParams(max_tokens=100)))
    tokens, end = run(coordinator)[1]
    # The last token chosen is that of position `limit`, by the row of the last legal position.
    assert tokens == continuation(prompt, limit - length + 1) and end.reason == "length"
    check_empty(coordinator, workers)


def test_a_full_pool_makes_requests_wait_and_lose_their_rows_but_no_token():
    prompts = [tuple(range(i, i + 70)) for i in range(12)]
    coordinator, workers = engine(
        oracle(block=8, budget=8), {p: tuple(continuation(p, 140)) for p in prompts}, kv_tokens=384, prefill_chunk=64
    )
    for i, prompt in enumerate(prompts):
        coordinator.submit(Request(i, prompt, SamplingParams(max_tokens=115 + i)))
    coordinator.step()
    assert len(coordinator.scheduler.running) == 2 and len(coordinator.scheduler.waiting) == 10
    done = run(coordinator)
    assert coordinator.totals()["preemptions"] > 0
    assert sum(end.usage.preemptions for _, end in done.values()) == coordinator.totals()["preemptions"]
    assert all(done[i][0] == continuation(p, 115 + i) for i, p in enumerate(prompts))
    check_empty(coordinator, workers)


def test_random_cancels_leave_the_pool_full_and_the_others_untouched():
    rng = random.Random(5)
    coordinator, workers = engine(oracle(block=6, budget=12, hit=(0.7,), rank=3), known((1, 2)), kv_tokens=700)
    opened, texts, ended = {}, {}, {}
    for turn in range(3000):
        if rng.random() < 0.3 and len(opened) - len(ended) < 20:
            prompt = (1, 2) if rng.random() < 0.5 else tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 80)))
            opened[turn] = prompt
            coordinator.submit(Request(turn, prompt, SamplingParams(max_tokens=rng.randint(1, 40))))
        events = list(coordinator.step()) if not coordinator.idle else []
        if rng.random() < 0.1 and len(opened) > len(ended):
            victim = rng.choice([i for i in opened if i not in ended])
            event = coordinator.cancel(victim)
            events += [event] if event else []
        for event in events:
            message = event.message
            assert message.request not in ended
            if isinstance(message, Tokens):
                texts.setdefault(message.request, []).extend(message.tokens)
            else:
                ended[message.request] = message.reason
    while not coordinator.idle:
        coordinator.step()
    assert list(ended.values()).count("cancelled") > 100
    for i, tokens in texts.items():
        assert tokens == continuation(opened[i], len(tokens))
    check_empty(coordinator, workers)
    assert not coordinator._drafting


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ((1,) * 201, SamplingParams(), ["201", "200"]),
        ((1, VOCAB), SamplingParams(), ["prompt[1]", str(VOCAB)]),
        ((1,), SamplingParams(stop_tokens=(500,)), ["stop_tokens[0]", "500"]),
    ],
)
def test_a_request_that_cannot_run_is_refused_by_name(prompt, params, words):
    coordinator, _ = engine()
    with pytest.raises(ValueError) as caught:
        coordinator.submit(Request(1, prompt, params))
    assert all(word in str(caught.value) for word in words)


def test_a_request_larger_than_the_cache_is_refused():
    coordinator, _ = engine(kv_tokens=64)
    with pytest.raises(ValueError, match="need 3 KV pages, the cache has 1"):
        coordinator.submit(Request(1, (1,) * 60, SamplingParams(max_tokens=100)))


def test_the_queue_has_an_end():
    coordinator, _ = engine(max_queue=2)
    for i in range(2):
        coordinator.submit(Request(i, (1,), SamplingParams()))
    with pytest.raises(QueueFull, match="max_queue 2"):
        coordinator.submit(Request(2, (1,), SamplingParams()))


# ---------------------------------------------------------------- faults


def tamper(worker: FakeWorker, change) -> None:
    """Pass each Ids of a worker through `change`, which returns the messages to emit instead."""
    emit = worker.link.emit
    worker.link.emit = lambda message, frame=None: [
        emit(m, frame) for m in (change(message) if isinstance(message, Ids) else [message])
    ]


def test_ranks_that_part_are_noticed_in_the_same_step():
    coordinator, workers = engine(ranks=2)
    tamper(workers[1], lambda ids: [Ids(ids.epoch, ids.step, ids.rank, tuple((i + 1) % VOCAB for i in ids.ids))])
    coordinator.submit(Request(1, (1,), SamplingParams()))
    with pytest.raises(EngineFault, match="step 1: rank 1 chose"):
        coordinator.step()
    assert (coordinator.fleet.desync_checks, coordinator.fleet.desync_failures) == (1, 1)
    (event,) = coordinator.fail_all("engine", "ranks parted")
    assert event.message == Failed(1, "engine", "ranks parted") and coordinator.idle
    assert coordinator.pool.free == coordinator.pool.total


def test_stale_answers_are_dropped_and_counted():
    coordinator, workers = engine(ranks=2)

    def with_stale(ids: Ids) -> list[Ids]:
        others = ((ids.epoch + 1, ids.step, 1), (ids.epoch, ids.step - 1, 1), (ids.epoch, ids.step, 0))
        return [*(Ids(*other, (3,)) for other in others), ids, ids]

    tamper(workers[1], with_stale)
    coordinator.submit(Request(1, (1,), SamplingParams(max_tokens=5)))
    assert run(coordinator)[1][0] == continuation((1,), 5)
    assert coordinator.fleet.dropped()["stale"] >= 3 * 5


def test_a_silent_rank_is_named_at_the_deadline():
    coordinator, workers = engine(ranks=2, step_timeout=0.2)
    tamper(workers[1], lambda ids: [])
    coordinator.submit(Request(1, (1,), SamplingParams()))
    with pytest.raises(EngineFault, match=r"step 1 not answered in time by rank 1 .*last answered step 0"):
        coordinator.step()


def test_nan_logits_fail_their_own_request_only():
    coordinator, workers = engine()
    run_row = workers[0]._run
    workers[0]._run = lambda seq: [-1 if seq.seq == 2 and seq.start > 5 else i for i in run_row(seq)]
    for i in (1, 2):
        coordinator.submit(Request(i, (i, i), SamplingParams(max_tokens=10)))
    done = run(coordinator)
    assert done[1][0] == continuation((1, 1), 10)
    tokens, end = done[2]
    assert isinstance(end, Failed) and "NaN" in end.message and tokens == continuation((2, 2), 10)[: len(tokens)]
    check_empty(coordinator, workers)


def test_dead_drafter_is_reported(caplog):
    coordinator, _ = engine(oracle(hit=(0.0,)), known((1,), 300), changes={"max_position_embeddings": 400})
    coordinator.submit(Request(1, (1,), SamplingParams(max_tokens=250)))
    with caplog.at_level("WARNING", "kdtp"):
        run(coordinator)
    assert "no draft token accepted" in caplog.text
