"""Rooms of a staging region: they never overlap, none is lost, and who waits longest comes first."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.transceiver.planes.base import MoveControl, MoveStoppedError
from kvmesh.transceiver.staged.rooms import ALIGNMENT_BYTES, FirstFit, Rooms

REGION = 64 * ALIGNMENT_BYTES


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 70 * ALIGNMENT_BYTES)), max_size=200))
@settings(deadline=None)
def test_rooms_do_not_overlap_and_none_is_lost(steps: list[tuple[bool, int]]) -> None:
    rooms = FirstFit(REGION)
    taken: dict[int, int] = {}
    for take, number in steps:
        if take:
            nbytes = max(1, number)
            size = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            offset = rooms.take(nbytes)
            free = bytearray(b"\1" * (REGION // ALIGNMENT_BYTES))
            for start, length in taken.items():
                free[start // ALIGNMENT_BYTES : (start + length) // ALIGNMENT_BYTES] = bytes(length // ALIGNMENT_BYTES)
            lowest = free.find(b"\1" * (size // ALIGNMENT_BYTES))
            assert offset == (None if lowest < 0 else lowest * ALIGNMENT_BYTES), "the lowest hole, if there is one"
            if offset is not None:
                taken[offset] = size
        elif taken:
            offset = sorted(taken)[number % len(taken)]
            rooms.give(offset)
            del taken[offset]
        assert rooms.used_bytes == sum(taken.values())
    for offset in taken:
        rooms.give(offset)
    assert rooms.take(REGION) == 0, "all of it is one hole again"


def test_what_was_not_taken_cannot_be_given() -> None:
    rooms = FirstFit(REGION)
    with pytest.raises(ValueError, match="no room"):
        rooms.give(0)


def test_who_waits_longest_comes_first_and_nobody_slips_in() -> None:
    rooms = Rooms(REGION)
    held = [rooms.take(REGION // 2, MoveControl()) for _ in range(2)]
    order: list[str] = []
    waiting = [threading.Event(), threading.Event()]

    class Told(MoveControl):
        """Tells that its waiter looks at it."""

        def __init__(self, event: threading.Event) -> None:
            super().__init__()
            self.event = event

        @property
        def stopped(self) -> bool:
            self.event.set()
            return False

    def take(name: str, nbytes: int, event: threading.Event) -> None:
        rooms.take(nbytes, Told(event))
        order.append(name)

    large = threading.Thread(target=take, args=("large", REGION, waiting[0]))
    large.start()
    assert waiting[0].wait(10)
    small = threading.Thread(target=take, args=("small", 64, waiting[1]))
    small.start()
    assert waiting[1].wait(10)
    rooms.give(held[0])
    assert rooms.try_take(64) is None, "although there is room, others wait for it"
    assert order == []
    rooms.give(held[1])
    large.join(10)
    assert order == ["large"]
    rooms.give(0)
    small.join(10)
    assert order == ["large", "small"]
    assert rooms.used_bytes == 64
    assert rooms.try_take(64) == 64


def test_a_wait_can_be_stopped_and_lets_the_next_one_in() -> None:
    rooms = Rooms(REGION)
    rooms.take(64, MoveControl())
    control, failures, taken = MoveControl(), [], threading.Event()

    def wait() -> None:
        try:
            rooms.take(REGION, control)
        except MoveStoppedError:
            failures.append("stopped")

    def follow() -> None:
        rooms.take(64, MoveControl())
        taken.set()

    threads = [threading.Thread(target=wait), threading.Thread(target=follow)]
    threads[0].start()
    control.stop()
    threads[1].start()
    assert taken.wait(10)
    for thread in threads:
        thread.join(10)
    assert failures == ["stopped"]


def test_more_than_the_region_is_refused() -> None:
    with pytest.raises(ValueError, match="region"):
        Rooms(64).take(65, MoveControl())
