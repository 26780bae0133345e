"""Two engines in one thread: both sides over a wire that tests pump by hand, a plane they hold, and a manual clock."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest

from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, PageLayout
from kvmesh.net.clock import ManualClock
from kvmesh.net.faults import fault_point
from kvmesh.protocol.disagg import HandOff
from kvmesh.protocol.transfer import (
    CancelSession,
    Hello,
    HelloReply,
    Refused,
    RequestData,
    ResultAck,
    TransferResult,
)
from kvmesh.transceiver.handshake import Handshake, Introduction
from kvmesh.transceiver.ledger import Ledger
from kvmesh.transceiver.local import LocalEngine
from kvmesh.transceiver.planes.base import MoveJob, PlaneError
from kvmesh.transceiver.planes.loans import Receipt
from kvmesh.transceiver.receiver import ReceiverSide
from kvmesh.transceiver.sender import SenderSide
from kvmesh.transceiver.tickets import Signer
from kvmesh.transceiver.timing import TransferTimes
from kvmesh.transceiver.types import PeerKey, PoolMemory

SECRET = b"cluster secret of these tests"
PAGE_BYTES = 256
NUM_PAGES = 64
TOKENS_PER_BLOCK = 4
PROMPT_DIGEST = b"p" * 32


def small_layout(groups: int) -> PageLayout:
    """A layer for each of ``groups`` layer groups, which share a pool."""
    layers = tuple(
        LayerCacheSpec(
            layer_index=group, num_kv_heads=1, head_dim=8, dtype="float32", window=None if group == 0 else 64 * group
        )
        for group in range(groups)
    )
    layout = PageLayout.build(CacheRequirements(layers), TOKENS_PER_BLOCK)
    assert [pool.page_bytes for pool in layout.pools] == [PAGE_BYTES]
    return layout


class FakeLease:
    """Pages that count how often they were released."""

    def __init__(self, *groups: Sequence[int]) -> None:
        self._groups = [np.array(pages, dtype=np.int32) for pages in groups]
        self.released = 0
        self.quarantined = False

    def page_ids(self, group: int) -> np.ndarray:
        return self._groups[group]

    def quarantine(self) -> None:
        assert not self.quarantined
        assert not self.released
        self.quarantined = True

    def release(self) -> None:
        self.released += 1
        assert self.released == 1, "a lease is released once"


class SteppingWaiter:
    """Waits by moving the clock, unless something is notified in ``between``, which a test may use for that."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.waits: list[float] = []
        self.between: Callable[[], None] = lambda: None
        self.needed_elsewhere = False
        self._notified = False

    def wait(self, changed: threading.Condition, seconds: float) -> bool:
        assert seconds > 0, "a wait of no length would spin"
        self.waits.append(seconds)
        self._notified = False
        self.between()
        if not self._notified and not self.needed_elsewhere:
            self._clock.advance(seconds)
        return not self.needed_elsewhere

    def notify(self, changed: threading.Condition) -> None:
        self._notified = True


class InlineWorkers:
    """Jobs that run when the test says so."""

    def __init__(self) -> None:
        self.jobs: deque[Callable[[], None]] = deque()
        self.error = None

    def submit(self, name: str, job: Callable[[], None]) -> None:
        self.jobs.append(job)

    def retire(self, name: str, last_job: Callable[[], None] | None = None) -> None:
        if last_job is not None:
            self.jobs.append(last_job)

    def run(self) -> bool:
        ran = bool(self.jobs)
        while self.jobs:
            self.jobs.popleft()()
        return ran


class FakePlane:
    """Moves nothing, and fails or pauses as told."""

    name = "FAKE"

    def __init__(self, direction: Literal["pull", "push"]) -> None:
        self.direction = direction
        self.moved: list[MoveJob] = []
        self.detached: list[PeerKey] = []
        self.granted: dict[tuple[int, int], Sequence[Any]] = {}
        self.open_sessions = 0
        self.attach_error: str | None = None
        self.move_error: str | None = None
        self.quick_bytes = -1
        self.attached = True
        self.lends = False
        self.lend_error: str | None = None
        self.lent: dict[int, bytes] = {}
        """By transfer, as the owner; a receiver looks into those of its owner."""
        self.receipts: dict[int, Receipt] = {}
        """Of those that were taken."""
        self.owner = self
        self.grants = 0
        self.copied: list[Sequence[Any]] = []
        self.factor = 1
        self.during: Callable[[], None] = lambda: None

    def describe(self) -> bytes:
        return b"memory"

    @property
    def attaches(self) -> str:
        return "receiver" if self.direction == "pull" else "owner"

    def attach(self, peer: PeerKey, descriptor: bytes, side: str) -> str:
        assert side == self.attaches
        if self.attach_error is not None:
            raise PlaneError(self.attach_error)
        assert descriptor == b"memory"
        return "fake"

    def detach(self, peer: PeerKey, side: str) -> None:
        self.detached.append(peer)

    def grant(self, transfer_id: int, session: int, parts: Sequence[Any]) -> bytes:
        self.granted[transfer_id, session] = parts
        return b"key"

    def revoke(self, transfer_id: int, session: int) -> None:
        self.granted.pop((transfer_id, session), None)

    @property
    def loans(self) -> FakePlane | None:
        return self if self.direction == "pull" else None

    def lend(self, transfer_id: int, nbytes: int) -> bytes:
        if self.lends and self.lend_error is not None:
            raise PlaneError(self.lend_error)
        if not self.lends or nbytes > self.quick_bytes:
            return b""
        self.grants += 1
        self.lent[transfer_id] = b"loan %d" % self.grants
        return self.lent[transfer_id]

    def taken(self) -> list[tuple[int, Receipt]]:
        return [(transfer_id, self.recall(transfer_id)) for transfer_id in list(self.receipts)]  # type: ignore[misc]

    def recall(self, transfer_id: int) -> Receipt | None:
        self.lent.pop(transfer_id, None)
        return self.receipts.pop(transfer_id, None)

    def stands(self, peer: PeerKey, access: bytes) -> bool:
        standing = [loan for number, loan in self.owner.lent.items() if number not in self.owner.receipts]
        return self.attached and peer.instance_id == "context" and access in standing

    def read(self, peer: PeerKey, parts: Sequence[Any], *, summed: bool) -> list[np.ndarray]:
        """Reads nothing; the sums are the page's numbers, times a factor."""
        fault_point("transceiver.during_transfer")
        self.during()
        fault_point("transceiver.during_transfer")
        self.copied.append(parts)
        return [part.remote.astype("<u8") * self.factor for part in parts] if summed else []

    def take(self, peer: PeerKey, access: bytes, receipt: Receipt) -> bool:
        if not self.stands(peer, access):
            return False
        (number,) = [number for number, loan in self.owner.lent.items() if loan == access]
        self.owner.receipts[number] = receipt
        return True

    def move(self, peer: PeerKey, job: MoveJob) -> int:
        job.control.checkpoint()
        self.during()
        if self.move_error is not None:
            raise PlaneError(self.move_error)
        job.control.checkpoint()
        self.moved.append(job)
        return job.num_bytes

    def is_quick(self, peer: PeerKey, nbytes: int) -> bool:
        return nbytes <= self.quick_bytes

    def session_opened(self) -> None:
        self.open_sessions += 1

    def session_closed(self) -> None:
        self.open_sessions -= 1

    def close(self) -> None:
        pass


class Wire:
    """A context and a generation engine; messages lie in queues until :meth:`pump`."""

    ROUTE = b"generation"
    ENDPOINT = "tcp://context:1"

    def __init__(self, direction: Literal["pull", "push"], times: TransferTimes, groups: int) -> None:
        self.clock = ManualClock()
        self.waiter = SteppingWaiter(self.clock)
        self.to_context: deque[Any] = deque()
        self.to_generation: deque[Any] = deque()
        self.up = True
        self.dialled: list[str] = []
        self.context = self._engine("context", direction, times, groups)
        self.generation = self._engine("generation", direction, times, groups)
        self.generation_plane.owner = self.context_plane
        self.sender = SenderSide(self.context)
        self.receiver = ReceiverSide(self.generation)
        self.leases: dict[tuple[str, int], FakeLease] = {}

    @property
    def context_plane(self) -> FakePlane:
        return self.context.plane  # type: ignore[return-value]

    @property
    def generation_plane(self) -> FakePlane:
        return self.generation.plane  # type: ignore[return-value]

    def _engine(self, name: str, direction: Literal["pull", "push"], times: TransferTimes, groups: int) -> LocalEngine:
        key = PeerKey(name, 1)
        plane = FakePlane(direction)
        pool = PoolMemory(address=0, nbytes=NUM_PAGES * PAGE_BYTES, num_pages=NUM_PAGES, page_bytes=PAGE_BYTES)
        layout = small_layout(groups)
        introduction = Introduction(key, plane.name, "d" * 64, "a layout", layout)
        return LocalEngine(
            key=key,
            pools=[pool],
            layout=layout,
            plane=plane,
            checksums=None,
            handshake=Handshake(introduction, Signer(SECRET, "hello"), plane.describe()),
            tickets=Signer(SECRET, "ticket"),
            claims=Signer(SECRET, "claim"),
            addresses=Signer(SECRET, "address"),
            times=times,
            clock=self.clock,
            waiter=self.waiter,
            ledger=Ledger(key, self.clock),
            workers=InlineWorkers(),  # type: ignore[arg-type]
            send=self._send,
            admit=lambda route: None,
            dial=self._dial,
            hang_up=lambda endpoint: None,
            watch=lambda pidfd, peer: __import__("os").close(pidfd),
            peer_gone=lambda peer: None,
        )

    def _dial(self, endpoint: str) -> bytes:
        self.dialled.append(endpoint)
        return self.ROUTE

    def _send(self, route: bytes | str, message: Any) -> None:
        (self.to_generation if isinstance(route, bytes) else self.to_context).append(message)

    def offer(self, transfer_id: int, pages: Sequence[int] | None = None, tokens: int = 15) -> HandOff:
        """Open a send session; returns its hand-off."""
        blocks = -(-tokens // TOKENS_PER_BLOCK)
        groups = self.context.num_groups
        lease = FakeLease(*[pages if pages is not None else range(10, 10 + blocks)] * groups)
        self.leases["context", transfer_id] = lease
        token = self.sender.open(transfer_id, f"c{transfer_id}", lease, tokens, self.ENDPOINT, PROMPT_DIGEST)
        return self.handoff(token)

    def handoff(self, token: bytes, **changes: Any) -> HandOff:
        fields = {
            "ticket": token,
            "control_endpoint": self.ENDPOINT,
            "instance_id": "context",
            "epoch": 1,
            "layout_digest": "d" * 64,
            "seed": 7,
        }
        return HandOff(**{**fields, **changes})

    def ask(
        self, transfer_id: int, handoff: HandOff, pages: Sequence[int] | None = None, first: int = 0, tokens: int = 15
    ) -> None:
        """Open a receive session."""
        blocks = -(-tokens // TOKENS_PER_BLOCK)
        groups = self.generation.num_groups
        lease = FakeLease(*[pages if pages is not None else range(20, 20 + blocks)] * groups)
        self.receiver.open(transfer_id, f"g{transfer_id}", handoff, lease, [first] * groups, PROMPT_DIGEST)
        self.leases["generation", transfer_id] = lease

    def deliver_to_context(self) -> bool:
        delivered = bool(self.to_context)
        while self.to_context:
            message = self.to_context.popleft()
            handler = {
                Hello: self.sender.on_hello,
                RequestData: self.sender.on_request,
                ResultAck: self.sender.on_ack,
                CancelSession: self.sender.on_cancel,
            }[type(message)]
            handler(self.ROUTE, message)
        return delivered

    def deliver_to_generation(self) -> bool:
        delivered = bool(self.to_generation)
        while self.to_generation:
            message = self.to_generation.popleft()
            handler = {
                HelloReply: self.receiver.lives.on_reply,
                TransferResult: self.receiver.answers.on_result,
                Refused: self.receiver.answers.on_refused,
                CancelSession: self.receiver.answers.on_cancel,
            }[type(message)]
            handler(self.ENDPOINT, message)
        return delivered

    def pump(self) -> None:
        """Deliver and work until nothing is left to do."""
        while any(
            [
                self.deliver_to_context(),
                self.deliver_to_generation(),
                self.context.workers.run(),  # type: ignore[attr-defined]
                self.generation.workers.run(),  # type: ignore[attr-defined]
            ]
        ):
            pass

    def pair(self) -> None:
        """Introduce the two to each other with an empty transfer, and forget it."""
        self.ask(1, self.offer(1))
        self.pump()
        assert self.receiver.poll(0).completed == [1]
        assert self.sender.poll(0).completed == [1]
        self.context.ledger.drain()
        self.generation.ledger.drain()
        self.context_plane.moved.clear()
        self.generation_plane.moved.clear()

    def released(self, transfer_id: int) -> tuple[int, int]:
        """How often the leases of both sides were released."""
        return self.leases["context", transfer_id].released, self.leases["generation", transfer_id].released

    def states(self, side: str, transfer_id: int) -> list[str]:
        """The states that a side's ledger shows, drained."""
        engine = self.context if side == "context" else self.generation
        return [event.state for event in engine.ledger.drain() if event.transfer_id == transfer_id]


@pytest.fixture
def tools() -> SimpleNamespace:
    """The classes above, for tests that build something of their own."""
    return SimpleNamespace(
        FakeLease=FakeLease, Wire=Wire, SteppingWaiter=SteppingWaiter, SECRET=SECRET, PROMPT_DIGEST=PROMPT_DIGEST
    )


@pytest.fixture
def make_wire() -> Callable[..., Wire]:
    """Builds a wire; times are in milliseconds."""

    def make(
        direction: Literal["pull", "push"] = "pull",
        *,
        timeout_ms: int = 60_000,
        slice_ms: int = 1_000,
        poll_ms: int = 5_000,
        groups: int = 1,
    ) -> Wire:
        return Wire(direction, TransferTimes(timeout_ms / 1e3, slice_ms / 1e3, poll_ms / 1e3), groups)

    return make


@pytest.fixture(params=["pull", "push"])
def wire(request: pytest.FixtureRequest, make_wire: Callable[..., Wire]) -> Wire:
    """Two engines that know each other, over each kind of plane."""
    wire = make_wire(request.param)
    wire.pair()
    return wire


@pytest.fixture
def pull(make_wire: Callable[..., Wire]) -> Wire:
    """Two engines that know each other; the receiver reads."""
    wire = make_wire("pull")
    wire.pair()
    return wire


@pytest.fixture
def push(make_wire: Callable[..., Wire]) -> Wire:
    """Two engines that know each other; the owner writes."""
    wire = make_wire("push")
    wire.pair()
    return wire
