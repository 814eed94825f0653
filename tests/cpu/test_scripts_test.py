"""scripts/test: what its options promise is kept by the versions that are installed."""

from __future__ import annotations

import pytest


@pytest.mark.xdist_group("kept-together")
def test_groups_are_kept_together(request: pytest.FixtureRequest) -> None:
    """pytest-xdist 3.8 loses groups with pytest 9.2, without a word: each worker then makes what a group shares."""
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@kept-together")
