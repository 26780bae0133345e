from __future__ import annotations

from kvmesh.transceiver.handshake import Handshake, Introduction
from kvmesh.transceiver.tickets import Signer
from kvmesh.transceiver.types import PeerKey


def handshake(name: str = "a", *, backend: str = "NIXL", digest: str = "1" * 64, secret: bytes = b"s") -> Handshake:
    introduction = Introduction(PeerKey(name, 1), backend, digest, f"layout of {name}")
    return Handshake(introduction, Signer(secret, "hello"), b"descriptor")


def test_equal_engines_pair() -> None:
    assert handshake("a").obstacle(handshake("b").hello()) is None
    assert handshake("b").obstacle(handshake("a").reply()) is None


def test_another_layout_is_refused_naming_both() -> None:
    sentence = handshake("a").obstacle(handshake("b", digest="2" * 64).hello())
    assert sentence is not None
    for part in ("model or cache layout differs", "1" * 16, "2" * 16, "layout of a", "layout of b"):
        assert part in sentence


def test_another_backend_is_refused_naming_both() -> None:
    sentence = handshake("a").obstacle(handshake("b", backend="BUILTIN").hello())
    assert sentence is not None
    assert "b uses BUILTIN, a uses NIXL" in sentence


def test_another_protocol_is_refused() -> None:
    other = handshake("b")
    hello = other._sign(_with(other.hello(), protocol=9))
    assert handshake("a").obstacle(hello) == "transfer protocol differs: b speaks 9, a speaks 1"


def test_a_stranger_is_refused() -> None:
    sentence = handshake("a").obstacle(handshake("b", secret=b"other").hello())
    assert sentence == "a does not share a cluster secret with this peer"
    tampered = _with(handshake("b").hello(), agent=b"other memory")
    assert handshake("a").obstacle(tampered) == sentence


def test_a_refusal_describes_no_memory() -> None:
    reply = handshake("a").reply(refused="no")
    assert (reply.agent, reply.refused) == (b"", "no")
    assert handshake("b").obstacle(reply) is None


def _with(message, **changes):  # type: ignore[no-untyped-def]
    for name, value in changes.items():
        setattr(message, name, value)
    return message
