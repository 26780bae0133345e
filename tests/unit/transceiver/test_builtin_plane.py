"""The built-in plane between two pools of one process: shared memory and TCP."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest

from kvmesh.cache.device import CpuDevice, DeviceBuffer
from kvmesh.net.faults import injected
from kvmesh.transceiver.integrity import PageChecksums, checksum_difference
from kvmesh.transceiver.planes import builtin_tcp
from kvmesh.transceiver.planes.base import MoveControl, MoveJob, MoveStoppedError, Part, PlaneError
from kvmesh.transceiver.planes.builtin import QUICK_BYTES, BuiltinPlane
from kvmesh.transceiver.planes.builtin_memfd import MemfdDescriptor
from kvmesh.transceiver.types import PeerKey, PoolMemory

PAGE = 4096
COUNT = 32
OWNER = PeerKey("owner", 1)


@dataclass
class End:
    plane: BuiltinPlane
    pages: list[np.ndarray]
    """Per pool ``[COUNT, PAGE]``."""
    sums: PageChecksums
    page_bytes: int


def pool(buffer: DeviceBuffer, page_bytes: int = PAGE, **changes: Any) -> PoolMemory:
    fields = {
        "address": buffer.address,
        "nbytes": buffer.nbytes,
        "num_pages": buffer.nbytes // page_bytes,
        "page_bytes": page_bytes,
        "fd": buffer.fd,
    }
    return PoolMemory(**{**fields, **changes})


@pytest.fixture
def make_end() -> Iterator[Callable[..., End]]:
    """Builds planes over two pools and three layer groups; the first two share a pool."""
    planes: list[BuiltinPlane] = []
    buffers: list[DeviceBuffer] = []
    device = CpuDevice(1 << 24)

    def make(choice: str = "auto", seed: int = 0, page_bytes: int = PAGE, **changes: Any) -> End:
        mine = [device.allocate(COUNT * PAGE) for _ in range(2)]
        buffers.extend(mine)
        for buffer in mine:
            buffer.array[:] = np.random.default_rng(seed).integers(0, 256, buffer.nbytes, dtype=np.uint8)
        pools = [pool(buffer, page_bytes, **changes) for buffer in mine]
        plane = BuiltinPlane(
            pools,
            choice=choice,  # type: ignore[arg-type]
            bind_host="127.0.0.1",
        )
        planes.append(plane)
        pages = [
            buffer.array[: len(buffer.array) // page_bytes * page_bytes].reshape(-1, page_bytes) for buffer in mine
        ]
        return End(plane, pages, PageChecksums(pools), page_bytes)

    yield make
    for plane in planes:
        plane.close()
    for buffer in buffers:
        device.free(buffer)


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, dtype=np.int32)


def parts_of(local: list[np.ndarray], remote: list[np.ndarray], nbytes: int = PAGE) -> list[Part]:
    """Whole pages of three layer groups, of which the first two share a pool."""
    return [
        Part(number, ours, number, theirs, nbytes)
        for number, ours, theirs in zip([0, 0, 1], local, remote, strict=True)
    ]


def job(owner: End, local: list[np.ndarray], remote: list[np.ndarray], **changes: Any) -> MoveJob:
    access = owner.plane.grant(7, 1, parts_of(remote, local, owner.page_bytes))
    parts = parts_of(local, remote, owner.page_bytes)
    fields = {"transfer_id": 7, "session": 1, "parts": parts, "access": access}
    return MoveJob(**{**fields, **changes})


LOCAL, REMOTE = [ids(1, 2, 3), ids(9), ids(30, 4)], [ids(8, 9, 3), ids(0), ids(5, 6)]


@pytest.mark.parametrize("way", ["memfd", "tcp"])
def test_pages_of_every_group_arrive_and_nothing_else_changes(make_end: Callable[..., End], way: str) -> None:
    owner, receiver = make_end(seed=1), make_end(way, seed=2)
    before = [pages.copy() for pages in receiver.pages]
    assert receiver.plane.attach(OWNER, owner.plane.describe(), "receiver") == way
    assert receiver.plane.attach(OWNER, owner.plane.describe(), "receiver") == way, "attaching twice is attaching once"
    for _ in range(2):
        assert receiver.plane.move(OWNER, job(owner, LOCAL, REMOTE)) == 6 * PAGE
    for group, number in enumerate([0, 0, 1]):
        before[number][LOCAL[group]] = owner.pages[number][REMOTE[group]]
    for pages, expected in zip(receiver.pages, before, strict=True):
        assert np.array_equal(pages, expected)


@pytest.mark.parametrize("way", ["memfd", "tcp"])
@pytest.mark.parametrize("page_bytes", [PAGE, 100, 1000])
def test_both_ends_sum_the_same(make_end: Callable[..., End], way: str, page_bytes: int) -> None:
    owner, receiver = make_end(seed=1, page_bytes=page_bytes), make_end(way, seed=2, page_bytes=page_bytes)
    receiver.plane.attach(OWNER, owner.plane.describe(), "receiver")
    sums = receiver.sums.running(parts_of(LOCAL, REMOTE, receiver.page_bytes))
    receiver.plane.move(OWNER, job(owner, LOCAL, REMOTE, sums=sums))
    for group, number in enumerate([0, 0, 1]):
        assert np.array_equal(receiver.pages[number][LOCAL[group]], owner.pages[number][REMOTE[group]])
    ours, theirs = parts_of(LOCAL, REMOTE, page_bytes), parts_of(REMOTE, LOCAL, page_bytes)
    assert sums.encoded() == owner.sums.of(theirs) == receiver.sums.of(ours)


@pytest.mark.parametrize("way", ["memfd", "tcp"])
def test_a_page_that_changes_before_it_is_read_is_told(make_end: Callable[..., End], way: str) -> None:
    owner, receiver = make_end(seed=1), make_end(way, seed=2)
    receiver.plane.attach(OWNER, owner.plane.describe(), "receiver")
    promised = owner.sums.of(parts_of(REMOTE, LOCAL))
    owner.pages[1][6, PAGE - 1] ^= 1
    sums = receiver.sums.running(parts_of(LOCAL, REMOTE, receiver.page_bytes))
    receiver.plane.move(OWNER, job(owner, LOCAL, REMOTE, sums=sums))
    damage = checksum_difference(sums.encoded(), promised)
    assert damage == "part 2: 1 of 2 pages arrived damaged, the first at index 1"


@pytest.mark.parametrize("way", ["memfd", "tcp"])
def test_what_is_copied_from_another_page_is_told(make_end: Callable[..., End], way: str) -> None:
    owner, receiver = make_end(seed=1), make_end(way, seed=2)
    receiver.plane.attach(OWNER, owner.plane.describe(), "receiver")
    sums = receiver.sums.running(parts_of(LOCAL, REMOTE, receiver.page_bytes))
    receiver.plane.move(OWNER, job(owner, LOCAL, [ids(8, 9, 4), *REMOTE[1:]], sums=sums))
    damage = checksum_difference(sums.encoded(), owner.sums.of(parts_of(REMOTE, LOCAL)))
    assert damage == "part 0: 1 of 3 pages arrived damaged, the first at index 2"


def test_only_a_few_pages_of_shared_memory_are_quick(make_end: Callable[..., End]) -> None:
    owner, mapped, streamed = make_end(), make_end("memfd"), make_end("tcp")
    for end in (mapped, streamed):
        end.plane.attach(OWNER, owner.plane.describe(), "receiver")
    assert mapped.plane.is_quick(OWNER, QUICK_BYTES)
    assert not mapped.plane.is_quick(OWNER, QUICK_BYTES + 1)
    assert not streamed.plane.is_quick(OWNER, 1)


@pytest.mark.parametrize("way", ["memfd", "tcp"])
def test_a_stopped_move_touches_nothing_more_and_the_next_one_works(make_end: Callable[..., End], way: str) -> None:
    owner, receiver = make_end(seed=1), make_end(way, seed=2)
    receiver.plane.attach(OWNER, owner.plane.describe(), "receiver")
    control = MoveControl()
    control.stop()
    with pytest.raises(MoveStoppedError):
        receiver.plane.move(OWNER, job(owner, LOCAL, REMOTE, control=control))
    receiver.plane.move(OWNER, job(owner, LOCAL, REMOTE))
    assert np.array_equal(receiver.pages[1][30], owner.pages[1][5])


@pytest.mark.parametrize("way", ["memfd", "tcp"])
def test_a_detached_peer_is_not_reachable(make_end: Callable[..., End], way: str) -> None:
    owner, receiver = make_end(), make_end(way)
    receiver.plane.attach(OWNER, owner.plane.describe(), "receiver")
    receiver.plane.detach(OWNER, "receiver")
    receiver.plane.detach(OWNER, "receiver")
    with pytest.raises(PlaneError, match="owner#1 is not attached"):
        receiver.plane.move(OWNER, job(owner, LOCAL, REMOTE))


def test_memory_is_preferred_and_tcp_is_taken_when_it_cannot_be_opened(make_end: Callable[..., End]) -> None:
    owner, receiver = make_end(), make_end()
    assert receiver.plane.attach(OWNER, owner.plane.describe(), "receiver") == "memfd"
    assert make_end().plane.attach(OWNER, moved_elsewhere(owner, boot_id="another host"), "receiver") == "tcp"
    # The same number in another process id namespace is another file.
    memfd = msgspec.msgpack.decode(owner.plane.describe())[0]
    assert make_end().plane.attach(OWNER, changed(owner, 0, 1, 0, 2, memfd[1][0][2] + 1), "receiver") == "tcp"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((0, 0, 0), "another host", "another host or in another process id namespace"),
        ((0, 0, 2), 2**22 + 1, "cannot open the peer's memory"),
        ((0, 1, 0, 2), 1, "it runs in another process id namespace"),
        ((0, 1, 0, 4), 1000, "are described"),
        ((0, 1, 0, 4), 0, "are no pool"),
        ((0, 1, 0, 5), -1, "are no pool"),
        ((0, 1, 0, 3), -4096, "are no pool"),
        ((0, 1, 0, 3), 1 << 62, "are described"),
        ((0, 1, 0, 0), 1 << 40, "cannot open"),
        ((0, 2), None, "not granted to readers"),
    ],
)
def test_memory_that_is_not_what_was_described_is_not_mapped(
    make_end: Callable[..., End], path: tuple[int, ...], value: Any, message: str
) -> None:
    owner, receiver = make_end(), make_end("memfd")
    with pytest.raises(PlaneError, match=message):
        receiver.plane.attach(OWNER, changed(owner, *path, value), "receiver")


def changed(end: End, *path_and_value: Any) -> bytes:
    *path, last, value = path_and_value
    described = msgspec.msgpack.decode(end.plane.describe())
    part = described
    for step in path:
        part = part[step]
    part[last] = value
    return msgspec.msgpack.encode(described)


def moved_elsewhere(end: End, *, boot_id: str) -> bytes:
    return changed(end, 0, 0, 0, boot_id)


def test_an_unreadable_description_is_a_plane_error(make_end: Callable[..., End]) -> None:
    with pytest.raises(PlaneError, match="cannot be read"):
        make_end().plane.attach(OWNER, b"\xc1", "receiver")


def test_pages_outside_the_owners_pool_are_not_read(make_end: Callable[..., End]) -> None:
    owner, receiver = make_end(), make_end("memfd")
    receiver.plane.attach(OWNER, owner.plane.describe(), "receiver")
    for page in (-1, COUNT):
        with pytest.raises(PlaneError, match="outside the peer's pool"):
            receiver.plane.move(OWNER, job(owner, [ids(1), ids(), ids()], [ids(page), ids(), ids()]))


def test_what_a_choice_needs(make_end: Callable[..., End]) -> None:
    with pytest.raises(PlaneError, match="needs pools backed by a memfd"):
        make_end("memfd", fd=None)
    with pytest.raises(PlaneError, match="moves host memory"):
        make_end("auto", device="cuda")
    anonymous = make_end("auto", fd=None)
    assert msgspec.msgpack.decode(anonymous.plane.describe())[0] is None
    assert make_end().plane.attach(OWNER, anonymous.plane.describe(), "receiver") == "tcp"
    with pytest.raises(PlaneError, match="the peer shares no memory, and TCP is not offered by both sides"):
        make_end("memfd").plane.attach(OWNER, anonymous.plane.describe(), "receiver")
    assert isinstance(MemfdDescriptor, type)


@pytest.mark.parametrize("way", ["memfd", "tcp"])
def test_pieces_of_pages_move_between_pools_of_unlike_pages(make_end: Callable[..., End], way: str) -> None:
    owner, receiver = make_end(seed=1), make_end(way, seed=2, page_bytes=1024)
    receiver.plane.attach(OWNER, owner.plane.describe(), "receiver")
    ours, theirs = ids(100, 3), ids(7, 7)
    parts = [Part(1, ours, 0, theirs, 256, 512, 2048)]
    access = owner.plane.grant(7, 1, [Part(0, theirs, 1, ours, 256, 2048, 512)])
    sums = receiver.sums.running(parts)
    expected = receiver.pages[1].copy()
    expected[ours, 512:768] = owner.pages[0][theirs, 2048:2304]
    receiver.plane.move(OWNER, MoveJob(transfer_id=7, session=1, parts=parts, access=access, sums=sums))
    assert np.array_equal(receiver.pages[1], expected)
    assert sums.encoded() == receiver.sums.of(parts)


@pytest.mark.parametrize("change", [{"remote_pool": 2}, {"remote_offset": PAGE - 8}, {"remote_offset": -1}])
def test_pieces_outside_the_owners_pages_are_not_read(make_end: Callable[..., End], change: dict[str, int]) -> None:
    owner, receiver = make_end(), make_end("memfd")
    receiver.plane.attach(OWNER, owner.plane.describe(), "receiver")
    part = Part(0, ids(1), 0, ids(1), 64)._replace(**change)
    with pytest.raises(PlaneError, match=r"of the peer|the peer's pages"):
        receiver.plane.move(OWNER, MoveJob(transfer_id=7, session=1, parts=[part]))


@pytest.mark.parametrize("way", ["memfd", "tcp"])
def test_pages_that_were_taken_back_while_they_were_read_are_not_received(
    make_end: Callable[..., End], way: str
) -> None:
    """§6.1: a reader that stood still was taken for dead; what it goes on to copy is another request's."""
    owner, receiver = make_end(seed=1), make_end(way, seed=2)
    receiver.plane.attach(OWNER, owner.plane.describe(), "receiver")

    def take_back() -> None:
        owner.plane.revoke(7, 1)
        owner.pages[0][:] = 0

    point = "transceiver.during_transfer" if way == "memfd" else "transceiver.during_send"
    with injected(point, take_back), pytest.raises(PlaneError, match=r"taken its pages back|closed the connection"):
        receiver.plane.move(OWNER, job(owner, LOCAL, REMOTE))
    receiver.plane.move(OWNER, job(owner, LOCAL, REMOTE))


def test_a_stream_whose_last_bytes_were_taken_back_is_not_received(make_end: Callable[..., End]) -> None:
    """The grant ends after the last look at it, and before the last page is sent."""
    owner, receiver = make_end("tcp", seed=1), make_end("tcp", seed=2)
    receiver.plane.attach(OWNER, owner.plane.describe(), "receiver")
    granted = job(owner, [ids(1), ids(), ids()], [ids(8), ids(), ids()])
    send = builtin_tcp._send

    def sent(connection: Any, buffers: Any, control: MoveControl) -> None:
        send(connection, buffers, control)
        owner.plane.revoke(7, 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtin_tcp, "_send", sent)
        with pytest.raises(PlaneError, match="closed the connection"):
            receiver.plane.move(OWNER, granted)


def test_a_grant_that_is_used_again_is_another_one(make_end: Callable[..., End]) -> None:
    owner, receiver = make_end(seed=1), make_end("memfd", seed=2)
    receiver.plane.attach(OWNER, owner.plane.describe(), "receiver")
    first = job(owner, LOCAL, REMOTE)
    second = job(owner, LOCAL, REMOTE)
    receiver.plane.move(OWNER, second)
    with pytest.raises(PlaneError, match="taken its pages back"):
        receiver.plane.move(OWNER, first)
    for access, says in ((b"", "cannot be read"), (b"\xff" * 32, "is referred to")):
        with pytest.raises(PlaneError, match=says):
            receiver.plane.move(OWNER, job(owner, LOCAL, REMOTE, access=access))


# TCP.


def test_the_page_server_wants_the_key_of_a_live_grant(make_end: Callable[..., End]) -> None:
    owner, receiver = make_end("tcp"), make_end("tcp")
    receiver.plane.attach(OWNER, owner.plane.describe(), "receiver")
    good = job(owner, LOCAL, REMOTE)
    for wrong in ({"access": b"k" * 16}, {"session": 2}, {"transfer_id": 8}):
        with pytest.raises(PlaneError, match="refused the session"):
            receiver.plane.move(OWNER, job(owner, LOCAL, REMOTE, **wrong))
    owner.plane.revoke(7, 1)
    with pytest.raises(PlaneError, match="refused the session"):
        receiver.plane.move(OWNER, good)


def test_the_lists_of_both_sides_must_be_of_one_size(make_end: Callable[..., End]) -> None:
    owner, receiver = make_end("tcp"), make_end("tcp")
    receiver.plane.attach(OWNER, owner.plane.describe(), "receiver")
    with pytest.raises(PlaneError, match=f"sends {6 * PAGE} bytes, {PAGE} are wanted"):
        receiver.plane.move(OWNER, job(owner, [ids(1), ids(), ids()], REMOTE))


def test_a_revoked_stream_ends(make_end: Callable[..., End]) -> None:
    owner, receiver = make_end("tcp"), make_end("tcp")
    receiver.plane.attach(OWNER, owner.plane.describe(), "receiver")
    with (
        injected("transceiver.during_send", lambda: owner.plane.revoke(7, 1)),
        pytest.raises(PlaneError, match="the owner closed the connection"),
    ):
        receiver.plane.move(OWNER, job(owner, LOCAL, REMOTE))


def test_a_receiver_that_waits_for_bytes_can_be_stopped(make_end: Callable[..., End]) -> None:
    owner, receiver = make_end("tcp"), make_end("tcp")
    receiver.plane.attach(OWNER, owner.plane.describe(), "receiver")
    held, control = threading.Event(), MoveControl()

    def hold() -> None:
        control.stop()
        held.wait(10)

    with injected("transceiver.during_send", hold), pytest.raises(MoveStoppedError):
        receiver.plane.move(OWNER, job(owner, LOCAL, REMOTE, control=control))
    held.set()


def test_an_owner_that_is_not_there(make_end: Callable[..., End]) -> None:
    owner, receiver = make_end("tcp"), make_end("tcp")
    described = owner.plane.describe()
    owner.plane.close()
    owner.plane.close()
    with pytest.raises(PlaneError, match="cannot reach the page server"):
        receiver.plane.attach(OWNER, described, "receiver")


def test_a_receiver_whose_idle_connection_was_shut_connects_again(make_end: Callable[..., End]) -> None:
    """Silent strangers make the page server shut connections on which nothing has been asked for yet."""
    owner, receiver = make_end("tcp", seed=1), make_end("tcp", seed=2)
    receiver.plane.attach(OWNER, owner.plane.describe(), "receiver")
    address = owner.plane._server.address
    silent = [socket.create_connection(address) for _ in range(builtin_tcp.MAX_CONNECTIONS + 1)]
    try:
        assert receiver.plane.move(OWNER, job(owner, LOCAL, REMOTE)) == 6 * PAGE
    finally:
        for connection in silent:
            connection.close()


def test_closing_an_owner_ends_its_connections(make_end: Callable[..., End]) -> None:
    owner, receiver = make_end("tcp"), make_end("tcp")
    receiver.plane.attach(OWNER, owner.plane.describe(), "receiver")
    granted = job(owner, LOCAL, REMOTE)
    owner.plane.close()
    with pytest.raises(PlaneError, match="cannot reach the page server"):
        receiver.plane.move(OWNER, granted)


def test_garbage_on_the_data_port_harms_nobody(make_end: Callable[..., End]) -> None:
    owner, receiver = make_end("tcp", seed=1), make_end("tcp")
    receiver.plane.attach(OWNER, owner.plane.describe(), "receiver")
    _memfd, host, port = msgspec.msgpack.decode(owner.plane.describe())
    with socket.create_connection((host, port), 5) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: kvmesh\r\n\r\n" + b"x" * 8)
        connection.settimeout(5)
        assert connection.recv(64)[:4] == b"KVP2"
    receiver.plane.move(OWNER, job(owner, LOCAL, REMOTE))
    assert np.array_equal(receiver.pages[0][1], owner.pages[0][8])
