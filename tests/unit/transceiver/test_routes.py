"""Unequal peers: what the owner's pages give to the receiver's, whatever ranks share them (semantics §6.7)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, PageLayout
from kvmesh.cache.sharding import shard_requirements
from kvmesh.transceiver.parts import HeldPages, Source, choose_sources, decode_sources, encode_tiers, make_parts
from kvmesh.transceiver.planes.base import Part
from kvmesh.transceiver.routes import Route, RouteError, plan_routes
from kvmesh.transceiver.runs import MissingPageError

TOKENS_PER_BLOCK = 2
HEAD_DIM = 4


def requirements(num_layers: int, heads: int, windows: list[int | None]) -> CacheRequirements:
    return CacheRequirements(
        tuple(
            LayerCacheSpec(
                layer_index=layer,
                num_kv_heads=heads,
                head_dim=HEAD_DIM,
                dtype="float32",
                window=windows[layer % len(windows)],
            )
            for layer in range(num_layers)
        )
    )


def layout(num_layers: int, heads: int, windows: list[int | None], tp_size: int, pp_size: int) -> PageLayout:
    return PageLayout.build(
        shard_requirements(requirements(num_layers, heads, windows), tp_size, pp_size), TOKENS_PER_BLOCK
    )


class Memory:
    """The pools of one engine, device and host, and the blocks of one prompt in them."""

    def __init__(self, of: PageLayout, num_blocks: int, rng: np.random.Generator, *, host: bool = False) -> None:
        self.layout = of
        slots = num_blocks * len(of.groups) + 3
        tiers = 2 if host else 1
        self.pools = [np.zeros((slots, pool.page_bytes), np.uint8) for _ in range(tiers) for pool in of.pools]
        self.held: list[HeldPages] = []
        free = [list(rng.permutation(slots)) for _ in self.pools]
        for group in of.groups:
            chosen = rng.integers(0, tiers, num_blocks).astype(np.uint8)
            ids = [free[group.pool + tier * len(of.pools)].pop() for tier in chosen]
            self.held.append(HeldPages(np.array(ids, np.int32), chosen if host else None))

    def page(self, group: int, block: int) -> np.ndarray:
        ids, tiers = self.held[group]
        tier = 0 if tiers is None else int(tiers[block])
        return self.pools[self.layout.groups[group].pool + tier * len(self.layout.pools)][ids[block]]

    def buffers(self, group: int, block: int) -> list[tuple[tuple[int, str, int], np.ndarray]]:
        """((layer, role, head), bytes of that head) of a page."""
        found = []
        for buffer in self.layout.groups[group].buffers:
            nbytes = buffer.nbytes // buffer.num_kv_heads
            for head in range(buffer.num_kv_heads):
                begin = buffer.offset_bytes + head * nbytes
                key = (buffer.layer, buffer.role, buffer.first_kv_head + head)
                found.append((key, self.page(group, block)[begin : begin + nbytes]))
        return found


def content(key: tuple[int, str, int], block: int) -> np.ndarray:
    """What one head of one layer keeps of a block, unlike any other."""
    layer, role, head = key
    seed = [layer, int(role == "v"), head, block]
    return np.random.default_rng(seed).integers(1, 256, TOKENS_PER_BLOCK * HEAD_DIM * 4, dtype=np.uint8)


def move(parts: list[Part], owner: Memory, receiver: Memory) -> None:
    """What a plane does at the receiver."""
    for part in parts:
        for to, origin in zip(part.local, part.remote, strict=True):
            piece = owner.pools[part.remote_pool][origin, part.remote_offset : part.remote_offset + part.nbytes]
            receiver.pools[part.local_pool][to, part.local_offset : part.local_offset + part.nbytes] = piece


class Peers(NamedTuple):
    heads: int
    num_layers: int
    windows: list[int | None]
    owner: tuple[int, int]
    receiver: tuple[int, int]


@st.composite
def peers(draw: st.DrawFn) -> Peers:
    heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    num_layers = draw(st.integers(1, 5))
    fitting = [size for size in range(1, 9) if heads % size == 0 or size % heads == 0]
    ranks = st.tuples(st.sampled_from(fitting), st.integers(1, min(3, num_layers)))
    windows = draw(st.lists(st.sampled_from([None, 4, 8]), min_size=1, max_size=3))
    return Peers(heads, num_layers, windows, draw(ranks), draw(ranks))


@given(peers(), st.integers(1, 4), st.integers(0, 2**32), st.booleans(), st.data())
@settings(deadline=None, max_examples=150)
def test_reassembled_kv_is_the_source(case: Peers, num_blocks: int, seed: int, host: bool, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    theirs = layout(case.num_layers, case.heads, case.windows, *case.owner)
    mine = layout(case.num_layers, case.heads, case.windows, *case.receiver)
    assert theirs.digest("m") == mine.digest("m")
    owner, receiver = Memory(theirs, num_blocks, rng, host=host), Memory(mine, num_blocks, rng)
    for group in range(len(theirs.groups)):
        for block in range(num_blocks):
            for key, place in owner.buffers(group, block):
                place[:] = content(key, block)

    # What each side has, or keeps no more, differs from group to group of different windows.
    first_of_window = {window: data.draw(st.integers(0, num_blocks)) for window in {g.window for g in mine.groups}}
    gone_of_window = {window: data.draw(st.integers(0, num_blocks)) for window in first_of_window}
    first = [first_of_window[group.window] for group in mine.groups]
    wanted = [receiver.held[group.group_id].ids[first[group.group_id] :].copy() for group in mine.groups]
    for group in mine.groups:
        wanted[group.group_id][: max(0, gone_of_window[group.window] - first[group.group_id])] = -1
    for group in theirs.groups:
        owner.held[group.group_id].ids[: gone_of_window[group.window]] = -1

    routes = plan_routes(theirs, mine)
    chosen = choose_sources(routes, owner.held, first, wanted)
    sources = decode_sources([source.ids for source in chosen], encode_tiers(chosen))
    targets = [ids[ids >= 0] for ids in wanted]
    parts = make_parts(routes, sources, targets, owner=theirs, receiver=mine, side="receiver")
    mirrored = make_parts(routes, chosen, targets, owner=theirs, receiver=mine, side="owner")
    assert [_mirror(part) for part in mirrored] == [_plain(part) for part in parts]
    move(parts, owner, receiver)

    for group in mine.groups:
        for block in range(num_blocks):
            moved = block >= max(first[group.group_id], gone_of_window[group.window])
            for key, place in receiver.buffers(group.group_id, block):
                assert np.array_equal(place, content(key, block) if moved else np.zeros_like(place))


def _plain(part: Part) -> tuple[object, ...]:
    return tuple(value.tolist() if isinstance(value, np.ndarray) else value for value in part)


def _mirror(part: Part) -> tuple[object, ...]:
    local_pool, local, remote_pool, remote, nbytes, local_offset, remote_offset = _plain(part)
    return (remote_pool, remote, local_pool, local, nbytes, remote_offset, local_offset)


def ranks_from(owner: tuple[int, int], receiver: tuple[int, int], rank: int, *, layers: int = 32) -> list[int]:
    """The owner's ranks that fill the pages of one of the receiver's."""
    theirs, mine = layout(layers, 8, [None], *owner), layout(layers, 8, [None], *receiver)
    routes = [route for route in plan_routes(theirs, mine) if mine.groups[route.receiver_group].rank == rank]
    return sorted({theirs.groups[route.owner_group].rank for route in routes})


def test_which_ranks_meet() -> None:
    """The CHECK lines of §6.7."""
    # Tensor ranks 2 and 3 of four write to rank 1 of two; rank 1 of two writes to ranks 2 and 3 of four.
    assert ranks_from((4, 1), (2, 1), 1) == [2, 3]
    assert [ranks_from((2, 1), (4, 1), rank) for rank in range(4)] == [[0], [0], [1], [1]]
    # Two stages of 16 layers each write to one stage: two transfers are expected.
    assert ranks_from((1, 2), (1, 1), 0) == [0, 1]
    assert [ranks_from((1, 1), (1, 2), rank) for rank in range(2)] == [[0], [0]]


def test_only_one_of_those_that_keep_the_same_head_sends() -> None:
    theirs, mine = layout(2, 2, [None], 8, 1), layout(2, 2, [None], 1, 1)
    routes = plan_routes(theirs, mine)
    assert [theirs.groups[route.owner_group].rank for route in routes] == [0, 4]
    assert sum(span.nbytes for route in routes for span in route.spans) == mine.groups[0].page_bytes


def test_equal_layouts_exchange_whole_pages() -> None:
    for ranks in ((1, 1), (4, 2), (8, 1)):
        of = layout(4, 4, [None, 8], *ranks)
        routes = plan_routes(of, of)
        assert [route.receiver_group for route in routes] == list(range(len(of.groups)))
        assert all(route.spans == ((0, 0, of.groups[route.receiver_group].page_bytes),) for route in routes)


def test_runs_that_follow_each_other_on_both_sides_are_one() -> None:
    # Both layers of a stage, K and V, lie in the same order on both sides.
    theirs, mine = layout(4, 4, [None], 1, 2), layout(4, 4, [None], 1, 1)
    page_bytes = theirs.groups[0].page_bytes
    assert plan_routes(theirs, mine) == (
        Route(0, 0, ((0, 0, page_bytes),)),
        Route(1, 0, ((0, page_bytes, page_bytes),)),
    )


def test_what_the_owner_lacks_is_named() -> None:
    with pytest.raises(RouteError, match="head 0 of the k buffer of layer 1 is in no page of the owner"):
        plan_routes(layout(1, 2, [None], 1, 1), layout(2, 2, [None], 1, 1))
    with pytest.raises(RouteError, match="head 2 of the k buffer of layer 0"):
        plan_routes(layout(1, 2, [None], 1, 1), layout(1, 4, [None], 1, 1))
    other = PageLayout.build(requirements(1, 4, [None]), 2 * TOKENS_PER_BLOCK)
    with pytest.raises(RouteError, match="another size at the owner"):
        plan_routes(other, layout(1, 4, [None], 1, 1))


def test_lists_that_do_not_fit_are_refused() -> None:
    of = layout(1, 1, [None], 1, 1)
    routes = plan_routes(of, of)
    held = [HeldPages(np.array([5, 6], np.int32))]
    with pytest.raises(MissingPageError, match="pages of 2 layer groups are wanted"):
        choose_sources(routes, held, [0, 0], [held[0].ids] * 2)
    with pytest.raises(MissingPageError, match="1 pages are granted where 2 are wanted"):
        make_parts(routes, [Source(held[0].ids[:1])], [held[0].ids], owner=of, receiver=of, side="receiver")
    with pytest.raises(MissingPageError, match="list of tiers does not fit"):
        decode_sources([held[0].ids], [b"\x00"])
