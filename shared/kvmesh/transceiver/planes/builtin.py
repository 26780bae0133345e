"""The built-in plane: shared memory between processes of one host, else TCP; the receiver pulls.

``auto`` tries to open the owner's memory and takes TCP when it cannot; ``memfd`` and ``tcp`` take only what they name.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from kvmesh.net.doorbell import Doorbell
from kvmesh.transceiver.planes.base import MoveJob, Part, PlaneError, Side, Sums
from kvmesh.transceiver.planes.builtin_memfd import MappedPools, MemfdDescriptor, describe_pools
from kvmesh.transceiver.planes.builtin_tcp import KEY_BYTES, PageClient, PageServer, PoolViews
from kvmesh.transceiver.planes.grant_words import GrantBoard
from kvmesh.transceiver.planes.loan_words import LoanBoard
from kvmesh.transceiver.planes.loans import Loans, Receipt
from kvmesh.transceiver.types import PeerKey, PoolMemory

__all__ = ["BuiltinPlane", "PlaneChoice"]

PlaneChoice = Literal["auto", "memfd", "tcp"]

QUICK_BYTES: Final = 128 << 10
"""Copied and summed in some 15 microseconds: less than it takes to hand the work to another thread."""

LENT_BYTES: Final = 2 << 20
"""Copied and summed in some 140 microseconds: less than it takes to ask for them."""


class _Descriptor(msgspec.Struct, frozen=True, array_like=True):
    memfd: MemfdDescriptor | None
    host: str
    port: int


class BuiltinPlane:
    """See the module. Works on host memory only.

    Args:
        pools: this engine's pools.
        choice: which way to take.
        bind_host: where the TCP page server listens.
        bell: rung by receivers that have read what was lent; without it nothing is lent.

    Raises:
        PlaneError: the choice cannot work with these pools.
    """

    name = "BUILTIN"

    def __init__(
        self, pools: Sequence[PoolMemory], *, choice: PlaneChoice, bind_host: str, bell: Doorbell | None = None
    ) -> None:
        if any(pool.device != "cpu" for pool in pools):
            raise PlaneError("the built-in plane moves host memory; use cache_transceiver_config.backend NIXL on CUDA")
        is_shared = choice != "tcp" and all(pool.fd is not None for pool in pools)
        if choice == "memfd" and not is_shared:
            raise PlaneError("transfer_plane memfd needs pools backed by a memfd; use auto or tcp")
        self._pools = tuple(pools)
        self._choice = choice
        self._lock = threading.Lock()
        self._attached: dict[PeerKey, MappedPools | PageClient] = {}
        self._server = PageServer(self._pools, bind_host=bind_host) if choice != "memfd" else None
        self._board: GrantBoard | None = None
        self._loans: _SharedLoans | None = None
        self._memfd: MemfdDescriptor | None = None
        if is_shared:
            try:
                self._board = GrantBoard()
                self._loans = None if bell is None else _SharedLoans(LoanBoard(), self._attached)
                lent = None if self._loans is None else self._loans.board
                self._memfd = describe_pools(pools, self._board, lent, bell)
            except PlaneError:
                self.close()
                raise

    @property
    def loans(self) -> Loans | None:
        """See :attr:`DataPlane.loans`."""
        return self._loans

    @property
    def direction(self) -> Literal["pull", "push"]:
        """The receiver reads."""
        return "pull"

    @property
    def attaches(self) -> Literal["receiver"]:
        """The owner waits to be read."""
        return "receiver"

    def describe(self) -> bytes:
        """See :meth:`DataPlane.describe`."""
        host, port = self._server.address if self._server is not None else ("", 0)
        return msgspec.msgpack.encode(_Descriptor(self._memfd, host, port))

    def attach(self, peer: PeerKey, descriptor: bytes, side: Side) -> str:  # noqa: ARG002
        """See :meth:`DataPlane.attach`."""
        with self._lock:
            known = self._attached.get(peer)
        if known is None:
            known = self._open(descriptor)
            with self._lock:
                self._attached[peer] = known
        return "memfd" if isinstance(known, MappedPools) else "tcp"

    def detach(self, peer: PeerKey, side: Side) -> None:
        """See :meth:`DataPlane.detach`."""
        if side == "owner":
            return
        with self._lock:
            known = self._attached.pop(peer, None)
        if isinstance(known, PageClient):
            known.close()

    def grant(self, transfer_id: int, session: int, parts: Sequence[Part]) -> bytes:
        """See :meth:`DataPlane.grant`."""
        key = self._server.grant(transfer_id, session, parts) if self._server is not None else bytes(KEY_BYTES)
        return key if self._board is None else key + self._board.grant(transfer_id, session)

    def revoke(self, transfer_id: int, session: int) -> None:
        """See :meth:`DataPlane.revoke`."""
        if self._board is not None:
            self._board.revoke(transfer_id, session)
        if self._server is not None:
            self._server.revoke(transfer_id, session)

    def move(self, peer: PeerKey, job: MoveJob) -> int:
        """See :meth:`DataPlane.move`."""
        with self._lock:
            known = self._attached.get(peer)
        if known is None:
            raise PlaneError(f"{peer} is not attached")
        return known.pull(job)

    def is_quick(self, peer: PeerKey, nbytes: int) -> bool:
        """A few pages out of shared memory; also their grant, by an owner to whom the peer is not attached."""
        return nbytes <= QUICK_BYTES and not isinstance(self._attached.get(peer), PageClient)

    def session_opened(self) -> None:
        """Nothing to progress: the receiver's own threads move the bytes."""

    def session_closed(self) -> None:
        """See :meth:`session_opened`."""

    def close(self) -> None:
        """See :meth:`DataPlane.close`."""
        with self._lock:
            attached = list(self._attached.values())
            self._attached.clear()
        for known in attached:
            if isinstance(known, PageClient):
                known.close()
        if self._server is not None:
            self._server.close()
        if self._board is not None:
            self._board.close()
        if self._loans is not None:
            self._loans.board.close()

    def _open(self, descriptor: bytes) -> MappedPools | PageClient:
        try:
            theirs = msgspec.msgpack.decode(descriptor, type=_Descriptor)
        except msgspec.MsgspecError as error:
            raise PlaneError(f"the peer's description of its memory cannot be read: {error}") from error
        obstacle = "the peer shares no memory"
        if self._choice != "tcp" and theirs.memfd is not None:
            try:
                return MappedPools(theirs.memfd, self._pools)
            except PlaneError as error:
                obstacle = str(error)
        if self._choice == "memfd" or theirs.port == 0:
            raise PlaneError(f"{obstacle}, and TCP is not offered by both sides (transfer_plane)")
        return PageClient(theirs.host, theirs.port, PoolViews(self._pools))


class _SharedLoans:
    """A :class:`Loans` between processes of one host.

    Args:
        board: what this engine lends.
        attached: the peers whose loans it can read.
    """

    def __init__(self, board: LoanBoard, attached: Mapping[PeerKey, MappedPools | PageClient]) -> None:
        self.board = board
        self._attached = attached

    def lend(self, transfer_id: int, nbytes: int) -> bytes:
        """See :meth:`Loans.lend`."""
        return self.board.lend(transfer_id) if nbytes <= LENT_BYTES else b""

    def taken(self) -> list[tuple[int, Receipt]]:
        """See :meth:`Loans.taken`."""
        return self.board.taken()

    def recall(self, transfer_id: int) -> Receipt | None:
        """See :meth:`Loans.recall`."""
        return self.board.recall(transfer_id)

    def stands(self, peer: PeerKey, access: bytes) -> bool:
        """See :meth:`Loans.stands`."""
        known = self._attached.get(peer)
        return isinstance(known, MappedPools) and known.stands(access)

    def read(self, peer: PeerKey, parts: Sequence[Part], *, summed: bool) -> list[Sums]:
        """See :meth:`Loans.read`."""
        known = self._attached.get(peer)
        if not isinstance(known, MappedPools):
            raise PlaneError(f"the memory of {peer} is not mapped")
        return known.read_lent(parts, summed=summed)

    def take(self, peer: PeerKey, access: bytes, receipt: Receipt) -> bool:
        """See :meth:`Loans.take`."""
        known = self._attached.get(peer)
        return isinstance(known, MappedPools) and known.take(access, receipt)
