"""§6.5, T16: which blocks of a prompt go out with which chunk."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, PageLayout
from kvmesh.protocol.transfer import Aux
from kvmesh.transceiver.parts import HeldPages
from kvmesh.transceiver.promises import OutgoingSlice, Wanted, slice_pages
from kvmesh.transceiver.routes import plan_routes
from kvmesh.transceiver.runs import MissingPageError
from kvmesh.transceiver.slices import BlockSpan, chunk_blocks, group_spans, pipelining_obstacle

T = 4


def spans(chunks: list[tuple[int, int]], prompt: int) -> list[tuple[int, int]]:
    return [
        tuple(chunk_blocks(start, end, T, is_first=number == 0, is_last=end == prompt))
        for number, (start, end) in enumerate(chunks)
    ]


@pytest.mark.parametrize(
    ("chunks", "prompt", "expected"),
    [
        ([(0, 6), (6, 12), (12, 32)], 32, [(0, 1), (1, 3), (3, 8)]),
        ([(6, 14), (14, 32)], 32, [(0, 3), (3, 8)]),
        ([(12, 24), (24, 32)], 32, [(0, 6), (6, 8)]),
        ([(0, 30)], 30, [(0, 8)]),
        ([(0, 3), (3, 5)], 5, [(0, 0), (0, 2)]),
        ([(0, 8), (8, 9)], 9, [(0, 2), (2, 3)]),
    ],
    ids=str,
)
def test_chunks_and_their_blocks(chunks: list[tuple[int, int]], prompt: int, expected: list[tuple[int, int]]) -> None:
    assert spans(chunks, prompt) == expected


def test_a_chunk_inside_one_block_sends_nothing() -> None:
    assert chunk_blocks(5, 7, T, is_first=False, is_last=False).is_empty


@given(
    st.integers(1, 200),
    st.integers(0, 199),
    st.lists(st.integers(1, 40), max_size=12),
    st.integers(1, 16),
)
def test_slices_cover_the_prompt_exactly(prompt: int, reused: int, lengths: list[int], block: int) -> None:
    bounds = [min(reused, prompt - 1)]
    for length in lengths:
        if bounds[-1] + length < prompt:
            bounds.append(bounds[-1] + length)
    bounds.append(prompt)
    found = [
        chunk_blocks(start, end, block, is_first=start == bounds[0], is_last=end == prompt)
        for start, end in pairwise(bounds)
    ]
    assert found[0].first == 0
    assert found[-1].end == -(-prompt // block)
    for before, after in pairwise(found):
        assert before.end == after.first, "neither gap nor overlap"
    for (_, end), span in zip(pairwise(bounds), found, strict=True):
        assert span.end * block <= end or end == prompt, "a block that still changes stays"


def test_windowed_groups_go_whole_with_the_last_slice() -> None:
    windows = [None, 16, 64]
    assert group_spans(BlockSpan(1, 3), windows, 32, is_last=False) == [(1, 3), (1, 1), (1, 3)]
    assert group_spans(BlockSpan(3, 8), windows, 32, is_last=True) == [(3, 8), (0, 8), (3, 8)]
    # A window that is as long as the prompt leaves nothing behind.
    assert group_spans(BlockSpan(1, 3), [32], 32, is_last=False) == [(1, 3)]


def test_what_cannot_be_pipelined_is_said() -> None:
    """T18."""
    assert pipelining_obstacle(generation_first=True) is None
    assert "schedule_style generation_first" in (pipelining_obstacle(generation_first=False) or "")
    obstacle = pipelining_obstacle(generation_first=True, beam_width=2)
    assert obstacle == "enable_pipelined_transfer requires beam_width == 1, got 2"


# Both sides of the slices: what the owner sends is what the receiver lacks, once.

WINDOW = 8


def layout() -> PageLayout:
    layers = (
        LayerCacheSpec(layer_index=0, num_kv_heads=1, head_dim=8, dtype="float32", window=None),
        LayerCacheSpec(layer_index=1, num_kv_heads=1, head_dim=8, dtype="float32", window=WINDOW),
    )
    return PageLayout.build(CacheRequirements(layers), T)


AUX = Aux(first_tokens=[1], seed=0, prompt_tokens=1)


def outgoing(number: int, span: BlockSpan, held: list[np.ndarray], prompt: int, *, is_last: bool) -> OutgoingSlice:
    parts = group_spans(span, [None, WINDOW], prompt, is_last=is_last)
    kept = [HeldPages(ids if is_last or not sent.is_empty else ids[:0]) for ids, sent in zip(held, parts, strict=True)]
    return OutgoingSlice(number, span, parts, kept, AUX if is_last else None)


@given(
    st.integers(1, 80),
    st.lists(st.integers(1, 30), max_size=6),
    st.integers(0, 20),
    st.data(),
)
def test_every_wanted_page_goes_out_once(
    prompt: int, lengths: list[int], first_missing: int, data: st.DataObject
) -> None:
    blocks = -(-prompt // T)
    first = [min(first_missing, blocks), data.draw(st.integers(0, blocks))]
    live = max(0, prompt + 1 - WINDOW) // T  # blocks in front of it have lost their pages
    held = [np.arange(100, 100 + blocks, dtype=np.int32), np.arange(200, 200 + blocks, dtype=np.int32)]
    pages = [np.arange(300, 300 + blocks, dtype=np.int32), np.arange(400, 400 + blocks, dtype=np.int32)]
    if prompt > WINDOW:
        held[1][:live] = pages[1][:live] = -1
    wanted = Wanted(first, [ids[begin:] for ids, begin in zip(pages, first, strict=True)])
    bounds = [0]
    for length in lengths:
        if bounds[-1] + length < prompt:
            bounds.append(bounds[-1] + length)
    bounds.append(prompt)
    routes = plan_routes(layout(), layout())
    moved: list[tuple[int, int]] = []
    for number, (start, end) in enumerate(pairwise(bounds)):
        is_last = end == prompt
        span = chunk_blocks(start, end, T, is_first=number == 0, is_last=is_last)
        if span.is_empty and not is_last:
            continue
        known = [ids[: span.end] for ids in held]
        found = slice_pages(outgoing(number, span, known, prompt, is_last=is_last), routes, wanted)
        for route, source in zip(routes, found.sources, strict=True):
            moved += zip(source.ids.tolist(), found.targets[route.receiver_group].tolist(), strict=True)
    expected = [
        (int(own), int(theirs))
        for group in (0, 1)
        for own, theirs in zip(held[group][first[group] :], pages[group][first[group] :], strict=True)
        if theirs >= 0
    ]
    assert sorted(moved) == sorted(expected)


def test_a_page_that_is_not_held_is_an_error() -> None:
    held = [np.array([1, -1], dtype=np.int32), np.array([1, 2], dtype=np.int32)]
    wanted = Wanted([0, 0], [np.array([5, 6], dtype=np.int32)] * 2)
    piece = outgoing(0, BlockSpan(0, 2), held, 8, is_last=True)
    with pytest.raises(MissingPageError, match="block 1 is wanted"):
        slice_pages(piece, plan_routes(layout(), layout()), wanted)
