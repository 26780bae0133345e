"""The block of one worker's cache in ``kvmesh status``."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvmesh.cli.status_cache import BAR_CELLS, bar_cells, cache_block, hits, moves, pins
from kvmesh.protocol.cache_report import CacheReport, TierReport


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_bar_shows_whatever_there_is_any_of(used: int, evictable: int, free: int) -> None:
    amounts, total = (used, evictable, free), used + evictable + free
    cells = bar_cells(used, evictable, total)
    assert sum(cells) == BAR_CELLS
    for amount, shown in zip(amounts, cells, strict=True):
        assert (shown > 0) == (amount > 0) or total == 0
        if total:
            assert abs(shown - amount * BAR_CELLS / total) <= 2


def test_hits_are_shares_of_the_blocks_that_were_asked_for() -> None:
    assert hits({}) == ""
    assert hits({"missed_blocks": 4}) == "hits 0% of 4 blocks: 0 full, 0 partial"
    counters = {"reused_full_blocks": 5, "reused_partial_blocks": 1, "missed_blocks": 2}
    assert hits(counters) == "hits 75% of 8 blocks: 5 full, 1 partial"


def test_moves_that_did_not_happen_are_not_mentioned() -> None:
    assert moves({"offloaded_pages": 0}) == ""
    counters = {"onboarded_pages": 3, "onboarded_bytes": 1_500_000, "dropped_pages": 2}
    assert moves(counters) == "onboarded 3 pages (1.5 MB), dropped 2 pages"


def test_a_tier_that_failed_is_no_free_room() -> None:
    def text(usable: bool) -> str:
        tier = TierReport(level=2, tier="disk", total=(135,), free=(135,), groups=(), usable=usable)
        console = Console(width=200)
        with console.capture() as capture:
            console.print(cache_block("context-0", "", CacheReport(tiers=(tier,))))
        return capture.get()

    assert "disabled" not in text(usable=True)
    assert re.search(r"disk +disabled +0 +0 +0 +0 +- +135", text(usable=False))
    assert "disk failed: off until this server starts again" in text(usable=False)


def test_pins_by_age() -> None:
    assert pins(CacheReport()) == ""
    assert (
        pins(CacheReport(pinned_pages_by_age=(0, 2, 1, 0))) == "pinned by transfers: 2 for under 10 s, 1 for under 60 s"
    )
