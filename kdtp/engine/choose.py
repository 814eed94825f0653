"""A rank's part in choosing tokens: edits and counts per sequence, and one collective for what needs all the logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from kdtp.messages import Begin
from kdtp.model.comm import Comm
from kdtp.model.shard import Shard
from kdtp.spec import pick
from kdtp.spec.logprobs import logprobs
from kdtp.spec.rules import Editor, mask
from kdtp.types import Logprob, Rule, SeqRows, depths


@dataclass(frozen=True)
class _Open:
    """A sequence that has begun; editor: None if its rule leaves logits alone; plain: its tokens are the argmax of what
    the model gives, and nothing more is wanted."""

    rule: Rule
    editor: Editor | None
    best: int
    plain: bool


class Chooser:
    """Chooses the tokens of this rank's sequences: the same on every rank, from its part of the logits.

    Collectives inside; which ones follows from rules and rows alone, so every rank makes the same.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._open: dict[int, _Open] = {}

    def begin(self, begun: Iterable[Begin]) -> None:
        """Get to know sequences."""
        for new in begun:
            rule = new.rule
            plain = not rule.edits and rule.temperature == 0.0 and new.logprobs < 0
            self._open[new.seq] = _Open(rule, self._editor(new) if rule.edits else None, new.logprobs, plain)

    def _editor(self, new: Begin) -> Editor:
        return Editor(new.rule, new.prompt_length, new.prompt, new.said, self._own_ids(), self._shard.device)

    def _own_ids(self) -> range:
        """The ids of this rank's logits; the last of the last rank may be beyond the vocabulary."""
        width = -(-self._shard.config.vocab_size // self._shard.comm.size)
        return range(self._shard.vocab_start, self._shard.vocab_start + width)

    def release(self, seqs: Iterable[int]) -> None:
        """Forget sequences."""
        for seq in seqs:
            del self._open[seq]

    def plain(self, seqs: Sequence[SeqRows]) -> bool:
        """Whether all tokens are the argmax of what the model gives, and nothing more is wanted."""
        return all([self._open[seq.seq].plain and not seq.masks for seq in seqs])  # noqa: C419 (faster)

    def best(self, logits: torch.Tensor) -> list[int]:
        """One id for each row of what `Shard.forward` has given, of a plain batch."""
        found = self._shard.best
        ids: list[int] = (self._argmax(logits) if found is None else found).tolist()
        return ids

    def choose(self, logits: torch.Tensor, seqs: Sequence[SeqRows]) -> tuple[list[int], list[Logprob]]:
        """One id per picked row of this rank's logits [R, V/N], which are overwritten; and what is wanted of them."""
        each = [self._open[seq.seq] for seq in seqs]
        unedited = self._wanted(logits, seqs, each)
        self._edit(logits, seqs, each)
        ids = self._draw(logits, seqs, [known.rule for known in each])
        return ids, self._logprobs(unedited, ids, seqs, each)

    def full(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits over the whole vocabulary, [R, V] float32, from every rank's part."""
        shards = self._shard.comm.all_gather(logits)
        return torch.cat(list(shards), dim=1)[:, : self._shard.config.vocab_size].contiguous()

    def _edit(self, logits: torch.Tensor, seqs: Sequence[SeqRows], each: Sequence[_Open]) -> None:
        for seq, known, rows in zip(seqs, each, _spans(seqs), strict=True):
            if seq.masks:
                mask(logits[rows.start : rows.stop], seq, self._own_ids())
            if known.editor is not None:
                known.editor.say(seq.said)
                if seq.pick:
                    known.editor.edit(logits[rows.start : rows.stop], seq)

    def _draw(self, logits: torch.Tensor, seqs: Sequence[SeqRows], by_seq: Sequence[Rule]) -> list[int]:
        rules = [rule for seq, rule in zip(seqs, by_seq, strict=True) for _ in range(seq.pick)]
        places = [p + 1 for seq in seqs for p in _positions(seq)]
        warm = [row for row, rule in enumerate(rules) if rule.temperature > 0.0]
        narrow = [row for row in warm if rules[row].filters]
        wide = [row for row in warm if not rules[row].filters]
        filtered = pick.sample(self.full(logits[narrow]), *_at(narrow, places, rules)) if narrow else None
        if wide:
            logits[wide] = pick.draw_scores(logits[wide], *_at(wide, places, rules), self._shard.vocab_start)
        ids = self._argmax(logits)
        if filtered is not None:
            ids[narrow] = filtered
        return ids.tolist()

    def _argmax(self, logits: torch.Tensor) -> torch.Tensor:
        return argmax(logits, self._shard.comm, self._shard.vocab_start)

    def _wanted(self, logits: torch.Tensor, seqs: Sequence[SeqRows], each: Sequence[_Open]) -> torch.Tensor | None:
        """The unedited logits of all rows whose log-probabilities are wanted."""
        rows = [row for known, span in zip(each, _spans(seqs), strict=True) if known.best >= 0 for row in span]
        return self.full(logits[rows]) if rows else None

    def _logprobs(
        self, logits: torch.Tensor | None, ids: Sequence[int], seqs: Sequence[SeqRows], each: Sequence[_Open]
    ) -> list[Logprob]:
        if logits is None or self._shard.comm.rank != 0:
            return []
        tokens: list[int] = []
        best: list[int] = []
        for seq, known, span in zip(seqs, each, _spans(seqs), strict=True):
            if known.best >= 0:
                tokens += [*seq.scored, *ids[span.start + len(seq.scored) : span.stop]]
                best += [known.best] * seq.pick
        return logprobs(logits, tokens, best)


def argmax(logits: torch.Tensor, comm: Comm, vocab_start: int) -> torch.Tensor:
    """The best id of all ranks for each row, [R]; logits [R, n]: of this rank's ids, from vocab_start on."""
    if comm.size == 1:
        return pick.argmax(logits)
    values, ids = pick.local_argmax(logits, vocab_start)
    # One collective for both: float32 holds ids of up to 2^24 exactly, and there are no more.
    best = comm.all_gather(torch.stack([values.float(), ids.float()]))
    return pick.merge_argmax(best[:, 0], best[:, 1].long())


def _at(rows: Sequence[int], places: Sequence[int], rules: Sequence[Rule]) -> tuple[list[int], list[Rule]]:
    return [places[row] for row in rows], [rules[row] for row in rows]


def _spans(seqs: Sequence[SeqRows]) -> list[range]:
    """The picked rows of each sequence."""
    ends = list(accumulate(seq.pick for seq in seqs))
    return [range(end - seq.pick, end) for seq, end in zip(seqs, ends, strict=True)]


def _positions(seq: SeqRows) -> list[int]:
    """Of the picked rows."""
    return [seq.start + depth for depth in depths(seq.parents)[len(seq.tokens) - seq.pick :]]
