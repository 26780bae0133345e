"""Removals of lost batches are told again (semantics §4.3: removals are never dropped)."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.events.arrears import Arrears
from kvmesh.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent


def stored(*hashes: int, medium: str = "GPU") -> BlockStored:
    return BlockStored(
        block_hashes=list(hashes), parent_block_hash=None, token_ids=[], block_size=1, medium=medium, group_idx=0
    )


def removed(*hashes: int, medium: str = "GPU") -> BlockRemoved:
    return BlockRemoved(block_hashes=list(hashes), medium=medium, group_idx=0)


def test_removals_are_owed_by_medium_and_told_once() -> None:
    arrears = Arrears()
    assert not arrears
    arrears.note([stored(9), removed(1, 2), removed(3, medium="CPU")])
    arrears.note([removed(2, 4)])
    assert arrears
    assert arrears.take() == [removed(1, 2, 4), removed(3, medium="CPU")]
    assert not arrears
    assert arrears.take() == []


def test_a_block_that_came_back_is_not_taken_from_those_who_still_have_it() -> None:
    arrears = Arrears()
    arrears.note([removed(1, 2), stored(1), stored(2, medium="CPU")])
    assert arrears.take() == [removed(2)]


def test_a_clear_is_owed_before_what_was_removed_after_it() -> None:
    arrears = Arrears()
    arrears.note([removed(1), AllBlocksCleared(), removed(2)])
    assert arrears.take() == [AllBlocksCleared(), removed(2)]


def test_what_is_owed_is_bounded() -> None:
    arrears = Arrears(max_blocks=2)
    arrears.note([removed(1, 2), removed(2)])
    assert arrears.take() == [removed(1, 2)]
    arrears.note([removed(1, 2), removed(3, medium="CPU")])
    assert arrears.take() == [AllBlocksCleared()]


Step = tuple[bool, bool, int]
"""Whether a block is stored (or removed), whether the batch arrives, and which block it is."""


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 5))))
def test_a_reader_never_holds_more_than_the_worker(steps: Sequence[Step]) -> None:
    arrears = Arrears()
    worker: set[int] = set()
    reader: set[int] = set()

    def read(events: Sequence[KvEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                reader.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                reader.difference_update(event.block_hashes)

    for is_store, arrives, number in steps:
        if is_store == (number in worker):
            continue
        worker ^= {number}
        events = [stored(number) if is_store else removed(number)]
        if arrives:
            read([*arrears.take(), *events])
            assert reader <= worker
        else:
            arrears.note(events)
    read(arrears.take())
    assert reader <= worker
