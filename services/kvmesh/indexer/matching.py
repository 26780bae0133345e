"""The router's question over ZMQ: a ROUTER socket, msgpack each way (``kvmesh.protocol.match``)."""

from __future__ import annotations

from collections.abc import Callable

import anyio.lowlevel
import msgspec
import zmq

from kvmesh.events.index import PrefixIndex
from kvmesh.events.keyed import KeyRing
from kvmesh.events.keyed_lookup import lookup_of
from kvmesh.events.polling import readable, receive
from kvmesh.hashing import TokenIds, as_token_ids
from kvmesh.net.address import BindError, choose_family, reachable_endpoint
from kvmesh.net.curve import CurveSecurity
from kvmesh.protocol.match import ROUTED, MatchReply, MatchRequest, Routed
from kvmesh.telemetry import get_logger

__all__ = ["MatchServer"]

ANSWERS_A_TURN = 32
"""Questions answered before other tasks get a turn: under a millisecond."""

MAX_MESSAGE_BYTES = 1 << 26
"""16 million tokens; a connection that brings more is closed."""

_log = get_logger("indexer.match")


class MatchServer:
    """Answers :class:`MatchRequest` from an index.

    Args:
        index: what is known.
        endpoint: what to bind, such as ``tcp://127.0.0.1:8301``.
        on_routed: told of a prompt that was sent to a worker.
        security: keys that are asked for; None: whoever can connect may ask.
        keys: of workers that tell keyed names instead of tokens.
    """

    def __init__(
        self,
        index: PrefixIndex,
        endpoint: str,
        *,
        on_routed: Callable[[Routed, TokenIds], object],
        security: CurveSecurity | None = None,
        keys: KeyRing | None = None,
    ) -> None:
        self._index = index
        self._match = lookup_of(index, keys)
        self._on_routed = on_routed
        self._security = security
        self._bind = endpoint
        self._socket: zmq.Socket[bytes] | None = None
        self._decoder = msgspec.msgpack.Decoder(MatchRequest)
        self._routed_decoder = msgspec.msgpack.Decoder(Routed)
        self._encoder = msgspec.msgpack.Encoder()
        self.endpoint = endpoint
        """What to connect to, once bound."""
        self.answered_total = 0
        self.routed_total = 0
        self.malformed_total = 0
        self.failed_total = 0
        """Messages that this end could not deal with: defects, each with a traceback in the log."""

    @property
    def bound(self) -> bool:
        """Whether questions can arrive."""
        return self._socket is not None

    def bind(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Bind the socket.

        Raises:
            BindError: the endpoint is taken.
        """
        socket = context.socket(zmq.ROUTER)
        socket.linger = 0
        socket.maxmsgsize = MAX_MESSAGE_BYTES
        if self._security is not None:
            self._security.apply_server(socket)
        choose_family(socket, self._bind)
        try:
            socket.bind(self._bind)
        except zmq.ZMQError as error:
            socket.close()
            raise BindError("match_endpoint", self._bind, error.errno or 0) from error
        self.endpoint = reachable_endpoint(self._bind, str(socket.get_string(zmq.LAST_ENDPOINT)))
        self._socket = socket

    async def serve(self) -> None:
        """Answer until cancelled."""
        socket = self._socket
        assert socket is not None, "bind() comes first"
        while True:
            for _ in range(ANSWERS_A_TURN):
                frames = receive(socket)
                if frames is None:
                    await readable(socket)
                else:
                    self._handle(socket, frames)
            await anyio.lowlevel.checkpoint()

    def close(self) -> None:
        """Close the socket; idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _handle(self, socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
        try:
            if len(frames) > 2 and frames[-2] == ROUTED:
                self._routed(frames[-1])
            elif (reply := self._answer(frames[-1])) is not None:
                # A router that does not read its answers loses them; nobody waits for it.
                socket.send_multipart([*frames[:-1], reply], zmq.NOBLOCK)
        except Exception:
            # The border of error isolation: what one message makes go wrong is nobody else's.
            self.failed_total += 1
            if self.failed_total & (self.failed_total - 1) == 0:
                _log.exception("a match request could not be answered", so_far=self.failed_total)

    def _answer(self, question: bytes) -> bytes | None:
        try:
            request = self._decoder.decode(question)
            tokens = as_token_ids(request.token_ids)
        except (msgspec.DecodeError, ValueError) as error:
            self._malformed(error)
            return None
        matches = self._match(tokens, model=request.model, lora=request.lora_id, cache_salt=request.cache_salt)
        self.answered_total += 1
        return self._encoder.encode(MatchReply(id=request.id, matches=matches))

    def _routed(self, message: bytes) -> None:
        try:
            routed = self._routed_decoder.decode(message)
            tokens = as_token_ids(routed.token_ids)
        except (msgspec.DecodeError, ValueError) as error:
            self._malformed(error)
            return
        self.routed_total += 1
        self._on_routed(routed, tokens)

    def _malformed(self, error: Exception) -> None:
        self.malformed_total += 1
        if self.malformed_total & (self.malformed_total - 1) == 0:
            _log.warning("malformed match requests ignored", so_far=self.malformed_total, error=str(error))
