"""The messages of a piece connection: fixed little-endian frames, some followed by a text or a description.

The owner greets with a nonce; the receiver answers with its name and the description of its channel, signed with the
cluster secret over that nonce, so that nobody else can make an engine open memory. Then requests go one way, answers
the other.
"""

from __future__ import annotations

import socket
import struct
from enum import IntEnum
from typing import Final, NamedTuple

from kvmesh.transceiver.planes.sockets import receive_exactly
from kvmesh.transceiver.types import PeerKey

__all__ = [
    "ANSWER_BYTES",
    "KEY_BYTES",
    "MAX_DESCRIPTOR_BYTES",
    "NONCE_BYTES",
    "REQUEST_BYTES",
    "Answer",
    "AnswerKind",
    "Greeting",
    "Introduction",
    "Request",
    "RequestKind",
    "encode_answer",
    "encode_greeting",
    "encode_introduction",
    "introduction_payload",
    "read_answer",
    "read_greeting",
    "read_introduction",
    "read_request",
]

KEY_BYTES: Final = 16
NONCE_BYTES: Final = 16
MAC_BYTES: Final = 32
MAX_DESCRIPTOR_BYTES: Final = 1 << 20
MAX_NAME_BYTES: Final = 1024
MAX_TEXT_BYTES: Final = 512

_MAGIC: Final = b"KVS1"
_GREETING: Final = struct.Struct(f"<4s{NONCE_BYTES}sQ")
_INTRODUCTION: Final = struct.Struct(f"<4sQHI{MAC_BYTES}s")
_REQUEST: Final = struct.Struct(f"<BIQQ{KEY_BYTES}sQQQQ")
_ANSWER: Final = struct.Struct("<BIQH")
REQUEST_BYTES: Final = _REQUEST.size
ANSWER_BYTES: Final = _ANSWER.size


class RequestKind(IntEnum):
    """What a receiver says."""

    OPEN = 1
    """Begin a session: ``num_items`` items, ``nbytes`` in all."""
    PIECE = 2
    """Send ``num_items`` items from item ``first`` on, ``nbytes`` in all, to ``offset`` of the receive region."""
    CLOSE = 3
    """The session asks for nothing more, and wants nothing of what it has asked for."""


class AnswerKind(IntEnum):
    """What an owner says."""

    ATTACHED = 1
    """It can reach the receive region; ``number`` is nothing."""
    ADMITTED = 2
    """Session ``number`` may ask for pieces."""
    SENT = 3
    """The bytes of piece ``tag`` of session ``number`` are on their way or there; nothing more will be written."""
    ENDED = 4
    """Nothing (more) will be written of piece ``tag``, because its session has ended."""
    REFUSED = 5
    """The introduction (``number`` 0) or session ``number`` is not accepted, or a piece failed; with a text."""


class Greeting(NamedTuple):
    """The owner's first words."""

    nonce: bytes
    region_bytes: int


class Introduction(NamedTuple):
    """Who the receiver is, and how the owner reaches its receive region."""

    peer: PeerKey
    descriptor: bytes
    mac: bytes


class Request(NamedTuple):
    """One frame of a receiver."""

    kind: RequestKind
    tag: int
    transfer_id: int
    session: int
    key: bytes
    first: int = 0
    num_items: int = 0
    nbytes: int = 0
    offset: int = 0

    def encode(self) -> bytes:
        """As it travels."""
        return _REQUEST.pack(*self)


class Answer(NamedTuple):
    """One frame of an owner."""

    kind: AnswerKind
    tag: int
    number: int
    text: str


def encode_greeting(greeting: Greeting) -> bytes:
    """As it travels."""
    return _GREETING.pack(_MAGIC, *greeting)


def read_greeting(connection: socket.socket) -> Greeting:
    """The next bytes as a greeting.

    Raises:
        OSError: the connection ended, or something else answers there.
    """
    magic, nonce, region_bytes = _GREETING.unpack(receive_exactly(connection, _GREETING.size))
    if magic != _MAGIC:
        raise ConnectionError("it does not speak this protocol")
    return Greeting(nonce, region_bytes)


def introduction_payload(nonce: bytes, peer: PeerKey, descriptor: bytes) -> bytes:
    """What an introduction signs."""
    return b"".join((nonce, struct.pack("<Q", peer.epoch), peer.instance_id.encode(), b"\0", descriptor))


def encode_introduction(introduction: Introduction) -> bytes:
    """As it travels."""
    peer, descriptor, mac = introduction
    name = peer.instance_id.encode()
    return _INTRODUCTION.pack(_MAGIC, peer.epoch, len(name), len(descriptor), mac) + name + descriptor


def read_introduction(connection: socket.socket, by_s: float) -> Introduction:
    """The next bytes as an introduction, unverified.

    Args:
        connection: from a receiver.
        by_s: the monotonic time by which all of it must be there.

    Raises:
        OSError: the connection ended, or it is none.
    """
    head = receive_exactly(connection, _INTRODUCTION.size, by_s=by_s)
    magic, epoch, name_bytes, descriptor_bytes, mac = _INTRODUCTION.unpack(head)
    if magic != _MAGIC or name_bytes > MAX_NAME_BYTES or descriptor_bytes > MAX_DESCRIPTOR_BYTES:
        raise ConnectionError("it does not speak this protocol")
    try:
        name = receive_exactly(connection, name_bytes, by_s=by_s).decode()
    except UnicodeDecodeError as error:
        raise ConnectionError("its name is no text") from error
    return Introduction(PeerKey(name, epoch), receive_exactly(connection, descriptor_bytes, by_s=by_s), mac)


def read_request(connection: socket.socket) -> Request:
    """The next frame of a receiver.

    Raises:
        OSError: the connection ended, or it is no request.
    """
    kind, *fields = _REQUEST.unpack(receive_exactly(connection, REQUEST_BYTES))
    try:
        return Request(RequestKind(kind), *fields)
    except ValueError as error:
        raise ConnectionError(str(error)) from error


def encode_answer(kind: AnswerKind, *, tag: int = 0, number: int = 0, text: str = "") -> bytes:
    """As it travels; a long text is cut."""
    data = text.encode()[:MAX_TEXT_BYTES]
    return _ANSWER.pack(kind, tag, number, len(data)) + data


def read_answer(connection: socket.socket) -> Answer:
    """The next frame of an owner.

    Raises:
        OSError: the connection ended, or it is no answer.
    """
    kind, tag, number, text_bytes = _ANSWER.unpack(receive_exactly(connection, ANSWER_BYTES))
    try:
        known = AnswerKind(kind)
    except ValueError as error:
        raise ConnectionError(str(error)) from error
    return Answer(known, tag, number, receive_exactly(connection, text_bytes).decode(errors="replace"))
