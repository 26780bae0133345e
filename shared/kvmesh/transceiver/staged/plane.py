"""The data plane of the runtime CPP: pages go through staging buffers on both sides, in pieces, over a channel.

The receiver drives: it takes room in its own region, asks the owner for a piece, and scatters what has come. Room is
taken at the receiver first and at the owner second, and an owner's room waits for nobody: there is no circle. A late
or frozen owner can only ever write into staging rooms, never into pages of the cache.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Final, Literal

import msgspec

from kvmesh.transceiver.channels.base import Channel, Region
from kvmesh.transceiver.planes.base import MoveJob, Part, PlaneError, Side
from kvmesh.transceiver.staged.admission import AdmissionGate
from kvmesh.transceiver.staged.attachments import Attachments
from kvmesh.transceiver.staged.client import PieceClient
from kvmesh.transceiver.staged.copying import PageCopier, item_table
from kvmesh.transceiver.staged.limbo import Limbo
from kvmesh.transceiver.staged.region import RegionSize, StagingMemory
from kvmesh.transceiver.staged.rooms import Rooms
from kvmesh.transceiver.staged.server import PieceServer
from kvmesh.transceiver.staged.staging import Staging
from kvmesh.transceiver.tickets import Signer
from kvmesh.transceiver.timing import TransferTimes
from kvmesh.transceiver.types import PeerKey, PoolMemory, StagingStats

__all__ = ["StagedPlane"]

MAX_STALL_S: Final = 60.0
"""How long a receiver may say nothing where transfers have no deadline."""


class _Descriptor(msgspec.Struct, frozen=True, array_like=True):
    host: str
    port: int
    channel: bytes


class StagedPlane:
    """See the module. Works on host memory only.

    Args:
        key: this engine.
        pools: its pools.
        size: of each of the two regions.
        make_channel: builds the channel over the send and the receive region.
        signer: for introductions between piece connections.
        bind_host: where the piece server listens.
        times: bounds of connection set-up, and of how long a receiver with a transfer under way may say nothing.

    Raises:
        PlaneError: it cannot work with these pools, or there is no memory for the regions.
        OSError: ``bind_host`` cannot be bound.
    """

    direction: Literal["pull", "push"] = "pull"
    attaches: Literal["receiver", "owner", "both"] = "receiver"

    def __init__(
        self,
        key: PeerKey,
        pools: Sequence[PoolMemory],
        size: RegionSize,
        make_channel: Callable[[Region, Region], Channel],
        *,
        signer: Signer,
        bind_host: str,
        times: TransferTimes,
    ) -> None:
        if any(pool.device != "cpu" for pool in pools):
            raise PlaneError(
                "transceiver_runtime CPP stages pages in host memory and cannot read CUDA pools; "
                "set cache_transceiver_config.transceiver_runtime: PYTHON and backend: NIXL"
            )
        self._closed = False
        self._lock = threading.Lock()
        self._owners: dict[PeerKey, _Descriptor] = {}
        self._clients: dict[PeerKey, PieceClient] = {}
        self._connecting: dict[PeerKey, threading.Lock] = {}
        self._send = StagingMemory(size)
        self._receive = StagingMemory(size)
        self._channel = make_channel(self._send.region, self._receive.region)
        self.name = f"CPP/{self._channel.name}"
        copier = PageCopier(pools)
        self._send_rooms = Rooms(size.nbytes)
        self._gate = AdmissionGate(size.nbytes)
        rooms = Rooms(size.nbytes)
        attachments = Attachments(self._channel)
        self._staging = Staging(
            key=key,
            signer=signer,
            channel=self._channel,
            attachments=attachments,
            copier=copier,
            region=self._receive.region,
            rooms=rooms,
            limbo=Limbo(rooms),
            tags=itertools.count(),
            connect_timeout_s=times.connect_s,
        )
        self._server = PieceServer(
            copier,
            self._send.region,
            self._send_rooms,
            self._channel,
            attachments,
            signer=signer,
            bind_host=bind_host,
            stall_s=min(times.timeout_s, MAX_STALL_S),
        )

    @property
    def loans(self) -> None:
        """Nothing is read unasked."""

    def describe(self) -> bytes:
        """See :meth:`DataPlane.describe`."""
        return msgspec.msgpack.encode(_Descriptor(*self._server.address, self._channel.describe()))

    def attach(self, peer: PeerKey, descriptor: bytes, side: Side) -> str:  # noqa: ARG002
        """See :meth:`DataPlane.attach`. The owner attaches when a receiver introduces itself to its piece server."""
        try:
            theirs = msgspec.msgpack.decode(descriptor, type=_Descriptor)
        except msgspec.MsgspecError as error:
            raise PlaneError(f"the peer's description of its staging buffers cannot be read: {error}") from error
        with self._lock:
            self._owners[peer] = theirs
        self._client(peer)
        return self.name

    def detach(self, peer: PeerKey, side: Side) -> None:
        """See :meth:`DataPlane.detach`."""
        if side == "owner":
            self._server.drop(peer)
            return
        with self._lock:
            self._owners.pop(peer, None)
            self._connecting.pop(peer, None)
            client = self._clients.pop(peer, None)
        if client is not None:
            client.leave()

    def grant(self, transfer_id: int, session: int, parts: Sequence[Part]) -> bytes:
        """See :meth:`DataPlane.grant`."""
        return self._server.grant(transfer_id, session, parts)

    def revoke(self, transfer_id: int, session: int) -> None:
        """See :meth:`DataPlane.revoke`."""
        self._server.revoke(transfer_id, session)

    def move(self, peer: PeerKey, job: MoveJob) -> int:
        """See :meth:`DataPlane.move`."""
        staging = self._staging
        staging.copier.check(job.parts)
        items = item_table(job.parts)
        if not items.nbytes:
            return 0
        staging.limbo.release()
        client = self._client(peer)
        self._gate.enter(job, items.nbytes, job.control)
        try:
            return client.pull(job, items, self._gate)
        finally:
            self._gate.leave(job)

    def is_quick(self, _peer: PeerKey, _nbytes: int) -> bool:
        """The owner is waited for."""
        return False

    def session_opened(self) -> None:
        """See :meth:`DataPlane.session_opened`."""
        self._channel.session_opened()

    def session_closed(self) -> None:
        """See :meth:`DataPlane.session_closed`."""
        self._channel.session_closed()

    def stats(self) -> StagingStats:
        """Gauges."""
        self._staging.limbo.release()
        return StagingStats(
            capacity_bytes=self._send_rooms.nbytes,
            send_used_bytes=self._send_rooms.used_bytes,
            receive_used_bytes=self._staging.rooms.used_bytes,
            send_waiting=self._server.waiting,
            receive_waiting=self._gate.waiting,
        )

    def close(self) -> None:
        """See :meth:`DataPlane.close`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()
        self._server.close()
        self._channel.close()
        self._send.close()
        self._receive.close()

    def _client(self, peer: PeerKey) -> PieceClient:
        """The connection to an owner; a new one where the last one was lost. Only those who want the same wait."""
        with self._lock:
            theirs = self._owners.get(peer)
            connecting = self._connecting.setdefault(peer, threading.Lock())
        if theirs is None:
            raise PlaneError(f"{peer} is not attached")
        with connecting:
            with self._lock:
                client = self._clients.get(peer)
            if client is None or client.lost:
                client = PieceClient(self._staging, peer, (theirs.host, theirs.port), theirs.channel)
                with self._lock:
                    if self._closed or peer not in self._owners:
                        client.leave()
                        raise PlaneError(f"{peer} was detached")
                    self._clients[peer] = client
            return client
