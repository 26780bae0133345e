"""The control connections: a listener where peers ask us, a connection to each peer that we ask, and their thread.

Messages are msgpack of :data:`kvmesh.protocol.transfer.ControlMessage`. Sending never blocks and takes no other thread
(:mod:`kvmesh.transceiver.connection`): messages that cannot go wait in bounded queues and are dropped (and counted)
when a queue is full, which only happens to a peer that has stopped; every exchange has a deadline of its own above this
level, and cancels are repeated until answered. The thread sleeps until a socket, a process or another thread has
something for it. A connection to a peer that we ask is made, and made again when it was lost, by a thread of its own.
"""

from __future__ import annotations

import math
import os
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

import msgspec

from kvmesh.protocol.transfer import ControlMessage, ResultAck
from kvmesh.telemetry import get_logger
from kvmesh.transceiver.borders import isolated
from kvmesh.transceiver.connection import Connection, FrameError, tune
from kvmesh.transceiver.introductions import Introductions
from kvmesh.transceiver.planes.sockets import SHORTAGE_ERRORS, SHORTAGE_WAIT_S
from kvmesh.transceiver.process_watch import ProcessWatch
from kvmesh.transceiver.types import PeerKey

__all__ = ["Control", "ControlHandler", "Route"]

MAX_QUEUED_ACTIONS: Final = 10_000
MAX_MESSAGE_BYTES: Final = 64 << 20
"""A request for a million pages fits well; bounds what a peer can make us allocate."""
MAX_CONNECTIONS: Final = 4096
MAX_STRANGER_BYTES: Final = 1 << 20
"""Of a stranger's message: an introduction has a page layout and descriptions of memory."""
GREETING: Final = b"KVC1"
"""Begins the first message of a connection; the name of the peer that asks follows."""
MAX_GREETING_BYTES: Final = 300
LINGER_S: Final = 0.2
CONNECT_TIMEOUT_S: Final = 5.0
RECONNECT_S: Final = 0.1
RECONNECT_MAX_S: Final = 5.0

_Told = TypeVar("_Told", str, PeerKey)

Route = bytes | str
"""Where a message goes: the identity of a peer that asks us (bytes), or the endpoint of a peer that we ask (str)."""


class ControlHandler(Protocol):
    """Called on the control thread; must not block."""

    def on_message(self, route: Route, message: ControlMessage) -> None:
        """A message has arrived."""

    def on_connected(self, endpoint: str) -> None:
        """The connection to a peer that we ask is there, for the first time or again."""

    def on_disconnected(self, endpoint: str) -> None:
        """The connection to a peer that we ask was lost or refused; it is retried until :meth:`Control.disconnect`."""

    def on_process_ended(self, peer: PeerKey) -> None:
        """The process of a peer, watched with :meth:`Control.watch`, has ended."""


class Control:
    """See the module. :meth:`start` opens the listener.

    Args:
        name: of this engine; part of its identity towards peers.
        bind_host: address to listen on, at an ephemeral port.
        handler: gets what arrives.
    """

    def __init__(self, name: str, bind_host: str, handler: ControlHandler) -> None:
        self._name = name
        self._bind_host = bind_host
        self._handler = handler
        self._lock = threading.Lock()
        self._actions: deque[Callable[[], None]] = deque()
        self._closing = False
        self._acknowledgements: deque[tuple[Route, ResultAck]] = deque()
        self._asking: dict[bytes, Connection] = {}
        self._asked: dict[str, _Asked] = {}
        self._processes = ProcessWatch()
        self._sources: dict[int, Callable[[int], None]] = {}
        self._accepted: set[_Asking] = set()
        self._introductions: Introductions[_Asking] = Introductions()
        self._listens_again_s: float | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ControlMessage)
        self._log = get_logger("transceiver.control")
        self.endpoint = ""
        self.dropped_total = 0
        self.error: BaseException | None = None

    def start(self) -> None:
        """Bind and begin to serve.

        Raises:
            OSError: the address cannot be bound.
        """
        family = socket.AF_INET6 if ":" in self._bind_host else socket.AF_INET
        try:
            self._listener = socket.create_server((self._bind_host, 0), family=family, backlog=256)
        except OSError as error:
            raise OSError(error.errno, f"cannot listen for transfers on {self._bind_host}: {error.strerror}") from error
        self._listener.setblocking(False)
        host = f"[{self._bind_host}]" if family == socket.AF_INET6 else self._bind_host
        self.endpoint = f"tcp://{host}:{self._listener.getsockname()[1]}"
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller = select.epoll()
        self._watch_source(self._listener.fileno(), self._accept)
        self._watch_source(self._wake, self._work_off)
        self._thread = threading.Thread(target=self._run, name="kvmesh-transfer-control", daemon=True)
        self._thread.start()

    def send(self, route: Route, message: ControlMessage) -> None:
        """Send without waiting, from any thread; dropped (and counted) when there is no connection to ``route``.

        An acknowledgement follows what it answers to only when that has been handled: an executor that it has woken
        need not wait while it is sent.
        """
        if type(message) is ResultAck and threading.current_thread() is self._thread:
            self._acknowledgements.append((route, message))
        else:
            self._send(route, message)

    def _send(self, route: Route, message: ControlMessage) -> None:
        with self._lock:
            connection = self._asking.get(route) if isinstance(route, bytes) else self._asked.get(route)
        if connection is None or not connection.send(self._encoder.encode(message)):
            # The peer is gone or has stopped reading; whoever waits for it has a deadline.
            self._drop("a control message was not sent", route)

    def connect(self, endpoint: str) -> bytes:
        """Open the connection to a peer that we ask; it is kept, and re-established, until :meth:`disconnect`.

        Returns:
            Our identity there, random and the same until then; empty when everything is closed.
        """
        with self._lock:
            if (asked := self._asked.get(endpoint)) is not None:
                return asked.identity
            if self._closing:
                return b""
            asked = self._asked[endpoint] = _Asked(self._poller, endpoint, self._name)
        self._dial(asked)
        return asked.identity

    def disconnect(self, endpoint: str) -> None:
        """Close the connection to a peer that we ask, after what is queued for it."""
        with self._lock:
            asked = self._asked.pop(endpoint, None)
        if asked is not None:
            asked.given_up.set()
            self._enqueue(lambda: self._close(asked))

    def admit(self, route: bytes) -> None:
        """A peer that asks us has introduced itself as one of ours; called on the control thread."""
        with self._lock:
            asking = self._asking.get(route)
        if isinstance(asking, _Asking):
            self._introductions.discard(asking)
        self._introductions.admit(route)

    def watch(self, pidfd: int, peer: PeerKey) -> None:
        """Report the end of a peer's process once; takes the descriptor over."""
        if not self._enqueue(lambda: self._watch(pidfd, peer)):
            os.close(pidfd)

    def unwatch(self, instance_id: str, epoch: int) -> None:
        """Let go of the processes of these lives of a peer (this one and earlier ones), which may run on."""
        self._enqueue(lambda: self._unwatch(instance_id, epoch))

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what is queued and close; idempotent. Waits ``timeout_s`` at most."""
        if self._closing or not self.endpoint:
            return
        self._enqueue(self._stop)
        self._thread.join(timeout_s)

    # Any thread.

    def _enqueue(self, action: Callable[[], None]) -> bool:
        with self._lock:
            if self._closing or len(self._actions) >= MAX_QUEUED_ACTIONS:
                return False
            self._actions.append(action)
            if len(self._actions) == 1:
                os.eventfd_write(self._wake, 1)
            return True

    def _drop(self, what: str, route: Route | None) -> None:
        with self._lock:
            self.dropped_total += 1
        self._log.debug(what, route=str(route))

    def _dial(self, asked: _Asked) -> None:
        def dial() -> None:
            delay_s = RECONNECT_S
            while not asked.given_up.is_set():
                try:
                    connected = socket.create_connection(asked.address, CONNECT_TIMEOUT_S)
                except (OSError, ValueError):  # A name that no name can be is a ValueError.
                    self._enqueue(lambda: self._disconnected(asked))
                    asked.given_up.wait(delay_s)
                    delay_s = min(2 * delay_s, RECONNECT_MAX_S)
                    continue
                self._hand_over(asked, connected)
                return

        threading.Thread(target=dial, name="kvmesh-transfer-dial", daemon=True).start()

    def _hand_over(self, asked: _Asked, connected: socket.socket) -> None:
        if not self._enqueue(lambda: self._connected(asked, connected)):
            connected.close()

    # The control thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                for source, events in self._poller.poll(self._tidy_up()):
                    if (handle := self._sources.get(source)) is not None:
                        handle(events)
                        while self._acknowledgements:
                            self._send(*self._acknowledgements.popleft())
        except BaseException as error:
            self.error = error
            raise
        finally:
            self._tear_down()

    def _watch_source(self, source: int, handle: Callable[[int], None]) -> None:
        self._sources[source] = handle
        self._poller.register(source, select.EPOLLIN)

    def _work_off(self, _events: int) -> None:
        os.eventfd_read(self._wake)
        with self._lock:
            actions = list(self._actions)
            self._actions.clear()
        for action in actions:
            action()

    def _accept(self, _events: int) -> None:
        try:
            accepted, _address = self._listener.accept()
        except OSError as error:
            # Else it was gone before it was accepted.
            if error.errno in SHORTAGE_ERRORS:
                self._poller.modify(self._listener, 0)
                self._listens_again_s = time.monotonic() + SHORTAGE_WAIT_S
            return
        if (oldest := self._introductions.crowded_out()) is not None:
            self._forget(oldest)
        if len(self._accepted) >= MAX_CONNECTIONS:
            accepted.close()
            return
        tune(accepted)
        asking = _Asking(self._poller)
        asking.source = asking.open(accepted)
        self._accepted.add(asking)
        self._introductions.add(asking, time.monotonic())
        self._sources[asking.source] = lambda events: self._serve(asking, events)

    def _tidy_up(self) -> float | None:
        """Hang up on strangers who say nothing, and listen again after a shortage; in how many seconds that is due."""
        now_s = time.monotonic()
        for asking in self._introductions.overdue(now_s):
            self._drop("a connection is closed: nobody has introduced himself", asking.route)
            self._forget(asking)
        if self._listens_again_s is not None and now_s >= self._listens_again_s:
            self._listens_again_s = None
            self._poller.modify(self._listener, select.EPOLLIN)
        due_s = min(self._introductions.due_s, self._listens_again_s or math.inf)
        return None if math.isinf(due_s) else due_s - now_s

    def _longest(self, asking: _Asking) -> int:
        if not asking.route:
            return MAX_GREETING_BYTES
        return MAX_STRANGER_BYTES if self._introductions.is_stranger(asking) else MAX_MESSAGE_BYTES

    def _serve(self, asking: _Asking, events: int) -> None:
        if not self._progress(asking, events):
            self._forget(asking)
            return
        try:
            while (data := asking.take(self._longest(asking))) is not None:
                if asking.route:
                    self._deliver(asking.route, data)
                else:
                    self._introduce(asking, data)
        except FrameError as error:
            self._drop(f"a connection is closed: {error}", asking.route)
            self._forget(asking)

    def _forget(self, asking: _Asking) -> None:
        del self._sources[asking.source]
        self._accepted.remove(asking)
        self._introductions.discard(asking)
        with self._lock:
            if self._asking.get(asking.route) is asking:
                del self._asking[asking.route]
        asking.lose()

    def _introduce(self, asking: _Asking, greeting: bytes) -> None:
        if not greeting.startswith(GREETING) or len(greeting) == len(GREETING):
            raise FrameError("the peer does not introduce itself")
        asking.route = greeting[len(GREETING) :]
        if self._introductions.is_admitted(asking.route):
            self._introductions.discard(asking)
        with self._lock:
            # A peer that reconnects keeps its identity and takes the place of its former connection.
            self._asking[asking.route] = asking

    def _progress(self, connection: Connection, events: int) -> bool:
        """Send and receive what can be; False when the connection is lost."""
        if events & select.EPOLLOUT:
            connection.flush()
        try:
            connection.receive()
        except OSError:
            return False
        return True

    def _connected(self, asked: _Asked, connected: socket.socket) -> None:
        if asked.given_up.is_set():
            connected.close()
            return
        tune(connected)
        asked.source = asked.open(connected, GREETING + asked.identity)
        self._sources[asked.source] = lambda events: self._answered(asked, events)
        self._tell(self._handler.on_connected, asked.endpoint)

    def _answered(self, asked: _Asked, events: int) -> None:
        alive = self._progress(asked, events)
        try:
            while alive and (data := asked.take(MAX_MESSAGE_BYTES)) is not None:
                self._deliver(asked.endpoint, data)
        except FrameError as error:
            self._drop(f"a connection is closed: {error}", asked.endpoint)
            alive = False
        if not alive and not asked.given_up.is_set():
            del self._sources[asked.source]
            asked.lose()
            self._dial(asked)
            self._disconnected(asked)

    def _disconnected(self, asked: _Asked) -> None:
        if not asked.given_up.is_set():
            self._tell(self._handler.on_disconnected, asked.endpoint)

    def _tell(self, handle: Callable[[_Told], None], told: _Told) -> None:
        try:
            handle(told)
        except Exception:
            # The border of error isolation, as for messages; the transfers of that peer have their deadlines.
            isolated(self._log, "what became of a peer could not be handled", peer=str(told))

    def _deliver(self, route: Route, data: bytes) -> None:
        try:
            message = self._decoder.decode(data)
        except (msgspec.MsgspecError, RecursionError) as error:
            self._log.warning("a control message cannot be read", route=str(route), error=str(error))
            self._drop("a control message cannot be read", route)
            return
        try:
            self._handler.on_message(route, message)
        except Exception as error:
            # The border of error isolation: what one peer says must not end the transfers with all others.
            isolated(self._log, "a control message could not be handled", route=str(route), kind=type(message).__name__)
            raise FrameError(f"a {type(message).__name__} could not be handled") from error

    def _close(self, asked: _Asked) -> None:
        self._sources.pop(asked.source, None)
        asked.close(LINGER_S)

    def _watch(self, pidfd: int, peer: PeerKey) -> None:
        if self._processes.take(pidfd, peer):
            self._watch_source(pidfd, lambda _events: self._process_ended(pidfd))

    def _process_ended(self, pidfd: int) -> None:
        self._tell(self._handler.on_process_ended, self._let_go(pidfd))

    def _unwatch(self, instance_id: str, epoch: int) -> None:
        for pidfd in self._processes.lives(instance_id, epoch):
            self._let_go(pidfd)

    def _let_go(self, pidfd: int) -> PeerKey:
        del self._sources[pidfd]
        self._poller.unregister(pidfd)
        return self._processes.let_go(pidfd)

    def _stop(self) -> None:
        with self._lock:
            self._closing = True

    def _tear_down(self) -> None:
        with self._lock:
            self._closing = True
            connections: list[Connection] = [*self._accepted, *self._asked.values()]
            self._asking.clear()
            asked, self._asked = self._asked, {}
        for one in asked.values():
            one.given_up.set()
        for connection in connections:
            connection.close(LINGER_S)
        self._processes.close()
        self._listener.close()
        self._poller.close()
        os.close(self._wake)


class _Asking(Connection):
    """From a peer that asks us."""

    def __init__(self, poller: select.epoll) -> None:
        super().__init__(poller)
        self.source = -1
        self.route = b""
        """Its identity, once it has introduced itself."""


class _Asked(Connection):
    """To a peer that we ask."""

    def __init__(self, poller: select.epoll, endpoint: str, name: str) -> None:
        super().__init__(poller)
        self.endpoint = endpoint
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self.address = (host.strip("[]"), int(port))
        self.identity = f"{name[:200]}@{secrets.token_hex(16)}".encode()
        self.given_up = threading.Event()
        self.source = -1
