"""Loans over real shared memory: what is read is what was lent, or nothing is taken for it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvmesh.cache.device import CpuDevice, DeviceBuffer
from kvmesh.net.faults import injected
from kvmesh.transceiver.integrity import PageChecksums
from kvmesh.transceiver.planes.base import LOAN, Part, PlaneError
from kvmesh.transceiver.planes.builtin import LENT_BYTES, BuiltinPlane, PlaneChoice
from kvmesh.transceiver.types import PeerKey, PoolMemory

PAGE, COUNT = 4096, 32
OWNER = PeerKey("owner", 1)
DURING = "transceiver.during_transfer"


class End:
    """A plane over one pool of random bytes."""

    def __init__(self, buffer: DeviceBuffer, seed: int, choice: PlaneChoice) -> None:
        pool = PoolMemory(address=buffer.address, nbytes=buffer.nbytes, num_pages=COUNT, page_bytes=PAGE, fd=buffer.fd)
        self.pages = buffer.array.reshape(COUNT, PAGE)
        self.pages[:] = np.random.default_rng(seed).integers(0, 256, self.pages.shape, dtype=np.uint8)
        self.plane = BuiltinPlane([pool], choice=choice, bind_host="127.0.0.1")
        self.sums = PageChecksums([pool])


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[End, End]]:
    """An owner and a receiver that has attached its memory; parametrised with the choices of both."""
    device = CpuDevice(1 << 20)
    buffers = [device.allocate(COUNT * PAGE) for _ in range(2)]
    choices = getattr(request, "param", ("auto", "auto"))
    owner, receiver = (
        End(buffer, seed, choice) for seed, (buffer, choice) in enumerate(zip(buffers, choices, strict=True))
    )
    receiver.plane.attach(OWNER, owner.plane.describe(), "receiver")
    yield owner, receiver
    for end in (owner, receiver):
        end.plane.close()
    for buffer in buffers:
        device.free(buffer)


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, dtype=np.int32)


PARTS = [Part(0, ids(1, 2), 0, ids(8, 9), PAGE), Part(0, ids(30), 0, ids(0), PAGE)]


def read(receiver: End, access: bytes, parts: list[Part] = PARTS, *, summed: bool = False) -> list[np.ndarray]:
    return receiver.plane.read_lent(OWNER, access, parts, summed=summed)


@pytest.mark.parametrize("ends", [("auto", "auto"), ("memfd", "memfd"), ("auto", "memfd")], indirect=True)
def test_what_is_lent_is_read(ends: tuple[End, End]) -> None:
    owner, receiver = ends
    untouched = receiver.pages.copy()
    access = owner.plane.lend(7, 3 * PAGE)
    assert receiver.plane.stands(OWNER, access)
    sums = read(receiver, access, summed=True)
    for part, of in zip(PARTS, sums, strict=True):
        assert np.array_equal(receiver.pages[part.local], owner.pages[part.remote])
        mirrored = part._replace(local=part.remote)
        assert of.tobytes() == owner.sums.of([mirrored])[0]
        untouched[part.local] = owner.pages[part.remote]
    assert np.array_equal(receiver.pages, untouched), "nothing else changes"
    assert read(receiver, access) == [], "a loan may be read again while it stands"


def test_what_was_taken_back_is_not_read(ends: tuple[End, End]) -> None:
    owner, receiver = ends
    access = owner.plane.lend(7, PAGE)
    owner.plane.revoke(7, 1)
    assert receiver.plane.stands(OWNER, access), "that was another session"
    owner.plane.revoke(7, LOAN)
    before = receiver.pages.copy()
    assert not receiver.plane.stands(OWNER, access)
    with pytest.raises(PlaneError, match="taken its pages back"):
        read(receiver, access)
    assert np.array_equal(receiver.pages, before)
    assert owner.plane.lend(8, PAGE) != access, "a word serves one loan only"
    assert not receiver.plane.stands(OWNER, access)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_what_is_taken_back_meanwhile_is_not_accepted(ends: tuple[End, End], at: int) -> None:
    """Before the first piece, between two, and after the last; then other bytes lie there."""
    owner, receiver = ends
    access = owner.plane.lend(7, 3 * PAGE)
    passed: list[int] = []

    def taken_back() -> None:
        passed.append(len(passed) + 1)
        if len(passed) == at:
            owner.plane.revoke(7, LOAN)
            owner.pages[:] = 0

    with injected(DURING, taken_back), pytest.raises(PlaneError, match="taken its pages back"):
        read(receiver, access)
    assert passed == [1, 2, 3]


@pytest.mark.parametrize(
    "parts",
    [
        [Part(0, ids(1), 0, ids(COUNT), PAGE)],
        [Part(0, ids(1), 0, ids(-1), PAGE)],
        [Part(0, ids(1), 1, ids(0), PAGE)],
    ],
)
def test_nothing_outside_the_owners_pools_is_read(ends: tuple[End, End], parts: list[Part]) -> None:
    owner, receiver = ends
    with pytest.raises(PlaneError, match=r"(is|are) asked for"):
        read(receiver, owner.plane.lend(7, PAGE), parts)


@pytest.mark.parametrize("access", [b"", b"short", b"\xff" * 16])
def test_no_other_access_is_one(ends: tuple[End, End], access: bytes) -> None:
    owner, receiver = ends
    owner.plane.lend(7, PAGE)
    assert not receiver.plane.stands(OWNER, access)
    with pytest.raises(PlaneError):
        read(receiver, access)


def test_only_few_bytes_are_lent(ends: tuple[End, End]) -> None:
    owner, _ = ends
    assert owner.plane.lend(7, LENT_BYTES)
    assert owner.plane.lend(8, LENT_BYTES + 1) == b""


@pytest.mark.parametrize("ends", [("tcp", "tcp"), ("auto", "tcp")], indirect=True)
def test_over_tcp_nothing_is_read_unasked(ends: tuple[End, End]) -> None:
    owner, receiver = ends
    access = owner.plane.lend(7, PAGE)
    assert not receiver.plane.stands(OWNER, access)
    with pytest.raises(PlaneError, match="not mapped"):
        read(receiver, access)


def test_strangers_are_lent_nothing(ends: tuple[End, End]) -> None:
    owner, receiver = ends
    access = owner.plane.lend(7, PAGE)
    receiver.plane.detach(OWNER, "receiver")
    assert not receiver.plane.stands(OWNER, access)
    with pytest.raises(PlaneError, match="not mapped"):
        read(receiver, access)


def test_a_closed_owner_has_taken_everything_back(ends: tuple[End, End]) -> None:
    owner, receiver = ends
    access = owner.plane.lend(7, PAGE)
    owner.plane.close()
    assert not receiver.plane.stands(OWNER, access)
    with pytest.raises(PlaneError, match="taken its pages back"):
        read(receiver, access)
