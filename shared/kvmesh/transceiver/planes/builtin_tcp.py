"""The built-in plane between hosts: a page server at the owner, and receivers that read straight into their pages.

One connection for each pair of engines. A receiver sends one fixed request (transfer, session, access key) and gets one
fixed answer (status, bytes) followed by the bytes of the granted pages in order and by one byte more, which says that
the grant still stood when the last of them had been sent. To stop, either side closes.
"""

from __future__ import annotations

import ctypes
import secrets
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Final

from kvmesh.net.address import listen
from kvmesh.net.faults import FaultInjectedError, fault_point
from kvmesh.telemetry import get_logger
from kvmesh.transceiver.borders import isolated
from kvmesh.transceiver.planes.base import MoveControl, MoveJob, MoveStoppedError, Part, PlaneError
from kvmesh.transceiver.planes.pieces import piece_slices
from kvmesh.transceiver.planes.sockets import STOP_POLL_S, accept, shut, tune
from kvmesh.transceiver.runs import contiguous_runs
from kvmesh.transceiver.types import PoolMemory

__all__ = ["KEY_BYTES", "PageClient", "PageServer", "PoolViews"]

KEY_BYTES: Final = 16
_REQUEST: Final = struct.Struct(f"<4sQQ{KEY_BYTES}s")
_ANSWER: Final = struct.Struct("<4sIQ")
_MAGIC: Final = b"KVP2"
_GRANTED, _REFUSED = 0, 1
_VALID: Final = b"\1"

IOVECS: Final = 64
"""Buffers in one system call; measured best for 64 KiB pages."""
SUMMED_SLICE_BYTES: Final = 1 << 20
"""Pages are summed after each such slice, while they are in the processor's second-level cache."""
MAX_CONNECTIONS: Final = 256
CONNECT_TIMEOUT_S: Final = 5.0
ALL: Final = slice(None)


_Landing = tuple[int, slice, list[memoryview]]
"""Index of the part, its pieces, and where their bytes go."""


class PoolViews:
    """Pools of host memory as byte views.

    Args:
        pools: this engine's pools; their memory must outlive this object.
    """

    def __init__(self, pools: Sequence[PoolMemory]) -> None:
        self._pools = pools
        self._bytes = [
            memoryview((ctypes.c_char * (pool.num_pages * pool.page_bytes)).from_address(pool.address)).cast("B")
            for pool in pools
        ]

    def buffers(self, part: Part, pieces: slice = ALL) -> list[memoryview]:
        """The bytes of some local pieces of a part, in order; neighbours are merged where they are whole pages.

        Raises:
            PlaneError: a page lies outside its pool.
        """
        pool, whole = self._pools[part.local_pool], self._bytes[part.local_pool]
        views: list[memoryview] = []
        for start, length in contiguous_runs(part.local[pieces]):
            if start < 0 or start + length > pool.num_pages:
                raise PlaneError(f"page {start} is outside the pool of {pool.num_pages} pages")
            begin = start * pool.page_bytes + part.local_offset
            if part.nbytes == pool.page_bytes:
                views.append(whole[begin : begin + length * pool.page_bytes])
            else:
                ends = range(begin, begin + length * pool.page_bytes, pool.page_bytes)
                views += [whole[piece : piece + part.nbytes] for piece in ends]
        return views


class PageServer:
    """Streams granted pages to whoever presents the key of the grant.

    Args:
        pools: this engine's pools (host memory).
        bind_host: address to listen on, at an ephemeral port.
    """

    def __init__(self, pools: Sequence[PoolMemory], *, bind_host: str) -> None:
        self._views = PoolViews(pools)
        self._log = get_logger("transceiver.pages")
        self._lock = threading.Lock()
        self._grants: dict[tuple[int, int], tuple[bytes, Sequence[Part], MoveControl]] = {}
        self._connections: dict[socket.socket, bool] = {}
        """Whether it has shown a key yet, oldest first."""
        self._closed = False
        self._listener = listen(bind_host, backlog=MAX_CONNECTIONS)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._thread = threading.Thread(target=self._accept, name="kvmesh-page-server", daemon=True)
        self._thread.start()

    def grant(self, transfer_id: int, session: int, parts: Sequence[Part]) -> bytes:
        """Let one session read ``parts``; returns the key that its receiver must present."""
        key = secrets.token_bytes(KEY_BYTES)
        with self._lock:
            self._grants[transfer_id, session] = (key, parts, MoveControl())
        return key

    def revoke(self, transfer_id: int, session: int) -> None:
        """Stop serving a session; a stream in progress ends within :data:`STOP_POLL_S`."""
        with self._lock:
            grant = self._grants.pop((transfer_id, session), None)
        if grant is not None:
            grant[2].stop()

    def close(self) -> None:
        """Close the listener and every connection."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connections = list(self._connections)
            grants = list(self._grants.values())
        # Only a shutdown wakes a thread that is blocked in accept.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for _key, _parts, control in grants:
            control.stop()
        for connection in connections:
            shut(connection)
        self._thread.join(1.0)

    def _accept(self) -> None:
        while (connection := accept(self._listener)) is not None:
            with self._lock:
                refused = self._closed or (len(self._connections) >= MAX_CONNECTIONS and not self._shut_a_stranger())
                if not refused:
                    self._connections[connection] = False
            if refused:
                connection.close()
                continue
            self._begin(connection)

    def _begin(self, connection: socket.socket) -> None:
        try:
            threading.Thread(target=self._serve, args=(connection,), name="kvmesh-page-stream", daemon=True).start()
        except RuntimeError as error:
            # The system has no thread to spare for now.
            self._log.warning("a connection is closed", reason=str(error))
            with self._lock:
                self._connections.pop(connection, None)
            connection.close()

    def _shut_a_stranger(self) -> bool:
        """Make room for somebody who may have a key: whether there was one who has shown none (under the lock)."""
        stranger = next((one for one, known in self._connections.items() if not known), None)
        if stranger is not None:
            del self._connections[stranger]
            shut(stranger)
        return stranger is not None

    def _serve(self, connection: socket.socket) -> None:
        try:
            tune(connection)
            while (request := _receive_request(connection)) is not None:
                self._answer(connection, request)
        except (OSError, PlaneError, MoveStoppedError, FaultInjectedError):
            # The receiver left, or the session was revoked: closing the connection is the answer.
            return
        except Exception:
            # The border of error isolation: what one receiver makes go wrong ends its own connection only.
            isolated(self._log, "pages could not be streamed")
        finally:
            with self._lock:
                self._connections.pop(connection, None)
            connection.close()

    def _answer(self, connection: socket.socket, request: bytes) -> None:
        magic, transfer_id, session, key = _REQUEST.unpack(request)
        with self._lock:
            grant = self._grants.get((transfer_id, session))
        if magic != _MAGIC or grant is None or not secrets.compare_digest(grant[0], key):
            connection.sendall(_ANSWER.pack(_MAGIC, _REFUSED, 0))
            return
        with self._lock:
            if connection in self._connections:
                self._connections[connection] = True
        _key, parts, control = grant
        buffers = [view for part in parts for view in self._views.buffers(part)]
        connection.settimeout(None)
        connection.sendall(_ANSWER.pack(_MAGIC, _GRANTED, sum(map(len, buffers))))
        connection.settimeout(STOP_POLL_S)
        for some in _batches(buffers):
            fault_point("transceiver.during_send")
            _send(connection, some, control)
        # Asks the control once more: after a revocation what was sent may have been another request's.
        _send(connection, [memoryview(_VALID)], control)
        connection.settimeout(None)


class PageClient:
    """Reads pages from one owner's page server; used by one thread at a time.

    Args:
        host: the owner's page server.
        port: its port.
        views: this engine's pools.

    Raises:
        PlaneError: it cannot be reached.
    """

    def __init__(self, host: str, port: int, views: PoolViews) -> None:
        self._address = (host, port)
        self._where = f"{host}:{port}"
        self._views = views
        self._connection: socket.socket | None = self._connect()

    def pull(self, job: MoveJob) -> int:
        """Read the pages of ``job`` into this process's pools; see :meth:`DataPlane.move`."""
        connection, is_new = self._connection, False
        if connection is None:
            connection, is_new = self._connect(), True
        self._connection = connection
        try:
            landings = self._landings(job)
            try:
                self._ask(connection, job)
            except OSError:
                if is_new:
                    raise
                # It was idle, and the owner may have shut it for somebody else: nothing has been asked for yet.
                connection.close()
                self._connection = connection = self._connect()
                self._ask(connection, job)
            return self._take(connection, job, landings)
        except (OSError, PlaneError, MoveStoppedError) as error:
            # What is left in the stream belongs to this session: a new one needs a new connection.
            self.close()
            if isinstance(error, OSError):
                raise PlaneError(f"reading pages from {self._where} failed: {error}") from error
            raise

    def close(self) -> None:
        """Close the connection; idempotent."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self) -> socket.socket:
        try:
            connection = socket.create_connection(self._address, CONNECT_TIMEOUT_S)
        except OSError as error:
            raise PlaneError(f"cannot reach the page server at {self._where}: {error}") from error
        tune(connection)
        return connection

    def _landings(self, job: MoveJob) -> list[_Landing]:
        return [
            (index, pieces, self._views.buffers(job.parts[index], pieces))
            for index, pieces in piece_slices(job.parts, SUMMED_SLICE_BYTES)
        ]

    def _ask(self, connection: socket.socket, job: MoveJob) -> None:
        """Returns when the owner begins to send; OSError when the connection ended before it has answered."""
        connection.settimeout(STOP_POLL_S)
        connection.sendall(_REQUEST.pack(_MAGIC, job.transfer_id, job.session, job.access[:KEY_BYTES]))
        answer = memoryview(bytearray(_ANSWER.size))
        _receive(connection, [answer], job.control)
        magic, status, nbytes = _ANSWER.unpack(answer)
        if magic != _MAGIC or status != _GRANTED:
            raise PlaneError("the owner's page server refused the session")
        if nbytes != job.num_bytes:
            raise PlaneError(f"the owner sends {nbytes} bytes, {job.num_bytes} are wanted")

    def _take(self, connection: socket.socket, job: MoveJob, landings: Sequence[_Landing]) -> int:
        for index, pieces, buffers in landings:
            for some in _batches(buffers):
                job.control.checkpoint()
                _receive(connection, some, job.control)
            if job.sums is not None:
                job.sums.add(index, pieces)
        _receive(connection, [memoryview(bytearray(len(_VALID)))], job.control)
        job.control.checkpoint()
        return job.num_bytes


def _batches(buffers: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    for start in range(0, len(buffers), IOVECS):
        yield list(buffers[start : start + IOVECS])


def _send(connection: socket.socket, buffers: list[memoryview], control: MoveControl) -> None:
    while buffers:
        if control.stopped:
            raise MoveStoppedError
        try:
            _consume(buffers, connection.sendmsg(buffers))
        except TimeoutError:
            continue


def _receive(connection: socket.socket, buffers: list[memoryview], control: MoveControl) -> None:
    while buffers:
        if control.stopped:
            raise MoveStoppedError
        try:
            count = connection.recvmsg_into(buffers)[0]
        except TimeoutError:
            continue
        if count == 0:
            raise ConnectionResetError("the owner closed the connection")
        _consume(buffers, count)


def _consume(buffers: list[memoryview], count: int) -> None:
    done = 0
    while done < len(buffers) and count >= len(buffers[done]):
        count -= len(buffers[done])
        done += 1
    del buffers[:done]
    if count:
        buffers[0] = buffers[0][count:]


def _receive_request(connection: socket.socket) -> bytes | None:
    request = bytearray()
    while len(request) < _REQUEST.size:
        if not (data := connection.recv(_REQUEST.size - len(request))):
            return None
        request += data
    return bytes(request)
