"""Loans over real shared memory: what is read is what was lent, or nothing is taken for it."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.cache.device import CpuDevice, DeviceBuffer
from kvmesh.net.doorbell import Doorbell
from kvmesh.net.faults import injected
from kvmesh.transceiver.integrity import PageChecksums
from kvmesh.transceiver.planes.base import Part, PlaneError
from kvmesh.transceiver.planes.builtin import LENT_BYTES, BuiltinPlane, PlaneChoice
from kvmesh.transceiver.planes.loan_words import MANY_LOANS, NUM_SLOTS, LoanBoard, LoanWords
from kvmesh.transceiver.planes.loans import Loans, Receipt
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
        self.bell = Doorbell()
        self.plane = BuiltinPlane([pool], choice=choice, bind_host="127.0.0.1", bell=self.bell)
        self.sums = PageChecksums([pool])

    @property
    def loans(self) -> Loans:
        assert self.plane.loans is not None
        return self.plane.loans


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
        end.bell.close()
    for buffer in buffers:
        device.free(buffer)


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, dtype=np.int32)


PARTS = [Part(0, ids(1, 2), 0, ids(8, 9), PAGE), Part(0, ids(30), 0, ids(0), PAGE)]


RECEIPT = Receipt(1 << 63, 3, 3 * PAGE)


def read(receiver: End, access: bytes, parts: list[Part] = PARTS, *, summed: bool = False) -> list[np.ndarray] | None:
    """Copy and take; None where what was copied may be anything."""
    sums = receiver.loans.read(OWNER, parts, summed=summed)
    return sums if receiver.loans.take(OWNER, access, RECEIPT) else None


@pytest.mark.parametrize("ends", [("auto", "auto"), ("memfd", "memfd"), ("auto", "memfd")], indirect=True)
def test_what_is_lent_is_read(ends: tuple[End, End]) -> None:
    owner, receiver = ends
    untouched = receiver.pages.copy()
    access = owner.loans.lend(7, 3 * PAGE)
    assert receiver.loans.stands(OWNER, access)
    assert owner.loans.taken() == []
    assert not owner.bell.wait(0)
    sums = read(receiver, access, summed=True)
    assert sums is not None
    for part, of in zip(PARTS, sums, strict=True):
        assert np.array_equal(receiver.pages[part.local], owner.pages[part.remote])
        mirrored = part._replace(local=part.remote)
        assert of.tobytes() == owner.sums.of([mirrored])[0]
        untouched[part.local] = owner.pages[part.remote]
    assert np.array_equal(receiver.pages, untouched), "nothing else changes"
    assert owner.bell.wait(60), "the owner hears of it"
    assert not receiver.loans.stands(OWNER, access)
    assert read(receiver, access) is None, "a loan is read once"
    assert owner.loans.taken() == [(7, RECEIPT)]
    assert owner.loans.taken() == []
    assert owner.loans.recall(7) is None, "it was told"


def test_what_was_taken_back_is_not_read(ends: tuple[End, End]) -> None:
    owner, receiver = ends
    access = owner.loans.lend(7, PAGE)
    owner.plane.revoke(7, 1)
    assert receiver.loans.stands(OWNER, access), "that was a session"
    assert owner.loans.recall(7) is None
    assert not receiver.loans.stands(OWNER, access)
    assert read(receiver, access) is None
    assert not owner.bell.wait(0)
    assert owner.loans.lend(8, PAGE) != access, "a word serves one loan only"
    assert not receiver.loans.stands(OWNER, access)
    assert read(receiver, access) is None
    assert owner.loans.taken() == []


def test_who_takes_a_loan_back_hears_that_it_was_read(ends: tuple[End, End]) -> None:
    owner, receiver = ends
    access = owner.loans.lend(7, PAGE)
    assert read(receiver, access) is not None
    assert owner.loans.recall(7) == RECEIPT
    assert owner.loans.recall(7) is None
    assert owner.loans.taken() == []


@pytest.mark.parametrize("at", [1, 2, 3])
def test_what_is_taken_back_meanwhile_is_not_accepted(ends: tuple[End, End], at: int) -> None:
    """Before the first piece, between two, and after the last; then other bytes lie there."""
    owner, receiver = ends
    access = owner.loans.lend(7, 3 * PAGE)
    passed: list[int] = []

    def taken_back() -> None:
        passed.append(len(passed) + 1)
        if len(passed) == at:
            assert owner.loans.recall(7) is None
            owner.pages[:] = 0

    with injected(DURING, taken_back):
        assert read(receiver, access) is None
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
        read(receiver, owner.loans.lend(7, PAGE), parts)


@pytest.mark.parametrize(
    "access", [b"", b"short", b"\xff" * 16, bytes(16), bytes(15) + b"\x80", (NUM_SLOTS - 1).to_bytes(16, "little")]
)
def test_no_other_access_is_one(ends: tuple[End, End], access: bytes) -> None:
    owner, receiver = ends
    owner.loans.lend(7, PAGE)
    assert not receiver.loans.stands(OWNER, access)
    assert read(receiver, access) is None
    assert owner.loans.taken() == []


def test_only_few_bytes_are_lent(ends: tuple[End, End]) -> None:
    owner, _ = ends
    assert owner.loans.lend(7, LENT_BYTES)
    assert owner.loans.lend(8, LENT_BYTES + 1) == b""


@pytest.mark.parametrize("ends", [("auto", "tcp"), ("tcp", "auto")], indirect=True)
def test_over_tcp_nothing_is_read_unasked(ends: tuple[End, End]) -> None:
    owner, receiver = ends
    lends, other = (owner, receiver) if owner.plane.loans is not None else (receiver, owner)
    assert other.plane.loans is None
    access = lends.loans.lend(7, PAGE)
    assert not lends.loans.stands(OWNER, access)
    with pytest.raises(PlaneError, match="not mapped"):
        read(lends, access)


def test_strangers_are_lent_nothing(ends: tuple[End, End]) -> None:
    owner, receiver = ends
    access = owner.loans.lend(7, PAGE)
    receiver.plane.detach(OWNER, "receiver")
    assert not receiver.loans.stands(OWNER, access)
    assert not receiver.loans.take(OWNER, access, RECEIPT)
    with pytest.raises(PlaneError, match="not mapped"):
        read(receiver, access)


def test_a_closed_owner_has_taken_everything_back(ends: tuple[End, End]) -> None:
    owner, receiver = ends
    access = owner.loans.lend(7, PAGE)
    owner.plane.close()
    assert not receiver.loans.stands(OWNER, access)
    assert read(receiver, access) is None
    with pytest.raises(PlaneError, match="are lent"):
        owner.loans.lend(8, PAGE)


def test_a_closed_receiver_has_let_go_of_everything(ends: tuple[End, End]) -> None:
    owner, receiver = ends
    access = owner.loans.lend(7, PAGE)
    loans, before = receiver.loans, descriptors("kvmesh-loans")
    receiver.plane.close()
    assert not loans.stands(OWNER, access)
    # Its own board's, with its mapping's, and that of the mapping of the owner's.
    assert descriptors("kvmesh-loans") == before - 3


def descriptors(name: str) -> int:
    """How many of this process are of memory with this name."""
    count = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # The listing's own.
            count += name in str(descriptor.readlink())
    return count


def test_an_owner_that_cannot_be_told_is_asked(ends: tuple[End, End]) -> None:
    owner, receiver = ends
    stranger = PeerKey("deaf", 1)
    access = owner.loans.lend(7, PAGE)
    descriptor = owner.plane.describe()
    owner.bell.close()
    assert receiver.plane.attach(stranger, descriptor, "receiver") == "memfd"
    assert not receiver.loans.stands(stranger, access)
    assert not receiver.loans.take(stranger, access, RECEIPT)


@pytest.mark.parametrize("change", ["slots", "no bell", "no words"])
def test_what_cannot_be_read_on_loan_is_still_mapped(ends: tuple[End, End], change: str) -> None:
    """A peer of another build, or whose descriptors are gone."""
    owner, receiver = ends
    ours = owner.plane._memfd
    assert ours is not None
    assert ours.loans is not None
    assert ours.bell is not None
    if change == "slots":
        theirs = msgspec.structs.replace(ours, loans=msgspec.structs.replace(ours.loans, page_bytes=32))
    elif change == "no bell":
        theirs = msgspec.structs.replace(ours, bell=msgspec.structs.replace(ours.bell, inode=0))
    else:
        theirs = msgspec.structs.replace(ours, loans=msgspec.structs.replace(ours.loans, inode=0))
    stranger = PeerKey("stranger", 1)
    described = msgspec.msgpack.encode([msgspec.to_builtins(theirs), "", 0])
    assert receiver.plane.attach(stranger, described, "receiver") == "memfd"
    assert not receiver.loans.stands(stranger, owner.loans.lend(7, PAGE))


@pytest.mark.parametrize("choice", ["auto", "memfd"])
def test_pools_that_cannot_be_shared_leave_nothing_open(choice: PlaneChoice) -> None:
    pool = PoolMemory(address=1 << 20, nbytes=PAGE, num_pages=1, page_bytes=PAGE)
    before, bell = descriptors("kvmesh-"), Doorbell()
    if choice == "memfd":
        with pytest.raises(PlaneError, match="backed by a memfd"):
            BuiltinPlane([pool], choice=choice, bind_host="127.0.0.1", bell=bell)
    else:
        plane = BuiltinPlane([pool], choice=choice, bind_host="127.0.0.1", bell=bell)
        assert plane.loans is None
        plane.close()
    bell.close()
    assert descriptors("kvmesh-") == before


# The words alone.


class Board:
    """An owner's words and a reader's view of them."""

    def __init__(self) -> None:
        self.owner = LoanBoard()
        mapping = mmap.mmap(self.owner.fd, NUM_SLOTS * self.owner.page_bytes)
        self.reader = LoanWords(memoryview(mapping).cast("Q"))


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board()
    yield board
    board.owner.close()
    board.owner.close()


def test_a_loan_is_taken_or_taken_back_never_both(board: Board) -> None:
    """Two readers and the owner at once: each loan has one end. That a step is one: tests of the words' kernels."""
    rounds = 300
    start = threading.Barrier(3)
    access = [b""]
    taken: list[list[bool]] = [[], []]
    recalled: list[Receipt | None] = []

    def reads(reader: int) -> None:
        for _ in range(rounds):
            start.wait(60)
            taken[reader].append(board.reader.take(access[0], Receipt(reader, 1, 1)))
            start.wait(60)

    threads = [threading.Thread(target=reads, args=(reader,)) for reader in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(rounds):
        access[0] = board.owner.lend(7)
        start.wait(60)
        recalled.append(board.owner.recall(7))
        start.wait(60)
    for thread in threads:
        thread.join()
    for first, second, receipt in zip(*taken, recalled, strict=True):
        assert first + second + (receipt is None) in (1, 2)
        assert not (first and second)
        # Taken before the owner looked: it knows of it. Otherwise nobody has.
        assert (receipt is not None) == (first or second)


@given(st.lists(st.tuples(st.sampled_from(["lend", "take", "recall", "taken"]), st.integers(1, 4)), max_size=40))
def test_the_words_are_as_a_list_of_loans(steps: list[tuple[str, int]]) -> None:
    board = Board()
    try:
        lent: dict[int, bytes] = {}
        read: dict[int, Receipt] = {}
        stale: list[bytes] = []
        for number, (step, transfer_id) in enumerate(steps):
            if step == "lend":
                stale += [lent.pop(transfer_id)] if transfer_id in lent else []
                read.pop(transfer_id, None)
                lent[transfer_id] = board.owner.lend(transfer_id)
            elif step == "take":
                receipt = Receipt(number, 0, 2**64 - 1)
                could = transfer_id in lent and transfer_id not in read
                assert board.reader.take(lent.get(transfer_id, b""), receipt) == could
                if could:
                    read[transfer_id] = receipt
            elif step == "recall":
                assert board.owner.recall(transfer_id) == read.pop(transfer_id, None)
                stale += [lent.pop(transfer_id)] if transfer_id in lent else []
            else:
                assert sorted(board.owner.taken()) == sorted(read.items())
                stale += [lent.pop(transfer_id) for transfer_id in read]
                read.clear()
            assert not any(board.reader.stands(access) for access in stale)
            assert {one for one in lent if board.reader.stands(lent[one])} == lent.keys() - read.keys()
    finally:
        board.owner.close()


@pytest.mark.parametrize("others", [0, MANY_LOANS])
def test_words_that_nobody_put_up_are_nobodys(board: Board, others: int) -> None:
    access = board.owner.lend(7)
    for transfer_id in range(100, 100 + others):
        board.owner.lend(transfer_id)
    words = board.owner._words
    words[8 * 50] = words[8 * NUM_SLOTS - 8] = 2**64 - 1
    assert board.owner.taken() == []
    assert board.reader.stands(access)
    assert board.reader.take(access, RECEIPT)
    assert board.owner.taken() == [(7, RECEIPT)]


def test_there_are_not_more_loans_than_words(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.transceiver.planes.loan_words.NUM_SLOTS", 2)
    board.owner.lend(1)
    board.owner.lend(2)
    with pytest.raises(PlaneError, match="2 transfers are lent"):
        board.owner.lend(3)
    board.owner.recall(1)
    assert board.owner.lend(3)
