"""The Python API, as in a notebook."""

from __future__ import annotations

import psutil
import pytest

import kdtp
from kdtp import Engine, SamplingParams
from kdtp.config import DrafterConfig, EngineConfig
from kdtp.engine.plan import plan
from kdtp.engine.rpc import EngineDead
from kdtp.messages import Finished, Tokens
from tests.processes import TINY

GOLDEN = plan(EngineConfig(str(TINY))).golden
PARAMS = SamplingParams(max_tokens=24)


def engine(**changes) -> Engine:
    return Engine.of(EngineConfig(str(TINY), threads=1, **changes))


def test_names():
    assert set(kdtp.__all__) == {"Engine", "SamplingParams", "__version__"}
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        _ = kdtp.Motor


def check(made: Engine) -> None:
    """Whole and streamed, many at once, left early, refused."""
    first, other, third = made.generate([GOLDEN.prompt, (1, 2, 3), GOLDEN.prompt], PARAMS)
    assert first.tokens == third.tokens == GOLDEN.tokens and first.usage.rounds == 3
    assert first.logits is None and first.finish_reason == "length"
    plain = made.generate([(1, 2, 3)], PARAMS, speculate=False, want_logits=True)[0]
    assert plain.tokens == other.tokens and plain.logits.shape == (24, 512)
    assert [int(row.argmax()) for row in plain.logits] == list(plain.tokens)
    rounds = []
    (shown,) = made.generate([GOLDEN.prompt], PARAMS, on_round=lambda index, each: rounds.append((index, each)))
    assert shown.tokens == GOLDEN.tokens and len(rounds) == 3
    for index, each in rounds:
        found = (*(each.tokens[node] for node in each.path[1:]), each.bonus)
        there = GOLDEN.tokens[each.position :][: len(found)]  # what is behind the last one asked for is not told
        assert index == 0 and there and there == found[: len(there)]
    each = made.generate([GOLDEN.prompt] * 2, [PARAMS, SamplingParams(max_tokens=3)])
    assert [len(c.tokens) for c in each] == [24, 3]

    events = list(made.stream(GOLDEN.prompt, PARAMS))
    assert [e.position for e in events[:-1]] == [0, 1, 9, 17] and isinstance(events[-1], Finished)
    for event in made.stream((1, 2), SamplingParams(max_tokens=400, ignore_eos=True)):
        assert isinstance(event, Tokens)
        break  # leaving early cancels
    assert made.generate([GOLDEN.prompt], PARAMS)[0].tokens == GOLDEN.tokens
    with pytest.raises(ValueError, match=r"prompt\[0\] = 600"):
        made.generate([(600,)], PARAMS)
    assert made.generate([GOLDEN.prompt], PARAMS)[0].tokens == GOLDEN.tokens


def loading(tp: int) -> Engine:
    """An engine, which has told what was loaded."""
    seen: list[tuple[int, int]] = []
    config = EngineConfig(str(TINY), tp=tp, threads=1, drafter=DrafterConfig("oracle"))
    made = Engine.of(config, lambda *progress: seen.append(progress))
    assert seen[-1][0] == seen[-1][1] > 0
    return made


def test_generate_and_stream():
    with loading(1) as made:
        check(made)


@pytest.mark.timeout(180)
def test_two_ranks_until_one_dies():
    with pytest.raises(EngineDead, match="rank 1"), loading(2) as made:
        check(made)
        for child in psutil.Process().children(recursive=True):
            if "worker" in child.cmdline() and child.environ().get("RANK") == "1":
                stream = made.stream((1, 2), SamplingParams(max_tokens=450, ignore_eos=True))
                next(stream)
                child.kill()
                list(stream)


def test_two_streams_take_turns():
    with engine() as made:
        streams = [made.stream(GOLDEN.prompt, PARAMS), made.stream((4, 5), PARAMS)]
        texts: list[list[int]] = [[], []]
        while streams[0] is not None:
            for i in (0, 1):
                event = next(streams[i], None)
                texts[i] += getattr(event, "tokens", ())
                streams[i] = streams[i] if event else None
        assert texts[0] == list(GOLDEN.tokens) and len(texts[1]) == 24


def test_a_refused_request_takes_nothing_with_it():
    with engine(max_queue=4, max_batch=2) as made:
        for _ in range(3):
            with pytest.raises(ValueError, match="99999"):
                made.generate([(1, 2)] * 3 + [(99999,)], PARAMS)
        many = made.generate([GOLDEN.prompt] * 30, PARAMS)  # more than the queue takes at once
        assert {done.tokens for done in many} == {GOLDEN.tokens}


def test_a_closed_engine_says_so():
    made = engine()
    made.close()
    with pytest.raises(ValueError, match="closed"):
        made.generate([GOLDEN.prompt], PARAMS)
    made.close()


def test_errors_name_the_thing():
    with pytest.raises(ValueError, match="no such file"):
        Engine("nowhere.kdtr")
    with pytest.raises(ValueError, match="tp = 5"):
        Engine(str(TINY), tp=5)
    with pytest.raises(ValueError, match="drafter = 'telepathy'"):
        Engine(str(TINY), drafter="telepathy")
    with engine() as made:
        with pytest.raises(ValueError, match="prompt"):
            made.generate([()], PARAMS)
        with pytest.raises(ValueError, match="params: 1 for 2 prompts"):
            made.generate([(1,), (2,)], [PARAMS])
