"""The built-in channel: into the receiver's shared memory on one host, else over a socket of its own.

``auto`` maps the receiver's region where the owner can open it and takes TCP where it cannot; ``memfd`` and ``tcp``
take only what they name. The owner decides, and the receiver, which connects, is told.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvmesh.transceiver.channels.base import BackendName, Incoming, Region, Side
from kvmesh.transceiver.channels.builtin_sockets import TOKEN_BYTES, DataListener, DataSource, Way
from kvmesh.transceiver.channels.mailbox import check_span
from kvmesh.transceiver.channels.written import WrittenByOwner
from kvmesh.transceiver.liveness import ProcessIdentity
from kvmesh.transceiver.planes.base import MoveControl, PlaneError
from kvmesh.transceiver.planes.builtin import PlaneChoice
from kvmesh.transceiver.planes.builtin_memfd import MemfdDescriptor, describe_pools, map_pool
from kvmesh.transceiver.types import PeerKey, PoolMemory

__all__ = ["BuiltinChannel"]

SLICE_BYTES: Final = 1 << 20
"""A stop is noticed between slices."""


class _Descriptor(msgspec.Struct, frozen=True, array_like=True):
    memory: MemfdDescriptor | None
    """The receive region, for owners that can map it."""
    nbytes: int
    """Of the receive region."""
    host: str
    port: int
    token: bytes
    """What a receiver must present to this engine's listener."""


class BuiltinChannel:
    """See the module.

    Args:
        send: this engine's send region.
        receive: its receive region.
        name: of this engine, unique in the mesh.
        bind_host: where the socket for receivers listens.
        connect_timeout_s: bound of connection set-up.
        choice: which way to take.
    """

    name: BackendName = "BUILTIN"

    def __init__(
        self,
        send: Region,
        receive: Region,
        *,
        name: str,
        bind_host: str,
        connect_timeout_s: float,
        choice: PlaneChoice = "auto",
    ) -> None:
        self._send, self._receive = send, receive
        self._source = memoryview((ctypes.c_char * send.nbytes).from_address(send.address)).cast("B")
        self._target = memoryview((ctypes.c_char * receive.nbytes).from_address(receive.address)).cast("B")
        self._own_name = name
        self._choice = choice
        self._connect_timeout_s = connect_timeout_s
        pool = PoolMemory(
            address=receive.address, nbytes=receive.nbytes, num_pages=1, page_bytes=receive.nbytes, fd=receive.fd
        )
        self._memory = describe_pools([pool]) if choice != "tcp" else None
        self._process = ProcessIdentity.current()
        self._lock = threading.Lock()
        self._mapped: dict[PeerKey, NDArray[np.uint8]] = {}
        self._sizes: dict[PeerKey, int] = {}
        self._owners: dict[PeerKey, DataSource | ProcessIdentity] = {}
        self._listener = DataListener(bind_host, secrets.token_bytes(TOKEN_BYTES), self._way_to)

    def describe(self) -> bytes:
        """See :meth:`Channel.describe`."""
        host, port = self._listener.address
        return msgspec.msgpack.encode(
            [self._process, _Descriptor(self._memory, len(self._target), host, port, self._listener.token)]
        )

    def attach(self, peer: PeerKey, descriptor: bytes, side: Side) -> None:
        """See :meth:`Channel.attach`."""
        try:
            process, theirs = msgspec.msgpack.decode(descriptor, type=tuple[ProcessIdentity, _Descriptor])
        except msgspec.MsgspecError as error:
            raise PlaneError(f"the peer's description of its memory cannot be read: {error}") from error
        if side == "owner":
            self._attach_receiver(peer, theirs)
        else:
            self._attach_owner(peer, theirs, process)

    def detach(self, peer: PeerKey) -> None:
        """See :meth:`Channel.detach`."""
        with self._lock:
            self._mapped.pop(peer, None)
            self._sizes.pop(peer, None)
            owner = self._owners.pop(peer, None)
        self._listener.drop(peer)
        if isinstance(owner, DataSource):
            owner.close()

    def expect(self, peer: PeerKey, tag: int, offset: int, nbytes: int) -> Incoming:
        """See :meth:`Channel.expect`."""
        check_span(self._receive, offset, nbytes)
        with self._lock:
            owner = self._owners.get(peer)
        if owner is None:
            raise PlaneError(f"{peer} is not attached")
        if isinstance(owner, ProcessIdentity):
            return WrittenByOwner(owner)
        return owner.expect(tag, self._target[offset : offset + nbytes])

    def send(
        self, peer: PeerKey, tag: int, src_offset: int, dst_offset: int, nbytes: int, control: MoveControl
    ) -> None:
        """See :meth:`Channel.send`."""
        with self._lock:
            mapped, size = self._mapped.get(peer), self._sizes.get(peer)
        if size is None:
            raise PlaneError(f"{peer} is not attached")
        check_span(self._send, src_offset, nbytes)
        check_span(Region(0, size, None), dst_offset, nbytes)
        if mapped is None:
            self._listener.send(peer, tag, self._source[src_offset : src_offset + nbytes], control)
            return
        target, source = mapped.ctypes.data + dst_offset, self._send.address + src_offset
        for start in range(0, nbytes, SLICE_BYTES):
            control.checkpoint()
            ctypes.memmove(target + start, source + start, min(SLICE_BYTES, nbytes - start))

    def session_opened(self) -> None:
        """Nothing to progress: who sends and who waits moves the bytes."""

    def session_closed(self) -> None:
        """See :meth:`session_opened`."""

    def close(self) -> None:
        """See :meth:`Channel.close`."""
        self._listener.close()
        with self._lock:
            owners, self._owners = list(self._owners.values()), {}
            self._mapped.clear()
            self._sizes.clear()
        for owner in owners:
            if isinstance(owner, DataSource):
                owner.close()

    def _attach_receiver(self, peer: PeerKey, theirs: _Descriptor) -> None:
        mapped: NDArray[np.uint8] | None = None
        obstacle = "the receiver shares no memory"
        if self._choice != "tcp" and theirs.memory is not None:
            try:
                mapped = _map(theirs.memory)
            except PlaneError as error:
                obstacle = str(error)
        if mapped is None and self._choice == "memfd":
            raise PlaneError(f"{obstacle}, and transfer_plane memfd allows nothing else")
        with self._lock:
            if mapped is not None:
                self._mapped[peer] = mapped
            self._sizes[peer] = theirs.nbytes

    def _attach_owner(self, peer: PeerKey, theirs: _Descriptor, process: ProcessIdentity) -> None:
        with self._lock:
            known = self._owners.get(peer)
        if isinstance(known, ProcessIdentity) or (known is not None and not known.lost):
            return
        source = DataSource(
            (theirs.host, theirs.port), theirs.token, self._own_name, connect_timeout_s=self._connect_timeout_s
        )
        if source.way is Way.MEMORY:
            source.close()
        elif self._choice == "memfd":
            source.close()
            raise PlaneError("the owner cannot map this engine's memory, and transfer_plane memfd allows nothing else")
        with self._lock:
            self._owners[peer] = process if source.way is Way.MEMORY else source

    def _way_to(self, name: str) -> tuple[PeerKey, Way] | None:
        with self._lock:
            for peer in self._sizes:
                if str(peer) == name:
                    return peer, Way.MEMORY if peer in self._mapped else Way.SOCKET
        return None


def _map(memory: MemfdDescriptor) -> NDArray[np.uint8]:
    if not memory.process.observable:
        raise PlaneError("the receiver runs on another host or in another process id namespace")
    (region,) = memory.pools
    return map_pool(memory.process.pid, region, writable=True)
