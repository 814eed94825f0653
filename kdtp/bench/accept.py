"""What drafts bring on held-out text: tokens per round of plain decoding, of chains and of trees."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import Any

from kdtp.config import ConfigError, DrafterConfig, EngineConfig
from kdtp.engine.api import Engine
from kdtp.messages import Usage
from kdtp.text.tokenizer import Tokenizer
from kdtp.train.corpus import Document
from kdtp.types import SamplingParams
from kdtp.watch import Round

PLAIN = "AR"
_WARM_UP = 16  # tokens before it counts


@dataclass(frozen=True)
class Way:
    """How to speculate. drafter: what its user calls it; method: AR, chain or tree; budget: of nodes, 0 with AR."""

    drafter: str
    method: str
    budget: int
    config: DrafterConfig


@dataclass
class Ranks:
    """Which candidate the target took: rounds by depth and by rank among its siblings, both from 1.

    reached: rounds whose nodes above this depth were accepted, and that drafted so deep.
    """

    taken: Counter[tuple[int, int]] = field(default_factory=Counter)
    reached: Counter[int] = field(default_factory=Counter)

    def add(self, shown: Round) -> None:
        """Count a verified tree."""
        depth = [0] * len(shown.tokens)
        rank, children = [0] * len(shown.tokens), [0] * len(shown.tokens)
        for node, parent in enumerate(shown.parents[1:], 1):  # siblings come best first
            children[parent] += 1
            depth[node], rank[node] = depth[parent] + 1, children[parent]
        self.reached.update(range(1, min(len(shown.path), max(depth)) + 1))
        self.taken.update((depth[node], rank[node]) for node in shown.path[1:])

    def shares(self) -> list[list[float]]:
        """Row d - 1: of the rounds that reached depth d, the part that took rank 1, 2, ... there."""
        widest = max((rank for _, rank in self.taken), default=0)
        return [
            [round(self.taken[d, rank] / self.reached[d], 4) for rank in range(1, widest + 1)]
            for d in sorted(self.reached)
        ]


@dataclass(frozen=True)
class Point:
    """One way at one temperature: the cost of each prompt's text, and the texts that parted from plain decoding.

    busy: processor time of this process in `busy_rounds` rounds, in seconds: other programs are not in it. No rounds:
    there is no such time, as processes of their own run the model, or no text had two rounds to take it between.
    """

    way: Way
    temperature: float
    usages: Sequence[Usage]
    ranks: Ranks
    parted: Sequence[int]
    busy: float
    busy_rounds: int

    def figures(self) -> dict[str, Any]:
        """Tokens per round (mean and standard deviation over the prompts), decoding speed, milliseconds per round."""
        each = [usage.committed / usage.rounds for usage in self.usages]
        rounds = sum(usage.rounds for usage in self.usages)
        stages = {stage: sum(u.timings_ms.get(stage, 0.0) for u in self.usages) for stage in ("draft", "verify")}
        spent = sum(ms for u in self.usages for stage, ms in u.timings_ms.items() if stage != "prefill")
        tokens = sum(usage.completion_tokens - 1 for usage in self.usages)  # the first is the prefill's
        return {
            "drafter": self.way.drafter,
            "method": self.way.method,
            "budget": self.way.budget,
            "temperature": self.temperature,
            "tokens_per_round": round(fmean(each), 4),
            "spread": round(stdev(each), 4) if len(each) > 1 else 0.0,
            "least": round(min(each), 4),
            "most": round(max(each), 4),
            "tokens_per_second": round(1e3 * tokens / spent, 2),
            "round_ms": round(spent / rounds, 3),
            "round_cpu_ms": round(1e3 * self.busy / self.busy_rounds, 3) if self.busy_rounds else None,
            **{f"{stage}_ms": round(ms / rounds, 3) for stage, ms in stages.items()},
            "taken_by_depth_and_rank": self.ranks.shares(),
            "equal_to_plain": len(self.usages) - len(self.parted),
            "prompts": len(self.usages),
        }


def prompts(
    documents: Sequence[Document], tokenizer: Tokenizer, count: int, length: int, seed: int
) -> list[tuple[str, list[int]]]:
    """Stretches of `length` tokens, [BOS] first, and the names of their files: one of each module, then seconds.

    ConfigError if fewer than `count` documents are so long.
    """
    chance = random.Random(seed)
    shuffled = chance.sample(documents, len(documents))
    turn: Counter[str] = Counter()
    places = []
    for document in shuffled:
        places.append((turn[document.module], document))
        turn[document.module] += 1
    found: list[tuple[str, list[int]]] = []
    for _, document in sorted(places, key=lambda place: place[0]):
        ids = tokenizer.encode(document.text) if len(found) < count else []
        if len(ids) >= 2 * length:
            start = chance.randrange(len(ids) - length)
            found.append((document.name, [*tokenizer.begin, *ids[start : start + length]][:length]))
    if len(found) < count:
        raise ConfigError(f"prompts = {count}: {len(found)} of the held-out files have at least {2 * length} tokens")
    return found


def ways(drafters: Mapping[str, DrafterConfig], budgets: Sequence[int], block: int) -> list[Way]:
    """Plain decoding, then a chain and the trees of each drafter."""
    found = [Way("none", PLAIN, 0, DrafterConfig("none"))]
    for name, config in drafters.items():
        found.append(Way(name, "chain", block - 1, replace(config, block=block, budget=block - 1, shape="chain")))
        found += [Way(name, "tree", budget, replace(config, block=block, budget=budget)) for budget in budgets]
    return found


@dataclass(frozen=True)
class Bench:
    """An engine without its drafter, prompts, and the texts to write: `tokens` long, prompt i with seed + i.

    ValueError as of SamplingParams.
    """

    config: EngineConfig
    prompts: Sequence[Sequence[int]]
    temperatures: Sequence[float]
    tokens: int
    seed: int

    def __post_init__(self) -> None:
        for temperature in self.temperatures:  # refused before anything is measured
            self._params(len(self.prompts), temperature, self.tokens)

    def run(self, ways: Sequence[Way], tell: Callable[[Way], object]) -> Generator[Point, None, None]:
        """Measure each way, the first one plain, at all temperatures; tell: called before each. Errors as of Engine."""
        assert ways[0].method == PLAIN, "nothing to compare with"
        plain: dict[float, list[tuple[int, ...]]] = {}
        for way in ways:
            tell(way)
            with Engine.of(replace(self.config, drafter=way.config)) as engine:
                for temperature in self.temperatures:
                    point, texts = self._measure(engine, way, temperature)
                    want = plain.setdefault(temperature, texts)
                    parted = [i for i, (text, same) in enumerate(zip(texts, want, strict=True)) if text != same]
                    yield replace(point, parted=parted)

    def _measure(self, engine: Engine, way: Way, temperature: float) -> tuple[Point, list[tuple[int, ...]]]:
        """Each prompt alone, so that a round is one text's."""
        ranks, usages, texts, busy, busy_rounds = Ranks(), [], [], 0.0, 0
        engine.generate([self.prompts[0]], self._params(0, temperature, min(_WARM_UP, self.tokens)))
        for i, prompt in enumerate(self.prompts):
            params = self._params(i, temperature, self.tokens)
            ends: list[float] = []  # of rounds

            def shown(index: int, found: Round, ends: list[float] = ends) -> None:
                ends.append(time.process_time())
                ranks.add(found)

            (done,) = engine.generate([prompt], params, on_round=shown)
            usages.append(done.usage)
            texts.append(done.tokens)
            if ends and self.config.tp == 1:  # else the ranks compute elsewhere
                busy, busy_rounds = busy + ends[-1] - ends[0], busy_rounds + len(ends) - 1
        return Point(way, temperature, usages, ranks, (), busy, busy_rounds), texts

    def _params(self, index: int, temperature: float, tokens: int) -> SamplingParams:
        return SamplingParams(max_tokens=tokens, temperature=temperature, seed=self.seed + index, ignore_eos=True)
