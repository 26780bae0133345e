"""The control sockets: a ROUTER where peers ask us, a DEALER for each peer that we ask, and the thread they live on.

Messages are msgpack of :data:`kvmesh.protocol.transfer.ControlMessage`. Sending never blocks: messages wait in bounded
queues and are dropped (and counted) when a queue is full, which only happens to a peer that has stopped; every exchange
has a deadline of its own above this level, and cancels are repeated until answered. The thread sleeps until a socket, a
process or another thread has something for it.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from kvmesh.protocol.transfer import ControlMessage
from kvmesh.telemetry import get_logger
from kvmesh.transceiver.types import PeerKey

__all__ = ["Control", "ControlHandler", "Route"]

MAX_QUEUED_MESSAGES: Final = 10_000
MAX_MESSAGE_BYTES: Final = 64 << 20
"""A request for a million pages fits well; bounds what a peer can make us allocate."""
CLOSE_LINGER_MS: Final = 200
RECONNECT_MS: Final = 100
RECONNECT_MAX_MS: Final = 5_000

_MONITORED_EVENTS: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED

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
    """See the module. :meth:`start` opens the sockets.

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
        self._outbox: deque[Callable[[], None]] = deque()
        self._closing = False
        self._dealers: dict[str, _Dealer] = {}
        self._watched: dict[int, PeerKey] = {}
        self._decoder = msgspec.msgpack.Decoder(ControlMessage)
        self._encoder = msgspec.msgpack.Encoder()
        self._log = get_logger("transceiver.control")
        self.endpoint = ""
        self.dropped_total = 0
        self.error: BaseException | None = None

    def start(self) -> None:
        """Bind and begin to serve.

        Raises:
            OSError: the address cannot be bound.
        """
        self._context = zmq.Context(io_threads=1)
        self._router = self._context.socket(zmq.ROUTER)
        _configure(self._router)
        # A peer that reconnects keeps its identity and takes the place of its former connection.
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        host = f"[{self._bind_host}]" if ":" in self._bind_host else self._bind_host
        self._router.setsockopt(zmq.IPV6, ":" in self._bind_host)
        try:
            port = self._router.bind_to_random_port(f"tcp://{host}")
        except zmq.ZMQError as error:
            self._router.close(0)
            self._context.term()
            raise OSError(error.errno, f"cannot listen for transfers on {self._bind_host}: {error.strerror}") from error
        self.endpoint = f"tcp://{host}:{port}"
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="kvmesh-transfer-control", daemon=True)
        self._thread.start()

    def send(self, route: Route, message: ControlMessage) -> None:
        """Send without waiting, from any thread; dropped (and counted) when there is no connection to ``route``."""
        data = self._encoder.encode(message)
        if threading.current_thread() is self._thread and not self._outbox:
            # An answer from a handler: nothing that was sent before waits, and a wake-up is saved.
            self._send(route, data)
            return
        self._enqueue(lambda: self._send(route, data))

    def connect(self, endpoint: str) -> None:
        """Open the connection to a peer that we ask; it is kept, and re-established, until :meth:`disconnect`."""
        self._enqueue(lambda: self._connect(endpoint))

    def disconnect(self, endpoint: str) -> None:
        """Close the connection to a peer that we ask, after what is queued for it."""
        self._enqueue(lambda: self._disconnect(endpoint))

    def watch(self, pidfd: int, peer: PeerKey) -> None:
        """Report the end of a peer's process once; takes the descriptor over."""
        self._enqueue(lambda: self._watch(pidfd, peer))

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what is queued and close; idempotent. Waits ``timeout_s`` at most."""
        if self._closing or not self.endpoint:
            return
        self._enqueue(self._stop)
        self._thread.join(timeout_s)

    def _enqueue(self, action: Callable[[], None]) -> None:
        with self._lock:
            if self._closing or len(self._outbox) >= MAX_QUEUED_MESSAGES:
                self.dropped_total += 1
                return
            self._outbox.append(action)
            if len(self._outbox) == 1:
                os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        try:
            while not self._closing:
                for source, _flags in self._poller.poll():
                    self._handle(source)
        except BaseException as error:
            self.error = error
            raise
        finally:
            self._tear_down()

    def _handle(self, source: zmq.Socket[bytes] | int) -> None:
        if source == self._wake:
            os.eventfd_read(self._wake)
            self._work_off()
        elif source is self._router:
            self._receive_all(self._router, None)
        elif isinstance(source, int):
            self._process_ended(source)
        else:
            for endpoint, dealer in list(self._dealers.items()):
                if source is dealer.socket:
                    self._receive_all(dealer.socket, endpoint)
                elif source is dealer.monitor:
                    event = recv_monitor_message(dealer.monitor, zmq.NOBLOCK)["event"]
                    if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                        self._handler.on_connected(endpoint)
                    else:
                        self._handler.on_disconnected(endpoint)

    def _work_off(self) -> None:
        while True:
            with self._lock:
                if not self._outbox:
                    return
                actions = list(self._outbox)
                self._outbox.clear()
            for action in actions:
                action()

    def _receive_all(self, socket: zmq.Socket[bytes], endpoint: str | None) -> None:
        while True:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            route: Route = frames[0] if endpoint is None else endpoint
            try:
                message = self._decoder.decode(frames[-1])
            except msgspec.MsgspecError as error:
                self.dropped_total += 1
                self._log.warning("a control message cannot be read", route=str(route), error=str(error))
                continue
            self._handler.on_message(route, message)

    def _send(self, route: Route, data: bytes) -> None:
        try:
            if isinstance(route, bytes):
                self._router.send_multipart([route, data], zmq.NOBLOCK)
            elif (dealer := self._dealers.get(route)) is not None:
                dealer.socket.send(data, zmq.NOBLOCK)
            else:
                self.dropped_total += 1
        except zmq.ZMQError as error:
            # The peer is gone or has stopped reading; whoever waits for it has a deadline.
            self.dropped_total += 1
            self._log.debug("a control message was not sent", route=str(route), error=str(error))

    def _connect(self, endpoint: str) -> None:
        if endpoint not in self._dealers:
            dealer = self._dealers[endpoint] = _Dealer(self._context, endpoint, self._name)
            self._poller.register(dealer.socket, zmq.POLLIN)
            self._poller.register(dealer.monitor, zmq.POLLIN)

    def _disconnect(self, endpoint: str) -> None:
        if (dealer := self._dealers.pop(endpoint, None)) is not None:
            self._poller.unregister(dealer.socket)
            self._poller.unregister(dealer.monitor)
            dealer.close()

    def _watch(self, pidfd: int, peer: PeerKey) -> None:
        if peer in self._watched.values():
            os.close(pidfd)
            return
        self._watched[pidfd] = peer
        self._poller.register(pidfd, zmq.POLLIN)

    def _process_ended(self, pidfd: int) -> None:
        self._poller.unregister(pidfd)
        os.close(pidfd)
        self._handler.on_process_ended(self._watched.pop(pidfd))

    def _stop(self) -> None:
        with self._lock:
            self._closing = True

    def _tear_down(self) -> None:
        self._stop()
        for endpoint in list(self._dealers):
            self._disconnect(endpoint)
        for pidfd in self._watched:
            os.close(pidfd)
        self._watched.clear()
        self._router.close(CLOSE_LINGER_MS)
        self._context.term()
        os.close(self._wake)


class _Dealer:
    """A connection to a peer that we ask, and the socket that tells when it is lost."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, name: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        _configure(self.socket)
        self.socket.setsockopt(zmq.ROUTING_ID, f"{name[:200]}@{secrets.token_hex(4)}".encode())
        self.socket.setsockopt(zmq.IPV6, "[" in endpoint)
        self.socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        self.monitor = self.socket.get_monitor_socket(_MONITORED_EVENTS)
        self.socket.connect(endpoint)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(CLOSE_LINGER_MS)


def _configure(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.LINGER, CLOSE_LINGER_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 2)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
