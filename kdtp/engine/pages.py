"""Who has which page of the latent KV cache, and what the pages hold. The rows are the same on every rank, so one map
is true for all.

A whole page of committed rows is known by its content and kept after its last sequence has gone, until its room is
needed. Sequences whose text begins alike hold the same pages. Nobody writes to such a page: its rows are committed,
and trees stand behind the committed rows.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kdtp.types import PAGE_ROWS


@dataclass(frozen=True)
class Content:
    """64 tokens and what they follow: `parent` is the key of the page before, or of the empty text."""

    parent: bytes
    tokens: tuple[int, ...]


def empty_text(*salts: object) -> bytes:
    """The key of a text before its first page; texts of different salts share nothing."""
    return hashlib.sha256(repr(("kdtp prefix", *salts)).encode()).digest()


def page_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """A name for the whole text that ends with these 64 tokens."""
    return hashlib.sha256(parent + array("I", tokens).tobytes()).digest()


class PagePool:
    """Pages 0..total-1; each is free, held by sequences, or idle: not held, but kept for its content.

    Pages are taken from the free ones, the last given back first, then from the idle ones, the longest idle first.
    evictions: contents lost that way.
    """

    def __init__(self, total: int) -> None:
        assert total > 0, f"a pool of {total} pages"
        self.total = total
        self.evictions = 0
        self._free = list(range(total - 1, -1, -1))
        self._holders = [0] * total
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._content: dict[int, Content] = {}
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Pages that can be taken now."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        """Of these, pages that are kept for their content."""
        return len(self._idle)

    def take(self, count: int) -> list[int] | None:
        """`count` pages without content, or None if there are fewer."""
        if count > self.free:
            return None
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            assert self._holders[page] == 0 and page not in self._content, f"page {page} is not free"
            self._holders[page] = 1
        return pages

    def give(self, pages: Sequence[int]) -> None:
        """Take back a sequence's pages, in the order of its table."""
        # Backwards, so that the last rows of a text are evicted first: without those before they are of no use.
        for page in reversed(pages):
            assert self._holders[page] > 0, f"page {page} is not held"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._content:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def find(self, keys: Sequence[bytes], tokens: Sequence[int]) -> list[int]:
        """Pages that hold the beginning of a text; keys: of the empty text, then of as many pages as are looked for."""
        pages: list[int] = []
        for parent, key in itertools.pairwise(keys):
            page = self._page_of.get(key)
            first = len(pages) * PAGE_ROWS
            # A hash is no proof. The parent's content was compared before, so this compares the whole text.
            if page is None or self._content[page] != Content(parent, tuple(tokens[first : first + PAGE_ROWS])):
                break
            pages.append(page)
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """Share pages that `find` has found."""
        for page in pages:
            assert page in self._content, f"page {page} has no content to share"
            self._idle.pop(page, None)
            self._holders[page] += 1

    def keep(self, page: int, key: bytes, content: Content) -> None:
        """From now on a held page has this content, unless another page has it already."""
        assert self._holders[page] == 1 and page not in self._content, f"page {page} is shared already"
        if key not in self._page_of:
            self._content[page] = content
            self._page_of[key] = page
            self._key_of[page] = key

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        del self._content[page]
        self.evictions += 1
        return page

    def check(self, held: Sequence[Sequence[int]]) -> None:
        """Assert that every page is free, idle or held, as often as the given tables say."""
        count = [0] * self.total
        for page in (page for table in held for page in table):
            count[page] += 1
        assert count == self._holders, f"held {count}, counted {self._holders}"
        unheld = [page for page in range(self.total) if not count[page]]
        assert sorted([*self._free, *self._idle]) == unheld, f"{self._free} and {self._idle} of {unheld}"
        assert all(page in self._content for page in self._idle), "an idle page without content"
        assert not any(page in self._content for page in self._free), "a free page with content"
        assert self._key_of == {page: key for key, page in self._page_of.items()}, "keys and pages do not match"
        assert self._key_of.keys() == self._content.keys(), "keys and contents do not match"


def pages_for(rows: int) -> int:
    """Pages that hold `rows` rows."""
    return -(-rows // PAGE_ROWS)
