"""Rooms that an owner may still write into stay out of use until it is gone, wherever it is."""

from __future__ import annotations

import os
import resource

import msgspec
import pytest

from kvmesh.transceiver.channels.written import ELSEWHERE_S, WrittenByOwner
from kvmesh.transceiver.liveness import ProcessGoneError, ProcessIdentity, open_process
from kvmesh.transceiver.planes.base import MoveControl
from kvmesh.transceiver.staged.limbo import Limbo
from kvmesh.transceiver.staged.rooms import Rooms

ELSEWHERE = msgspec.structs.replace(ProcessIdentity.current(), boot_id="another host")
REGION_BYTES = 4096


def test_an_owner_here_is_seen_with_many_descriptors_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("needs 2048 file descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    taken: list[int] = []
    try:
        # select() refuses descriptors from 1024 on.
        while not taken or taken[-1] < 1100:
            taken.append(os.dup(2))
        assert not WrittenByOwner(ProcessIdentity.current()).owner_is_gone()
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("pid", [-1, 0, 1 << 31, 1 << 63])
def test_a_number_that_no_process_can_have_is_a_process_that_is_gone(pid: int) -> None:
    nobody = msgspec.structs.replace(ProcessIdentity.current(), pid=pid)
    with pytest.raises(ProcessGoneError):
        open_process(nobody)
    assert WrittenByOwner(nobody).owner_is_gone()


def test_a_room_of_an_owner_elsewhere_rests_as_long_as_its_host_may_repeat_a_write() -> None:
    now_s = [100.0]
    rooms = Rooms(REGION_BYTES)
    limbo = Limbo(rooms)
    room = rooms.take(1024, MoveControl())
    limbo.put(WrittenByOwner(ELSEWHERE, lambda: now_s[0]), room, 1024)
    now_s[0] += ELSEWHERE_S - 1
    limbo.release()
    assert rooms.used_bytes == 1024
    now_s[0] += 1
    limbo.release()
    assert rooms.used_bytes == 0


def test_owners_elsewhere_take_half_of_the_region_out_of_use_at_most() -> None:
    rooms = Rooms(REGION_BYTES)
    limbo = Limbo(rooms)
    offsets = [rooms.take(1024, MoveControl()) for _ in range(3)]
    for offset in offsets:
        limbo.put(WrittenByOwner(ELSEWHERE, lambda: 0.0), offset, 1024)
    assert rooms.used_bytes == 2048
    assert rooms.take(1024, MoveControl()) == offsets[0], "the oldest goes first"


def test_owners_here_keep_their_rooms_however_many_they_are() -> None:
    rooms = Rooms(REGION_BYTES)
    limbo = Limbo(rooms)
    for _ in range(3):
        limbo.put(WrittenByOwner(ProcessIdentity.current()), rooms.take(1024, MoveControl()), 1024)
    assert rooms.used_bytes == 3072
