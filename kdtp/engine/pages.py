"""Who has which page of the latent KV cache. The rows are the same on every rank, so one map is true for all."""

from __future__ import annotations

from kdtp.types import PAGE_ROWS


class PagePool:
    """Pages 0..total-1; each is free or taken, never both. The last page given back is taken first."""

    def __init__(self, total: int) -> None:
        assert total > 0, f"a pool of {total} pages"
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        """Pages that can be taken now."""
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...] | None:
        """`count` pages, or None if there are fewer."""
        if count > len(self._free):
            return None
        pages = tuple(self._free.pop() for _ in range(count))
        self._taken.update(pages)
        return pages

    def give(self, pages: tuple[int, ...]) -> None:
        """Take back pages of a request that has ended."""
        assert self._taken.issuperset(pages), f"pages {sorted(set(pages) - self._taken)} are not taken"
        self._taken.difference_update(pages)
        self._free.extend(reversed(pages))


def pages_for(rows: int) -> int:
    """Pages that hold `rows` rows."""
    return -(-rows // PAGE_ROWS)
