"""The messages of a piece connection, there and back."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from kvmesh.transceiver.staged.frames import (
    KEY_BYTES,
    NONCE_BYTES,
    Answer,
    AnswerKind,
    Greeting,
    Introduction,
    Request,
    RequestKind,
    encode_answer,
    encode_greeting,
    encode_introduction,
    introduction_payload,
    read_answer,
    read_greeting,
    read_introduction,
    read_request,
)
from kvmesh.transceiver.types import PeerKey


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        one.settimeout(10)
        other.settimeout(10)
        yield one, other


def introduction_of(stream: socket.socket) -> Introduction:
    return read_introduction(stream, time.monotonic() + 20)


def test_frames_arrive_as_they_were_sent(ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = ends
    greeting = Greeting(b"n" * NONCE_BYTES, 1 << 40)
    introduction = Introduction(PeerKey("génération", 7), b"descriptor", b"m" * 32)
    request = Request(RequestKind.PIECE, (1 << 32) - 1, (1 << 64) - 1, 3, b"k" * KEY_BYTES, 4, 5, 1 << 40, 1 << 41)
    one.sendall(encode_greeting(greeting) + encode_introduction(introduction) + request.encode())
    assert read_greeting(other) == greeting
    assert introduction_of(other) == introduction
    assert read_request(other) == request
    other.sendall(encode_answer(AnswerKind.REFUSED, tag=9, number=3, text="no: größer"))
    assert read_answer(one) == Answer(AnswerKind.REFUSED, 9, 3, "no: größer")
    other.sendall(encode_answer(AnswerKind.ATTACHED, text="x" * 10_000))
    assert read_answer(one).text == "x" * 512


@pytest.mark.parametrize("read", [read_greeting, introduction_of, read_request, read_answer])
def test_whoever_speaks_something_else_is_hung_up_on(ends: tuple[socket.socket, socket.socket], read) -> None:  # type: ignore[no-untyped-def]
    one, other = ends
    one.sendall(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n" + bytes(200))
    with pytest.raises(OSError, match=r"protocol|valid"):
        read(other)


def test_an_end_in_the_middle_is_an_error(ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = ends
    one.sendall(b"KVS1")
    one.shutdown(socket.SHUT_WR)
    with pytest.raises(OSError, match="closed"):
        read_greeting(other)


def test_a_signature_covers_name_epoch_and_description() -> None:
    payloads = {
        introduction_payload(nonce, PeerKey(name, epoch), descriptor)
        for nonce in (b"1" * 16, b"2" * 16)
        for name in ("a", "ab")
        for epoch in (1, 2)
        for descriptor in (b"", b"b")
    }
    assert len(payloads) == 16
