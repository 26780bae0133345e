"""The MOONCAKE channel: a one-sided write for each piece, over Mooncake's transfer engine and its TCP transport.

The library makes its own progress on threads that sleep. A write that it calls done has been acknowledged by the
receiver's library after the bytes were in place. It cannot cancel: a write that was posted goes on until it has ended
or failed, and what its sender leaves behind may land late.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final

import msgspec
import numpy as np

from kvmesh.net.address import reachable_host
from kvmesh.telemetry import get_logger
from kvmesh.transceiver.channels.base import BackendName, Region, Side
from kvmesh.transceiver.channels.mailbox import check_span
from kvmesh.transceiver.channels.written import WrittenByOwner
from kvmesh.transceiver.liveness import ProcessIdentity
from kvmesh.transceiver.planes.base import MoveControl, MoveStoppedError, PlaneError
from kvmesh.transceiver.types import PeerKey
from kvmesh.transceiver.ucx_environment import is_loopback

__all__ = ["MooncakeChannel", "prepare_mooncake"]

APT_PACKAGES: Final = "libibverbs1 libnuma1 libcurl4"
NO_BATCH: Final = frozenset({0, -1, (1 << 64) - 1})
"""What a write that could not be posted returns, in one version or another."""
PENDING: Final = 0
DONE: Final = 1
FIRST_POLLS: Final = 100
FIRST_POLL_S: Final = 100e-6
POLL_S: Final = 0.001
"""A piece of several MiB takes some milliseconds over TCP."""
PROBE_BYTES: Final = 64
DRAIN_S: Final = 0.5
"""For what a dead sender has left in this host's socket buffers, some MiB, to reach the room it was sent to."""
CLOSE_S: Final = 5.0
NEVER_S: Final = "86400"


class _Descriptor(msgspec.Struct, frozen=True, array_like=True):
    segment: str
    """Host and port of the engine's handshake: its name in the library."""
    address: int
    """Of the receive region."""
    nbytes: int
    probe_address: int
    """Of a few bytes that a peer writes to try the connection."""
    process: ProcessIdentity


@dataclass(slots=True, eq=False)
class _Peer:
    remote: _Descriptor
    sides: set[Side] = field(default_factory=set)


class MooncakeChannel:
    """See the module.

    Args:
        send: pieces leave from here.
        receive: pieces land here.
        name: of this engine, for the log.
        bind_host: the address that peers connect to. The library itself listens on every interface.
        connect_timeout_s: bound of :meth:`attach`.

    Raises:
        PlaneError: the library is not installed, or does not work here.
    """

    name: BackendName = "MOONCAKE"

    def __init__(self, send: Region, receive: Region, *, name: str, bind_host: str, connect_timeout_s: float) -> None:
        prepare_mooncake(os.environ, connect_timeout_s)
        library = _load()
        self._log = get_logger("transceiver.mooncake")
        self._send_region, self._receive_region = send, receive
        self._connect_timeout_s = connect_timeout_s
        self._lock = threading.Lock()
        self._peers: dict[PeerKey, _Peer] = {}
        self._probe = np.zeros(2 * PROBE_BYTES, dtype=np.uint8)
        """What peers write to, then what this engine writes from."""
        host = reachable_host(bind_host)
        self._engine: Any = library.TransferEngine()
        if code := self._engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
            raise PlaneError(f"Mooncake cannot start on {host} (code {code})")
        for address, nbytes in (
            (send.address, send.nbytes),
            (receive.address, receive.nbytes),
            (self._probe.ctypes.data, self._probe.nbytes),
        ):
            if code := self._engine.register_memory(address, nbytes):
                raise PlaneError(f"Mooncake cannot register {nbytes} bytes of memory (code {code})")
        self._descriptor = _Descriptor(
            f"{host}:{self._engine.get_rpc_port()}",
            receive.address,
            receive.nbytes,
            self._probe.ctypes.data,
            ProcessIdentity.current(),
        )
        if is_loopback(bind_host):
            self._log.warning(
                "Mooncake listens on every interface, not only on loopback, and whoever reaches it may write into "
                "staging memory: close its ports to others",
                engine=name,
                segment=self._descriptor.segment,
            )

    def describe(self) -> bytes:
        """See :meth:`Channel.describe`."""
        return msgspec.msgpack.encode(self._descriptor)

    def attach(self, peer: PeerKey, descriptor: bytes, side: Side) -> None:
        """See :meth:`Channel.attach`. The owner ends it with a real write: only that proves that it can be reached."""
        with self._lock:
            known = self._peers.get(peer)
        if known is not None and (side in known.sides or side == "receiver"):
            known.sides.add(side)
            return
        try:
            theirs = msgspec.msgpack.decode(descriptor, type=_Descriptor)
        except msgspec.MsgspecError as error:
            raise PlaneError(f"the peer's description of its memory cannot be read: {error}") from error
        if side == "owner":
            self._try(peer, theirs)
        with self._lock:
            self._check_open()
            self._peers.setdefault(peer, _Peer(theirs)).sides.add(side)

    def detach(self, peer: PeerKey) -> None:
        """See :meth:`Channel.detach`."""
        with self._lock:
            self._peers.pop(peer, None)

    def expect(self, peer: PeerKey, tag: int, offset: int, nbytes: int) -> _Incoming:  # noqa: ARG002
        """See :meth:`Channel.expect`. The owner's library finds the room by its address."""
        check_span(self._receive_region, offset, nbytes)
        return _Incoming(self._attached(peer).remote.process)

    def send(
        self,
        peer: PeerKey,
        tag: int,  # noqa: ARG002 - a one-sided write is known by its address
        src_offset: int,
        dst_offset: int,
        nbytes: int,
        control: MoveControl,
    ) -> None:
        """See :meth:`Channel.send`. A write that was posted is waited for even when it is to stop."""
        check_span(self._send_region, src_offset, nbytes)
        if control.stopped:
            raise MoveStoppedError
        remote = self._attached(peer).remote
        check_span(Region(remote.address, remote.nbytes, None), dst_offset, nbytes)
        source, target = self._send_region.address + src_offset, remote.address + dst_offset
        self._write(peer, remote.segment, source, target, nbytes, control)
        if control.stopped:
            raise MoveStoppedError

    def session_opened(self) -> None:
        """Nothing to do: the library's own threads make progress, and sleep when there is none."""

    def session_closed(self) -> None:
        """See :meth:`session_opened`."""

    def close(self) -> None:
        """See :meth:`Channel.close`."""
        with self._lock:
            engine, self._engine = self._engine, None
            self._peers.clear()
        if engine is None:
            return

        def release(doomed: list[Any]) -> None:
            for address in (self._send_region.address, self._receive_region.address, self._probe.ctypes.data):
                doomed[0].unregister_memory(address)
            doomed.clear()  # Its destructor ends its threads.

        doomed = [engine]
        del engine
        closing = threading.Thread(target=release, args=(doomed,), name="kvmesh-mooncake-close", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            self._log.warning("Mooncake did not end in time; it ends with the process", seconds=CLOSE_S)

    def _check_open(self) -> Any:
        if self._engine is None:
            raise PlaneError("the MOONCAKE channel is closed")
        return self._engine

    def _attached(self, peer: PeerKey) -> _Peer:
        with self._lock:
            known = self._peers.get(peer)
        if known is None:
            raise PlaneError(f"{peer} is not attached")
        return known

    def _try(self, peer: PeerKey, theirs: _Descriptor) -> None:
        """Write a few bytes; on a thread, because the library's handshake has no time limit.

        Raises:
            PlaneError: that did not succeed in time.
        """
        control = MoveControl()
        failure: list[PlaneError | None] = []

        def probe() -> None:
            source = self._probe.ctypes.data + PROBE_BYTES
            try:
                self._write(peer, theirs.segment, source, theirs.probe_address, PROBE_BYTES, control)
            except PlaneError as error:
                failure.append(error)
            except MoveStoppedError:
                return
            else:
                failure.append(None)

        trying = threading.Thread(target=probe, name="kvmesh-mooncake-attach", daemon=True)
        trying.start()
        trying.join(self._connect_timeout_s)
        if not failure:
            control.abandon()
            raise PlaneError(f"Mooncake cannot reach {peer} within {self._connect_timeout_s:g} s")
        if failure[0] is not None:
            raise failure[0]

    def _write(self, peer: PeerKey, segment: str, source: int, target: int, nbytes: int, control: MoveControl) -> None:
        engine = self._check_open()
        batch = engine.transfer_submit_write(segment, source, target, nbytes)
        if batch in NO_BATCH:
            raise PlaneError(f"Mooncake cannot reach {peer}")
        polls = 0
        while (status := engine.transfer_check_status(batch)) == PENDING:
            if control.abandoned:
                raise MoveStoppedError
            time.sleep(FIRST_POLL_S if polls < FIRST_POLLS else POLL_S)
            polls += 1
        if status != DONE:
            raise PlaneError(f"writing to {peer} failed (Mooncake's status {status})")


class _Incoming(WrittenByOwner):
    """A room that the owner writes into.

    What a dead owner had sent may still lie in this host's socket buffers, from where our own library brings it into
    the room: it takes a moment more than the owner's death until the room is quiet.
    """

    def __init__(self, owner: ProcessIdentity) -> None:
        super().__init__(owner)
        self._gone_s: float | None = None

    def wait(self, control: MoveControl) -> None:
        """See :meth:`Incoming.wait`: our own library has acknowledged the write before the owner says "sent"."""
        if control.stopped:
            raise MoveStoppedError

    def owner_is_gone(self) -> bool:
        """See :class:`Lingering`."""
        if self._gone_s is None:
            if not super().owner_is_gone():
                return False
            self._gone_s = time.monotonic()
        return time.monotonic() - self._gone_s > DRAIN_S


def prepare_mooncake(environment: MutableMapping[str, str], connect_timeout_s: float) -> None:
    """Set what the library reads when it is loaded; what is set already stays.

    It must not give up on a receiver that is only frozen: its owner would say that the write has ended, and the rest
    would land in a room that has been reused. Who does not wait any more abandons the write instead.
    """
    environment.setdefault("MC_LOG_LEVEL", "ERROR")
    environment.setdefault("MC_HANDSHAKE_CONNECT_TIMEOUT", str(max(1, round(connect_timeout_s))))
    environment.setdefault("MC_TCP_STATUS_TIMEOUT_SEC", NEVER_S)
    environment.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", NEVER_S)


def _load() -> ModuleType:
    try:
        import mooncake.engine as library
    except ModuleNotFoundError as error:
        raise PlaneError(
            "cache_transceiver_config.backend MOONCAKE needs Mooncake's transfer engine: "
            f"make venv EXTRAS=mooncake ({error})"
        ) from error
    except ImportError as error:
        raise PlaneError(
            f"Mooncake's transfer engine cannot be loaded: {error}. It needs system libraries: "
            f"apt-get install {APT_PACKAGES}"
        ) from error
    assert isinstance(library, ModuleType)
    return library
