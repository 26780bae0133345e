"""Messages between the leader of an engine's ranks and a follower: frames over a Unix stream socket."""

from __future__ import annotations

import array
import json
import socket
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

__all__ = ["Frame", "Kind", "RankSocket"]

_HEADER = struct.Struct("<IIQ")
"""Kind, number of descriptors that come along, bytes of the body."""

_MAX_DESCRIPTORS = 250
"""The kernel takes 253 in one message."""


class Kind(IntEnum):
    """What a frame says."""

    SETTINGS = 1
    """To a follower: what to load."""
    LOADED = 2
    """From a follower: its part of the model is there, or why not."""
    POOLS = 3
    """To a follower: the KV pages and where to meet the other ranks."""
    JOINED = 4
    """From a follower: it can compute, or why not."""
    STEP = 5
    """To a follower: compute this."""
    LEAVE = 6
    """To a follower: the engine ends."""


class Frame(NamedTuple):
    """One message; ``body`` is valid until the next one is received."""

    kind: Kind
    body: memoryview
    fds: list[int]
    """Descriptors that came along; they belong to the receiver."""

    def facts(self) -> dict[str, Any]:
        """The body of any frame but a step."""
        facts: dict[str, Any] = json.loads(bytes(self.body))
        return facts


class RankSocket:
    """One end of the pair of sockets between the leader and a follower.

    Args:
        connection: a connected Unix stream socket; it belongs to this object from now on.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray(1 << 16)

    def fileno(self) -> int:
        """The descriptor, to wait on."""
        return self._connection.fileno()

    def tell(self, kind: Kind, facts: dict[str, Any] | None = None, fds: Sequence[int] = ()) -> None:
        """Send a frame of facts, and descriptors with it.

        Raises:
            OSError: the other end is gone, or takes nothing for as long as :meth:`limit` says.
        """
        self.send(kind, json.dumps(facts or {}).encode(), fds=fds)

    def send(self, kind: Kind, *parts: bytes, fds: Sequence[int] = ()) -> None:
        """Send a frame whose body is ``parts``, one after the other.

        Raises:
            OSError: as :meth:`tell`.
        """
        data = b"".join((_HEADER.pack(kind, len(fds), sum(map(len, parts))), *parts))
        if fds:
            assert len(fds) <= _MAX_DESCRIPTORS
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            sent = self._connection.sendmsg([data], rights)
            data = data[sent:]
        self._connection.sendall(data)

    def receive(self, timeout_s: float | None) -> Frame:
        """The next frame.

        Args:
            timeout_s: longest wait between two pieces; None: until the other end closes.

        Raises:
            EOFError: the other end has closed.
            TimeoutError: nothing came in time.
        """
        self._connection.settimeout(timeout_s)
        header = bytearray(_HEADER.size)
        data, fds, _flags, _address = socket.recv_fds(self._connection, _HEADER.size, _MAX_DESCRIPTORS)
        if not data:
            raise EOFError("the other end has closed")
        header[: len(data)] = data
        self._fill(memoryview(header), len(data))
        kind, _num_fds, nbytes = _HEADER.unpack(header)
        if len(self._buffer) < nbytes:
            self._buffer = bytearray(nbytes)
        body = memoryview(self._buffer)[:nbytes]
        self._fill(body, 0)
        return Frame(Kind(kind), body, fds)

    def limit(self, timeout_s: float) -> None:
        """How long sending may take."""
        self._connection.settimeout(timeout_s)

    def close(self) -> None:
        """The other end sees the end of the stream."""
        self._connection.close()

    def _fill(self, view: memoryview, have: int) -> None:
        while have < len(view):
            count = self._connection.recv_into(view[have:])
            if count == 0:
                raise EOFError("the other end has closed")
            have += count
