"""Staged planes of one process: many sessions through small buffers, stops, refusals, lost connections."""

from __future__ import annotations

import itertools
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvmesh.cache.device import CpuDevice
from kvmesh.net.faults import injected
from kvmesh.transceiver.channels.builtin import BuiltinChannel
from kvmesh.transceiver.integrity import PageChecksums, checksum_difference
from kvmesh.transceiver.planes.base import MoveJob, MoveStoppedError, Part, PlaneError
from kvmesh.transceiver.staged.plane import StagedPlane
from kvmesh.transceiver.staged.region import RegionSize
from kvmesh.transceiver.tickets import Signer
from kvmesh.transceiver.timing import TransferTimes
from kvmesh.transceiver.types import PeerKey, PoolMemory

PAGES, PAGE = 64, (4096, 1024)
"""Two pools."""
WAYS = ["memfd", "tcp"]
SOON_S = 20.0


@dataclass
class End:
    key: PeerKey
    plane: StagedPlane
    pools: list[PoolMemory]
    pages: list[np.ndarray]
    """Per pool ``[PAGES, page bytes]``."""

    def attach(self, owner: End) -> None:
        """As its receiver."""
        self.plane.attach(owner.key, owner.plane.describe(), "receiver")

    @property
    def used(self) -> tuple[int, int, int, int]:
        return self.plane.stats()[1:]


Make = Callable[..., End]


@pytest.fixture
def make() -> Iterator[Make]:
    ends: list[End] = []
    device = CpuDevice(1 << 26)
    numbers = itertools.count(1)

    def make(
        name: str,
        way: str = "memfd",
        nbytes: int = 2 * PAGE[0],
        secret: bytes = b"secret",
        timeout_s: float = 30.0,
    ) -> End:
        random_bytes = np.random.default_rng(next(numbers))
        pools, pages = [], []
        for page_bytes in PAGE:
            buffer = device.allocate(PAGES * page_bytes)
            buffer.array[:] = random_bytes.integers(0, 256, buffer.nbytes, dtype=np.uint8)
            pages.append(buffer.array.reshape(PAGES, page_bytes))
            pools.append(
                PoolMemory(
                    address=buffer.address,
                    nbytes=buffer.nbytes,
                    num_pages=PAGES,
                    page_bytes=page_bytes,
                    fd=buffer.fd,
                )
            )
        key = PeerKey(name, 1)
        channel: Any = partial(BuiltinChannel, name=str(key), bind_host="127.0.0.1", connect_timeout_s=10.0, choice=way)
        plane = StagedPlane(
            key,
            pools,
            RegionSize(nbytes, reserved=True),
            channel,
            signer=Signer(secret, "pieces"),
            bind_host="127.0.0.1",
            times=TransferTimes(timeout_s, 1.0, 1.0, 10.0),
        )
        ends.append(End(key, plane, pools, pages))
        return ends[-1]

    yield make
    for end in ends:
        end.plane.close()
        end.plane.close()


def ids(pages: Sequence[int]) -> np.ndarray:
    return np.array(pages, dtype=np.int32)


def parts_of(moves: Sequence[tuple[int, Sequence[int], Sequence[int]]]) -> tuple[list[Part], list[Part]]:
    """What an owner grants and what its receiver moves: (pool, source pages, target pages)."""
    granted = [Part(pool, ids(source), pool, ids(target), PAGE[pool]) for pool, source, target in moves]
    wanted = [Part(pool, ids(target), pool, ids(source), PAGE[pool]) for pool, source, target in moves]
    return granted, wanted


def job_of(owner: End, number: int, granted: Sequence[Part], wanted: Sequence[Part], **fields: Any) -> MoveJob:
    access = owner.plane.grant(number, number, granted)
    return MoveJob(transfer_id=number, session=number, parts=wanted, access=access, **fields)


def settle(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


MOVES = [(0, [5, 1, 40], [0, 3, 2]), (1, [7, 8, 9, 10, 60], [1, 2, 3, 4, 63])]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("nbytes", [PAGE[0], 2 * PAGE[0], 16 * PAGE[0]])
def test_pages_of_every_pool_arrive_and_nothing_else_changes(make: Make, way: str, nbytes: int) -> None:
    """§2b max_tokens_in_buffer: more than the buffer holds goes in pieces."""
    owner, receiver = make("owner", way, nbytes), make("receiver", way, nbytes)
    receiver.attach(owner)
    before = [pages.copy() for pages in receiver.pages]
    granted, wanted = parts_of(MOVES)
    sums = PageChecksums(receiver.pools).running(wanted)
    for number in (1, 2):
        assert receiver.plane.move(owner.key, job_of(owner, number, granted, wanted, sums=sums)) == 3 * 4096 + 5 * 1024
        owner.plane.revoke(number, number)
    for pool, source, target in MOVES:
        before[pool][target] = owner.pages[pool][source]
    assert all(np.array_equal(pages, expected) for pages, expected in zip(receiver.pages, before, strict=True))
    assert checksum_difference(sums.encoded(), PageChecksums(owner.pools).of(granted)) is None
    assert owner.used == receiver.used == (0, 0, 0, 0)


def test_parts_of_pages_arrive(make: Make) -> None:
    """§6.7: peers whose pages differ."""
    owner, receiver = make("owner"), make("receiver")
    receiver.attach(owner)
    granted = [Part(0, ids([3, 4]), 1, ids([8, 9]), 512, 1024, 256)]
    wanted = [Part(1, ids([8, 9]), 0, ids([3, 4]), 512, 256, 1024)]
    receiver.plane.move(owner.key, job_of(owner, 1, granted, wanted))
    assert np.array_equal(receiver.pages[1][[8, 9], 256:768], owner.pages[0][[3, 4], 1024:1536])


def test_nothing_is_moved_without_asking_anybody(make: Make) -> None:
    receiver = make("receiver")
    assert receiver.plane.move(PeerKey("nobody", 1), MoveJob(transfer_id=1, session=1, parts=[])) == 0


@pytest.mark.parametrize("way", WAYS)
def test_64_sessions_both_ways_through_buffers_of_two_pages(make: Make, way: str) -> None:
    """No cycle of rooms, no lost wake-up, nothing mixed up."""
    ends = [make("one", way), make("other", way)]
    for receiver, owner in (ends, reversed(ends)):
        receiver.attach(owner)
    order = random.Random(4)
    targets = order.sample(range(32, 64), 32)
    expected = [end.pages[0].copy() for end in ends]

    def move(number: int) -> None:
        receiver, owner = ends[number % 2], ends[1 - number % 2]
        source, target = [order.randrange(32), number // 2], [targets[number // 2]]
        granted, wanted = parts_of([(0, source[:1], target), (1, [0, 1, 2], [40, 41, 42])])
        expected[number % 2][target] = owner.pages[0][source[:1]]
        receiver.plane.move(owner.key, job_of(owner, number + 1, granted, wanted))
        owner.plane.revoke(number + 1, number + 1)

    with ThreadPoolExecutor(64) as threads:
        for finished in [threads.submit(move, number) for number in range(64)]:
            finished.result(60)
    for end, pages in zip(ends, expected, strict=True):
        assert np.array_equal(end.pages[0], pages)
        assert end.used == (0, 0, 0, 0)


@pytest.mark.parametrize("way", WAYS)
def test_a_stop_in_the_middle_ends_at_once_and_the_next_move_is_whole(make: Make, way: str) -> None:
    owner, receiver = make("owner", way), make("receiver", way)
    receiver.attach(owner)
    sources, targets = list(range(40)), list(range(20, 60))
    granted, wanted = parts_of([(0, sources, targets)])
    job = job_of(owner, 1, granted, wanted)
    looks = itertools.count()

    def stop() -> None:
        if next(looks) == 7:
            job.control.stop()

    with injected("transceiver.during_transfer", stop), pytest.raises(MoveStoppedError):
        receiver.plane.move(owner.key, job)
    owner.plane.revoke(1, 1)
    assert receiver.plane.move(owner.key, job_of(owner, 2, granted, wanted)) == 40 * 4096
    assert np.array_equal(receiver.pages[0][targets], owner.pages[0][sources])
    settle(lambda: owner.used == receiver.used == (0, 0, 0, 0))


@pytest.mark.parametrize("way", WAYS)
def test_an_owner_that_holds_a_piece_back_holds_up_only_its_own_session(make: Make, way: str) -> None:
    """A room that may still be written stays out of use, and the rest goes on."""
    owner, receiver, other = (make(name, way, 8 * PAGE[0]) for name in ("owner", "receiver", "other"))
    receiver.attach(owner)
    receiver.attach(other)
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        if not held.is_set():
            held.set()
            assert go_on.wait(60)

    granted, wanted = parts_of([(0, list(range(30)), list(range(30)))])
    job = job_of(owner, 1, granted, wanted)
    with injected("transceiver.during_send", hold), ThreadPoolExecutor(1) as thread:
        moving = thread.submit(receiver.plane.move, owner.key, job)
        assert held.wait(SOON_S)
        job.control.stop()
        with pytest.raises(MoveStoppedError):
            moving.result(SOON_S)
        if way == "memfd":
            assert receiver.plane.stats().receive_used_bytes > 0, "the owner may still write there"
        more, into = parts_of([(0, list(range(30)), list(range(30, 60)))])
        assert receiver.plane.move(other.key, job_of(other, 2, more, into)) == 30 * 4096
        assert np.array_equal(receiver.pages[0][30:60], other.pages[0][:30])
        go_on.set()
        settle(lambda: receiver.plane.stats().receive_used_bytes == 0)
    owner.plane.revoke(1, 1)
    settle(lambda: owner.used == (0, 0, 0, 0))


def test_an_owner_that_is_closed_in_the_middle_frees_everything(make: Make) -> None:
    owner, receiver = make("owner", "tcp"), make("receiver", "tcp")
    receiver.attach(owner)
    granted, wanted = parts_of([(0, list(range(60)), list(range(60)))])
    looks = itertools.count()

    def leave() -> None:
        if next(looks) == 5:
            owner.plane.close()

    job = job_of(owner, 1, granted, wanted)
    with injected("transceiver.during_transfer", leave), pytest.raises(PlaneError):
        receiver.plane.move(owner.key, job)
    settle(lambda: receiver.used == (0, 0, 0, 0))
    with pytest.raises(PlaneError, match="cannot reach"):
        receiver.plane.move(owner.key, job)


def test_a_receiver_that_leaves_gives_its_place_and_its_rooms_back(make: Make) -> None:
    owner, receiver, next_one = (make(name, "tcp", 4 * PAGE[0]) for name in ("owner", "receiver", "next"))
    receiver.attach(owner)
    next_one.attach(owner)
    granted, wanted = parts_of([(0, list(range(60)), list(range(60)))])
    begun = threading.Event()

    def leave() -> None:
        if not begun.is_set():
            begun.set()
            receiver.plane.detach(owner.key, "receiver")
            receiver.plane.close()

    with injected("transceiver.during_transfer", leave), pytest.raises(PlaneError):
        receiver.plane.move(owner.key, job_of(owner, 1, granted, wanted))
    assert next_one.plane.move(owner.key, job_of(owner, 2, granted, wanted)) == 60 * 4096
    settle(lambda: owner.used == (0, 0, 0, 0))


def test_sessions_wait_for_room_and_are_seen_to(make: Make) -> None:
    """§2b max_tokens_in_buffer governs admission; a wait ends with the transfer's stop."""
    owner, receiver = make("owner"), make("receiver")
    receiver.attach(owner)
    granted, wanted = parts_of([(0, [1, 2], [3, 4])])
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert go_on.wait(60)

    jobs = [job_of(owner, number, granted, wanted) for number in (1, 2)]
    with injected("transceiver.during_transfer", hold), ThreadPoolExecutor(2) as threads:
        first = threads.submit(receiver.plane.move, owner.key, jobs[0])
        assert held.wait(SOON_S)
        second = threads.submit(receiver.plane.move, owner.key, jobs[1])
        settle(lambda: receiver.plane.stats().receive_waiting == 1)
        jobs[1].control.stop()
        with pytest.raises(MoveStoppedError):
            second.result(SOON_S)
        assert receiver.plane.stats().receive_waiting == 0
        go_on.set()
        assert first.result(SOON_S) == 2 * 4096


def test_what_is_refused(make: Make) -> None:
    owner, receiver = make("owner"), make("receiver")
    granted, wanted = parts_of([(0, [1, 2], [3, 4])])
    with pytest.raises(PlaneError, match="owner#1 is not attached"):
        receiver.plane.move(owner.key, job_of(owner, 1, granted, wanted))
    receiver.attach(owner)
    with pytest.raises(PlaneError, match="refused the session"):
        receiver.plane.move(owner.key, MoveJob(transfer_id=1, session=1, parts=wanted, access=bytes(16)))
    with pytest.raises(PlaneError, match="1 of 4096 bytes are wanted"):
        receiver.plane.move(owner.key, job_of(owner, 2, granted, [wanted[0]._replace(local=ids([3]), remote=ids([1]))]))
    with pytest.raises(PlaneError, match="outside the pool"):
        receiver.plane.move(owner.key, job_of(owner, 3, granted, [wanted[0]._replace(local=ids([3, 64]))]))
    owner.plane.revoke(1, 1)
    with pytest.raises(PlaneError, match="refused the session"):
        receiver.plane.move(owner.key, MoveJob(transfer_id=1, session=1, parts=wanted, access=bytes(16)))
    assert receiver.plane.move(owner.key, job_of(owner, 4, granted, wanted)) == 2 * 4096


def test_a_smaller_buffer_of_the_peer_is_respected(make: Make) -> None:
    owner, receiver = make("owner", nbytes=64), make("receiver", nbytes=1 << 20)
    receiver.attach(owner)
    granted, wanted = parts_of([(0, [1], [3])])
    with pytest.raises(PlaneError, match="4096 bytes does not fit into the smaller staging buffer of 64 bytes"):
        receiver.plane.move(owner.key, job_of(owner, 1, granted, wanted))
    small = [part._replace(nbytes=48) for part in granted], [part._replace(nbytes=48) for part in wanted]
    assert receiver.plane.move(owner.key, job_of(owner, 2, *small)) == 48


def test_another_clusters_engine_cannot_make_this_one_open_memory(make: Make) -> None:
    owner, stranger = make("owner"), make("stranger", secret=b"another")
    with pytest.raises(PlaneError, match="not signed with the cluster secret"):
        stranger.attach(owner)


def test_whoever_connects_and_speaks_something_else_is_hung_up_on(make: Make) -> None:
    owner, receiver = make("owner"), make("receiver")
    receiver.attach(owner)
    host, port = owner.plane._server.address
    with socket.create_connection((host, port), 10) as noise:
        noise.sendall(bytes(200))
        while noise.recv(4096):
            continue
    granted, wanted = parts_of([(0, [1], [3])])
    assert receiver.plane.move(owner.key, job_of(owner, 1, granted, wanted)) == 4096


def test_silent_strangers_keep_no_receiver_out(make: Make) -> None:
    owner, receiver = make("owner"), make("receiver")
    silent = [socket.create_connection(owner.plane._server.address) for _ in range(300)]
    try:
        receiver.attach(owner)
        granted, wanted = parts_of(MOVES)
        receiver.plane.move(owner.key, job_of(owner, 1, granted, wanted))
    finally:
        for stranger in silent:
            stranger.close()


def test_a_defect_while_a_piece_is_sent_ends_its_own_transfer_only(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, receiver = make("owner"), make("receiver")
    receiver.attach(owner)
    granted, wanted = parts_of(MOVES)

    def defect(*_arguments: Any) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as broken:
        broken.setattr(owner.plane._server._copier, "gather", defect)
        with pytest.raises(PlaneError, match="the owner could not send a piece; its log says why"):
            receiver.plane.move(owner.key, job_of(owner, 1, granted, wanted))
    assert receiver.plane.move(owner.key, job_of(owner, 2, granted, wanted)) > 0


def test_ways_that_exclude_each_other_are_refused(make: Make) -> None:
    owner, receiver = make("owner", "tcp"), make("receiver", "memfd")
    with pytest.raises(PlaneError, match="transfer_plane memfd"):
        receiver.attach(owner)
    owner, receiver = make("owner-2", "memfd"), make("receiver-2", "tcp")
    with pytest.raises(PlaneError, match="transfer_plane memfd"):
        receiver.attach(owner)
    assert make("owner-3", "auto").plane.name == "CPP/BUILTIN"


def test_cuda_pools_are_refused(make: Make) -> None:
    pools = [PoolMemory(address=0, nbytes=64, num_pages=1, page_bytes=64, device="cuda")]
    with pytest.raises(PlaneError, match="cannot read CUDA pools"):
        StagedPlane(
            PeerKey("x", 1),
            pools,
            RegionSize(64, reserved=False),
            BuiltinChannel,  # type: ignore[arg-type]
            signer=Signer(b"s", "pieces"),
            bind_host="127.0.0.1",
            times=TransferTimes(1.0, 1.0, 1.0),
        )
