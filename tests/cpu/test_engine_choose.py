"""A rank's choice of tokens against numpy: every rule at every node with that node's own text, on any ranks."""

import dataclasses
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import ThreadComm
from msgspec import structs

import reference.pick
from kdtp.engine.choose import Chooser
from kdtp.messages import Begin
from kdtp.model.comm import Solo
from kdtp.types import NO_TOKEN, ROOT, Rule, SamplingParams, SeqRows
from reference.rules import Rule as Plain
from reference.rules import edited, log_softmax

VOCAB = 22  # no multiple of 4, so that the last of 4 ranks has padding

tokens = st.integers(0, VOCAB - 1)
some = st.lists(tokens, max_size=5, unique=True)
wanted = st.sampled_from([None, None, 0, 3])


@st.composite
def params(draw):
    """Parameters that use some of everything."""

    def often_off(off, *others):
        return draw(st.sampled_from([off, off, *others]))

    banned = draw(some)
    return SamplingParams(
        max_tokens=50,
        temperature=often_off(0.0, 0.3, 1.0, 1.7),
        top_k=often_off(0, 1, 5),
        top_p=often_off(1.0, 0.5, 0.95),
        min_p=often_off(0.0, 0.1),
        seed=draw(st.integers(-5, 5)),
        min_tokens=often_off(0, 3, 9),
        repetition_penalty=often_off(1.0, 1.3, 0.7),
        presence_penalty=often_off(0.0, 0.5, -1.5),
        frequency_penalty=often_off(0.0, 0.25, 1.1, -0.4),
        logit_bias=draw(st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 0.7, 3.0, 100.0]), max_size=4)),
        allowed_tokens=tuple(t for t in draw(st.lists(tokens, max_size=12, unique=True)) if t not in banned),
        banned_tokens=tuple(banned),
        logprobs=draw(wanted),
    )


def mirrored(rule: Rule, prompt_length: int) -> Plain:
    fields = {name: getattr(rule, name) for name in rule.__struct_fields__ if name != "held_until"}
    return Plain(**fields, min_tokens=max(0, rule.held_until - prompt_length))


def model_logits(text: tuple[int, ...]) -> np.ndarray:
    """A language: what follows a text, with ties, and of both signs."""
    rng = np.random.default_rng([len(text), *text])
    return np.round(rng.standard_normal(VOCAB) * 2, rng.integers(0, 4)).astype(np.float32)


def random_tree(rng: random.Random, root: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    edges = {(ROOT, root): None}
    for _ in range(rng.randint(0, 9)):
        edges.setdefault((rng.randrange(len(edges)), rng.choice((root, rng.randrange(VOCAB)))), None)
    return tuple(token for _, token in edges), tuple(parent for parent, _ in edges)


class Sequence:
    """A sequence as the coordinator sees it, and what its rows see."""

    def __init__(self, seq: int, params: SamplingParams, prompt: tuple[int, ...]) -> None:
        self.seq, self.prompt, self.emitted, self.told = seq, prompt, [], 0
        self.rule = params.rule(len(prompt), (1, 4))
        self.begin = Begin(seq, len(prompt), self.rule, prompt, (), -1 if params.logprobs is None else params.logprobs)

    def rows(self, rng: random.Random) -> SeqRows:
        if not self.emitted:
            chain = tuple(range(-1, len(self.prompt) - 1))
            return SeqRows(self.seq, 0, self.prompt, chain, 1)
        said, self.told = tuple(self.emitted[self.told :]), len(self.emitted)
        start = len(self.prompt) + len(self.emitted) - 1
        drafted = random_tree(rng, self.emitted[-1])
        return SeqRows(self.seq, start, *drafted, len(drafted[0]), said=said)

    def texts(self, rows: SeqRows) -> list[tuple[int, ...]]:
        """The emitted text at each picked row."""
        if not self.emitted:
            return [()]
        texts: list[tuple[int, ...]] = []
        for token, parent in zip(rows.tokens, rows.parents, strict=True):
            texts.append(tuple(self.emitted) if parent == ROOT else (*texts[parent], token))
        return texts


class Ranks:
    """A Chooser per rank, each with its part of the vocabulary."""

    def __init__(self, size: int) -> None:
        barrier, places = threading.Barrier(size), [None] * size
        self.width = -(-VOCAB // size)
        self.choosers = [
            Chooser(
                SimpleNamespace(
                    comm=ThreadComm(rank, size, barrier, places) if size > 1 else Solo(),
                    vocab_start=rank * self.width,
                    config=SimpleNamespace(vocab_size=VOCAB),
                    device=torch.device("cpu"),
                    best=None,
                )
            )
            for rank in range(size)
        ]

    def begin(self, begun):
        for chooser in self.choosers:
            chooser.begin(begun)

    def choose(self, logits: np.ndarray, seqs):
        """What each rank says, of a plain batch as the worker asks for it, too."""

        def said(chooser, logits):
            best = chooser.best(logits) if chooser.plain(seqs) else None
            found = chooser.choose(logits, seqs)
            assert best in (None, found[0])
            return found

        padded = np.full((len(logits), self.width * len(self.choosers)), -np.inf, np.float32)
        padded[:, :VOCAB] = logits
        parts = [torch.from_numpy(part.copy()) for part in np.split(padded, len(self.choosers), axis=1)]
        with ThreadPoolExecutor(len(parts)) as pool:
            return list(pool.map(said, self.choosers, parts))


@pytest.mark.parametrize("size", [1, 2, 4])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_every_node_is_decided_as_by_numpy_with_its_own_text(size, data):
    rng = random.Random(data.draw(st.integers(0, 1 << 30)))
    seqs = [
        Sequence(seq, data.draw(params()), tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 5))))
        for seq in range(rng.randint(1, 3))
    ]
    ranks = Ranks(size)
    ranks.begin([seq.begin for seq in seqs])
    for _ in range(4):
        rows = [seq.rows(rng) for seq in seqs]
        texts = [(seq, text) for seq, r in zip(seqs, rows, strict=True) for text in seq.texts(r)]
        logits = np.stack([model_logits(seq.prompt + text) for seq, text in texts])
        (ids, logprobs), *others = ranks.choose(logits, rows)
        assert all(other == (ids, []) for other in others)
        assert ids == [by_numpy(row, seq, text) for row, (seq, text) in zip(logits, texts, strict=True)]
        told = [i for i, (seq, _) in enumerate(texts) if seq.begin.logprobs >= 0]
        check_logprobs(logprobs, logits[told], [ids[i] for i in told], [texts[i][0].begin.logprobs for i in told])
        first = 0
        for seq, r in zip(seqs, rows, strict=True):
            # The root's choice; if its rule leaves none, anything, to go on.
            seq.emitted.append(max(ids[first], 0))
            first += r.pick


def by_numpy(row: np.ndarray, seq: Sequence, text: tuple[int, ...]) -> int:
    rule = mirrored(seq.rule, len(seq.prompt))
    if np.isneginf(edited(row, rule, seq.prompt, text)).all():
        return NO_TOKEN
    return reference.pick.choose(row, len(seq.prompt + text), rule, seq.prompt, text)


def check_logprobs(found, logits, ids, best):
    keep = [i for i, token in enumerate(ids) if token != NO_TOKEN]
    found, logits, ids, best = [found[i] for i in keep], logits[keep], [ids[i] for i in keep], [best[i] for i in keep]
    assert [known.token for known in found] == ids
    for known, row, count in zip(found, logits, best, strict=True):
        law = log_softmax(row)
        order = np.argsort(-row, kind="stable")
        assert known.logprob == pytest.approx(law[known.token], abs=1e-5)
        assert known.rank == 1 + list(order).index(known.token)
        assert [token for token, _ in known.best] == order[:count].tolist()
        assert [value for _, value in known.best] == pytest.approx(law[order[:count]].tolist(), abs=1e-5)


def test_a_row_does_not_depend_on_its_neighbours():
    rng = random.Random(1)
    alone, together = Ranks(1), Ranks(1)
    loud = SamplingParams(temperature=1.1, frequency_penalty=0.5, logit_bias={3: 4.0}, top_p=0.8, logprobs=2)
    quiet = SamplingParams(temperature=0.9, repetition_penalty=1.2, seed=7, logprobs=5)
    seqs = [Sequence(0, loud, (1, 2)), Sequence(1, quiet, (3, 3, 5)), Sequence(2, SamplingParams(), (4,))]
    together.begin([seq.begin for seq in seqs])
    alone.begin([seqs[1].begin])
    for _ in range(12):
        rows = [seq.rows(rng) for seq in seqs]
        parts = [np.stack([model_logits(s.prompt + t) for t in s.texts(r)]) for s, r in zip(seqs, rows, strict=True)]
        ((ids, known),) = together.choose(np.concatenate(parts), rows)
        (mine,) = alone.choose(parts[1], [rows[1]])
        before = rows[0].pick
        # Bit for bit, log-probabilities too.
        assert mine == (ids[before : before + rows[1].pick], known[before:])
        for seq, at in zip(seqs, (0, before, -rows[2].pick), strict=True):
            seq.emitted.append(ids[at])


def test_prompt_tokens_are_scored_instead_of_what_was_chosen():
    ranks = Ranks(2)
    ranks.begin([Begin(0, 4, Rule(), logprobs=1)])
    prompt = (5, 6, 7, 8)
    logits = np.stack([model_logits(prompt[: i + 1]) for i in range(4)])
    (ids, found), _ = ranks.choose(logits, [SeqRows(0, 0, prompt, (-1, 0, 1, 2), 4, scored=prompt[1:])])
    check_logprobs(found, logits, [6, 7, 8, ids[3]], [1] * 4)
    assert ids == logits.argmax(1).tolist()


def test_a_rule_that_leaves_nothing_has_no_token():
    ranks = Ranks(2)
    rules = [Rule(allowed=(3,), banned=(3,)), Rule(allowed=(3,), banned=(3,), temperature=1.0), Rule(allowed=(3,))]
    ranks.begin([Begin(seq, 1, rule) for seq, rule in enumerate(rules)])
    logits = np.stack([model_logits((1,))] * 3)
    (ids, _), _ = ranks.choose(logits, [SeqRows(seq, 0, (1,), (-1,), 1) for seq in range(3)])
    assert ids == [NO_TOKEN, NO_TOKEN, 3]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_masks_come_before_everything_else(size):
    """As if the ids that a row's mask does not have were banned at that row alone."""
    rng = random.Random(size)
    params = SamplingParams(temperature=1.2, seed=1, frequency_penalty=0.5, logit_bias={2: 3.0}, logprobs=1)
    for case in range(30):
        seqs = [Sequence(0, params if case % 2 else SamplingParams(), (1, 2)), Sequence(1, SamplingParams(), (3,))]
        for seq in seqs:
            seq.emitted.append(5)
        rows = [seq.rows(rng) for seq in seqs]
        sets = [frozenset(rng.sample(range(VOCAB), rng.randint(1, 6))) for _ in range(3)]
        which = tuple(rng.randrange(3) for _ in range(rows[0].pick))
        packed = tuple(sum(1 << i for i in ids).to_bytes(rng.choice((3, 8)), "little") for ids in sets)
        rows[0] = structs.replace(rows[0], masks=packed, mask_of=which, said=(5,))
        ranks = Ranks(size)
        ranks.begin([structs.replace(seq.begin, prompt=seq.prompt) for seq in seqs])
        texts = [(seq, text) for seq, r in zip(seqs, rows, strict=True) for text in seq.texts(r)]
        logits = np.stack([model_logits(seq.prompt + text) for seq, text in texts])
        (ids, _), *_ = ranks.choose(logits, rows)
        forbidden = [tuple(set(range(VOCAB)) - sets[i]) for i in which] + [()] * rows[1].pick
        for token, row, (seq, text), banned in zip(ids, logits, texts, forbidden, strict=True):
            rule = dataclasses.replace(mirrored(seq.rule, len(seq.prompt)), banned=banned)
            assert token == reference.pick.choose(row, len(seq.prompt + text), rule, seq.prompt, text)


def test_released_sequences_are_forgotten():
    ranks = Ranks(1)
    ranks.begin([Begin(0, 1, Rule(allowed=(3,)))])
    ranks.choosers[0].release([0])
    with pytest.raises(KeyError):
        ranks.choose(np.zeros((1, VOCAB), np.float32), [SeqRows(0, 0, (1,), (-1,), 1)])
    ranks.begin([Begin(0, 1, Rule())])
    ((ids, _),) = ranks.choose(np.zeros((1, VOCAB), np.float32), [SeqRows(0, 0, (1,), (-1,), 1)])
    assert ids == [0]


def test_the_reference_by_hand():
    """What each edit does, in the order of OpenAI's, vLLM's and Hugging Face's documents."""
    logits = np.array([2.0, -2.0, 1.0, 0.5, -1.0], np.float32)
    rule = Plain(
        allowed=(0, 1, 2, 3), banned=(3,), held=(2,), min_tokens=2, logit_bias=((0, -1.0),),
        repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25,
    )  # fmt: skip
    inf = np.inf
    # Id 0: biased, then halved for the prompt; id 1: doubled, counted twice.
    assert edited(logits, rule, (0,), (1,)).tolist() == [0.5, -4.75, -inf, -inf, -inf]
    assert edited(logits, rule, (0,), (1, 1)).tolist() == [0.5, -5.25, 1.0, -inf, -inf]
