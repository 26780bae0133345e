"""The router's question over ZMQ: a ROUTER socket, one msgpack frame each way (``kvmesh.protocol.match``)."""

from __future__ import annotations

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from kvmesh.hashing import salt_id
from kvmesh.indexer.index import PrefixIndex
from kvmesh.net.address import reachable_endpoint
from kvmesh.protocol.match import MatchReply, MatchRequest
from kvmesh.telemetry import get_logger

__all__ = ["MatchServer"]

_log = get_logger("indexer.match")


class MatchServer:
    """Answers :class:`MatchRequest` from an index.

    Args:
        index: what is known.
        endpoint: what to bind, e.g. ``tcp://127.0.0.1:8301``.
    """

    def __init__(self, index: PrefixIndex, endpoint: str) -> None:
        self._index = index
        self._bind = endpoint
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._decoder = msgspec.msgpack.Decoder(MatchRequest)
        self._encoder = msgspec.msgpack.Encoder()
        self.endpoint = endpoint
        self.malformed_total = 0

    def bind(self) -> None:
        """Bind the socket.

        Raises:
            OSError: the endpoint is taken.
        """
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        try:
            self._socket.bind(self._bind)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, f"cannot bind the match service to {self._bind}: {error.strerror}") from error
        self.endpoint = reachable_endpoint(self._bind, str(self._socket.get_string(zmq.LAST_ENDPOINT)))

    async def serve(self) -> None:
        """Answer until cancelled."""
        assert self._socket is not None, "bind() comes first"
        while True:
            frames = await self._socket.recv_multipart()
            try:
                request = self._decoder.decode(frames[-1])
                tokens = np.frombuffer(request.token_ids, dtype="<i4")
            except (msgspec.DecodeError, ValueError) as error:
                self.malformed_total += 1
                _log.warning("malformed match request ignored", error=str(error))
                continue
            salt = None if request.cache_salt is None else salt_id(request.cache_salt)
            matches = self._index.match(tokens, model=request.model, lora=request.lora_id, salt=salt)
            reply = self._encoder.encode(MatchReply(id=request.id, matches=matches))
            await self._socket.send_multipart([*frames[:-1], reply])

    def close(self) -> None:
        """Close the socket; idempotent."""
        self._socket = None
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
