"""The UCX channel: one large tagged message for each piece, over ucxx.

Endpoints are made from worker addresses, so neither side has to wait for the other. One thread makes all progress; it
sleeps in epoll and takes no processor time while nothing arrives, however many sessions are open. All use of the
library is serialised; what copies releases the interpreter.
"""

from __future__ import annotations

import hashlib
import os
import select
import threading
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from kvmesh.telemetry import get_logger
from kvmesh.transceiver.borders import isolated
from kvmesh.transceiver.channels.base import BackendName, Region, Side
from kvmesh.transceiver.channels.mailbox import Expected, Mailbox, Operation, bytes_of, check_span
from kvmesh.transceiver.planes.base import MoveControl, MoveStoppedError, PlaneError
from kvmesh.transceiver.types import PeerKey
from kvmesh.transceiver.ucx_environment import INFINIBAND, prepare_ucx

__all__ = ["UcxChannel"]

PROBE_SOURCE: Final = (1 << 32) - 1
"""Sender's number of the empty message that tries a new endpoint."""
WAKE_S: Final = 1.0
"""Longest sleep of the progress thread."""
CLOSE_S: Final = 5.0


class _Descriptor(msgspec.Struct, frozen=True, array_like=True):
    address: bytes
    """Of the UCX worker."""
    source: int
    """The upper half of the tags of what this engine sends."""


@dataclass(slots=True, eq=False)
class _Peer:
    endpoint: Any
    source: int
    sides: set[Side] = field(default_factory=set)
    lost: bool = False


class UcxChannel:
    """See the module.

    Args:
        send: pieces leave from here.
        receive: pieces land here.
        name: of this engine, unique in the mesh.
        bind_host: where this engine listens; a loopback address keeps UCX on loopback.
        connect_timeout_s: bound of :meth:`attach`.

    Raises:
        PlaneError: ucxx is not installed, or does not work here.
    """

    name: BackendName = "UCX"

    def __init__(self, send: Region, receive: Region, *, name: str, bind_host: str, connect_timeout_s: float) -> None:
        prepare_ucx(os.environ, bind_host=bind_host, infiniband=INFINIBAND.exists())
        try:
            from ucxx._lib import libucxx
            from ucxx._lib.arr import Array
        except ImportError as error:
            raise PlaneError(
                f"cache_transceiver_config.backend UCX needs ucxx: make venv EXTRAS=ucx ({error})"
            ) from error
        self._ucxx = libucxx
        self._array = Array
        self._errors: tuple[type[Exception], ...] = (libucxx.UCXError, RuntimeError, OSError)
        self._log = get_logger("transceiver.ucx")
        self._send_region, self._receive_region = send, receive
        self._source_bytes, self._room_bytes = bytes_of(send), bytes_of(receive)
        self._dropped = bytearray(1)
        self._connect_timeout_s = connect_timeout_s
        self._source = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest()) % PROBE_SOURCE
        self._mailbox = Mailbox()
        self._lock = threading.Lock()
        self._peers: dict[PeerKey, _Peer] = {}
        self._pending: list[tuple[Any, Operation]] = []
        self._closed = False
        try:
            self._context = libucxx.UCXContext({}, (libucxx.Feature.TAG, libucxx.Feature.WAKEUP))
            self._worker = libucxx.UCXWorker(self._context)
            self._worker.init_blocking_progress_mode()
            self._address = bytes(self._worker.address)
        except self._errors as error:
            raise PlaneError(f"UCX cannot be used here: {error}") from error
        self._any = (libucxx.UCXXTag(0), libucxx.UCXXTagMask(0))
        self._kick = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._events = select.epoll()
        self._events.register(self._worker.epoll_file_descriptor, select.EPOLLIN)
        self._events.register(self._kick, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="kvmesh-ucx-progress", daemon=True)
        self._thread.start()

    def describe(self) -> bytes:
        """See :meth:`Channel.describe`."""
        return msgspec.msgpack.encode(_Descriptor(self._address, self._source))

    def attach(self, peer: PeerKey, descriptor: bytes, side: Side) -> None:
        """See :meth:`Channel.attach`. Ends with an empty message, which sets the connection up."""
        known = self._peers.get(peer)
        if known is not None and not known.lost:
            known.sides.add(side)
            return
        if known is not None:
            self.detach(peer)
        try:
            theirs = msgspec.msgpack.decode(descriptor, type=_Descriptor)
        except msgspec.MsgspecError as error:
            raise PlaneError(f"the peer's description of its memory cannot be read: {error}") from error
        with self._lock:
            self._check_open()
            if any(one.source == theirs.source for one in self._peers.values()):
                raise PlaneError(f"{peer} has the number of another peer; restart it with another instance id")
            try:
                address = self._ucxx.UCXAddress.create_from_buffer(theirs.address)
                endpoint = self._ucxx.UCXEndpoint.create_from_worker_address(self._worker, address, True)
                made = self._peers[peer] = _Peer(endpoint, theirs.source, {side})
                probe = self._post_send(made, PROBE_SOURCE << 32, self._source_bytes[:0])
            except self._errors as error:
                self._peers.pop(peer, None)
                raise PlaneError(f"UCX cannot reach {peer}: {error}") from error
        self._wake()
        try:
            probe.wait_at_most(self._connect_timeout_s)
        except PlaneError as error:
            self.detach(peer)
            raise PlaneError(f"UCX cannot reach {peer}: {error}") from error

    def detach(self, peer: PeerKey) -> None:
        """See :meth:`Channel.detach`."""
        with self._lock:
            known = self._peers.pop(peer, None)
            if known is None or self._closed:
                return
            self._close_endpoint(known)
            self._settle()
        self._mailbox.fail(known.source, f"{peer} was detached")
        self._wake()

    def expect(self, peer: PeerKey, tag: int, offset: int, nbytes: int) -> Expected:
        """See :meth:`Channel.expect`."""
        check_span(self._receive_region, offset, nbytes)
        known = self._reachable(peer)
        expected = self._mailbox.expect(known.source, tag, offset, nbytes)
        if known.lost:  # Since it was looked at.
            self._mailbox.fail(known.source, f"{peer} is gone")
        return expected

    def send(
        self,
        peer: PeerKey,
        tag: int,
        src_offset: int,
        dst_offset: int,  # noqa: ARG002 - the receiver has its room by the tag
        nbytes: int,
        control: MoveControl,
    ) -> None:
        """See :meth:`Channel.send`."""
        check_span(self._send_region, src_offset, nbytes)
        if control.stopped:
            raise MoveStoppedError
        with self._lock:
            self._check_open()
            known = self._reachable(peer)
            source = self._source_bytes[src_offset : src_offset + nbytes]
            try:
                sent = self._post_send(known, self._source << 32 | tag, source)
            except self._errors as error:
                raise PlaneError(f"sending to {peer} failed: {error}") from error
        self._wake()
        sent.wait_ended(control)

    def session_opened(self) -> None:
        """Nothing to do: what arrives wakes the progress thread."""

    def session_closed(self) -> None:
        """See :meth:`session_opened`."""

    def close(self) -> None:
        """See :meth:`Channel.close`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._wake()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._log.warning("UCX did not end in time; it ends with the process", seconds=CLOSE_S)

    def _check_open(self) -> None:
        if self._closed:
            raise PlaneError("the UCX channel is closed")

    def _reachable(self, peer: PeerKey) -> _Peer:
        known = self._peers.get(peer)
        if known is None:
            raise PlaneError(f"{peer} is not attached")
        if known.lost:
            raise PlaneError(f"{peer} is gone")
        return known

    def _post_send(self, peer: _Peer, tag: int, source: Any) -> Operation:
        operation = Operation()
        request = peer.endpoint.tag_send(self._array(source), self._ucxx.UCXXTag(tag))
        self._pending.append((request, operation))
        return operation

    def _wake(self) -> None:
        os.eventfd_write(self._kick, 1)

    def _run(self) -> None:
        try:
            self._progress()
        except Exception as error:
            # Nothing can be said about what is under way; its memory stays in use until the process ends.
            failed = "UCX has failed; transfers over it fail from here on"
            if isinstance(error, self._errors):
                self._log.error(failed, error=str(error))
            else:
                isolated(self._log, failed)
            self._closed = True
            for key, peer in list(self._peers.items()):
                self._mailbox.fail(peer.source, f"{key} cannot be reached: UCX has failed")
            return
        with self._lock:
            self._release()

    def _progress(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                self._worker.progress()
                self._take_arrivals()
                self._settle()
                self._notice_the_dead()
                asleep = self._worker.arm()
            if asleep:
                self._events.poll(WAKE_S)
                try:
                    os.eventfd_read(self._kick)
                except BlockingIOError:
                    continue

    def _take_arrivals(self) -> None:
        tag, mask = self._any
        while (found := self._worker.tag_probe(tag, mask)).matched:
            value = found.sender_tag.value
            expected = self._mailbox.claim(value >> 32, value & 0xFFFFFFFF, found.length)
            room: Any = self._dropped
            if expected is not None:
                room = self._room_bytes[expected.offset : expected.offset + expected.nbytes]
            # With its endpoint, so that it ends when the peer dies. One that is dropped is cut to a byte: UCX tells its
            # sender that it has ended, and moves nothing.
            peer = next((one for one in self._peers.values() if one.source == value >> 32 and not one.lost), None)
            receiver = self._worker if peer is None or expected is None else peer.endpoint
            try:
                request = receiver.tag_recv(self._array(room), found.sender_tag)
            except self._errors as error:
                if expected is not None:
                    expected.settle(f"receiving failed: {error}")
                return
            self._pending.append((request, expected or Operation()))

    def _settle(self) -> None:
        pending = []
        for request, operation in self._pending:
            if not request.completed:
                pending.append((request, operation))
                continue
            try:
                request.check_error()
            except self._errors as error:
                operation.settle(f"UCX: {error}")
            else:
                operation.settle()
        self._pending = pending

    def _notice_the_dead(self) -> None:
        for key, peer in self._peers.items():
            if not peer.lost and not peer.endpoint.alive:
                peer.lost = True
                self._mailbox.fail(peer.source, f"{key} is gone")

    def _close_endpoint(self, peer: _Peer) -> None:
        try:
            peer.endpoint.close_blocking()
        except self._errors as error:
            self._log.debug("an endpoint was not closed cleanly", error=str(error))

    def _release(self) -> None:
        for key, peer in self._peers.items():
            self._close_endpoint(peer)
            self._mailbox.fail(peer.source, f"{key} was detached")
        self._peers.clear()
        self._worker.progress()
        self._settle()
        for _, operation in self._pending:
            operation.settle("the UCX channel is closed")
        self._pending.clear()
        self._events.close()
        os.close(self._kick)
        del self._worker, self._context
