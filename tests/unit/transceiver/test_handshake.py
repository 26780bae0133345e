"""Introductions: who pairs with whom, and the sentence for who does not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, PageLayout
from kvmesh.cache.sharding import shard_requirements
from kvmesh.protocol.transfer import Hello, HelloReply
from kvmesh.protocol.version import PROTOCOL_VERSION
from kvmesh.transceiver.handshake import Handshake, Introduction, PairingRefusedError, StrangerError
from kvmesh.transceiver.peer_layouts import read_layout
from kvmesh.transceiver.planes.base import Side
from kvmesh.transceiver.tickets import Signer
from kvmesh.transceiver.types import PeerKey

LAYERS = tuple(LayerCacheSpec(layer_index=i, num_kv_heads=4, head_dim=16, dtype="float32") for i in range(2))


def layout(tp_size: int = 1) -> PageLayout:
    return PageLayout.build(shard_requirements(CacheRequirements(LAYERS), tp_size, 1), 8)


BOND = msgspec.msgpack.encode(("a", b""))
BOND_OF_B = msgspec.msgpack.encode(("b", b""))


def handshake(
    name: str = "a", *, backend: str = "NIXL", digest: str = "1" * 64, secret: bytes = b"s", tp_size: int = 1
) -> Handshake:
    introduction = Introduction(PeerKey(name, 1), backend, digest, f"layout of {name}", layout(tp_size))
    return Handshake(introduction, Signer(secret, "hello"), b"descriptor")


def refusal(mine: Handshake, message: Hello | HelloReply) -> str:
    with pytest.raises(PairingRefusedError) as caught:
        mine.pair(message, "owner", b"")
    return str(caught.value)


def test_equal_engines_pair_page_by_page() -> None:
    for message in (handshake("b").hello("a", b""), handshake("b").reply(b"")):
        pairing = handshake("a").pair(message, "owner", b"")
        assert [route.spans for route in pairing.routes] == [((0, 0, layout().groups[0].page_bytes),)]


def test_engines_of_unequal_ranks_pair_and_agree_on_the_routes() -> None:
    """semantics §6.7"""
    owner, receiver = handshake("a", tp_size=2), handshake("b")
    there = owner.pair(receiver.hello("a", b""), "owner", b"")
    here = receiver.pair(owner.reply(b""), "receiver", b"")
    assert there.routes == here.routes
    assert (there.layout, here.layout) == (layout(), layout(2))


def test_another_layout_is_refused_naming_both() -> None:
    sentence = refusal(handshake("a"), handshake("b", digest="2" * 64).hello("a", b""))
    for part in ("model or cache layout differs", "1" * 16, "2" * 16, "layout of a", "layout of b"):
        assert part in sentence


def test_a_layout_that_is_none_is_refused() -> None:
    other = handshake("b")
    hello = other._sign(_with(other.hello("a", b""), layout=b"\xc1"), BOND)
    assert "the page layout of b does not fit" in refusal(handshake("a"), hello)


def test_a_layout_that_lacks_what_its_digest_promises_is_refused() -> None:
    other = handshake("b")
    halves = tuple(msgspec.structs.replace(layer, num_kv_heads=2, first_kv_head=2) for layer in LAYERS)
    half = PageLayout.build(CacheRequirements(halves), 8)
    reply = other._sign(_with(other.reply(b""), layout=msgspec.msgpack.encode(half)), BOND_OF_B)
    with pytest.raises(PairingRefusedError, match="head 0 of the k buffer of layer 0 is in no page of the owner"):
        handshake("a").pair(reply, "receiver", b"")


GROUP = layout().groups[0]
BUFFER = GROUP.buffers[0]


def with_group(**changes: Any) -> PageLayout:
    return msgspec.structs.replace(layout(), groups=(msgspec.structs.replace(GROUP, **changes),))


def with_buffer(**changes: Any) -> PageLayout:
    return with_group(buffers=(msgspec.structs.replace(BUFFER, **changes), *GROUP.buffers[1:]))


@pytest.mark.parametrize(
    "stated",
    [
        *(with_group(page_bytes=size) for size in (0, -64, GROUP.page_bytes - 64, 1 << 20, 1 << 62)),
        *(with_group(pool=pool) for pool in (-1, 1)),
        *(with_group(group_id=number) for number in (-1, 1, 1 << 40)),
        *(with_group(rank=rank) for rank in (-1, 1)),
        *(with_group(window=window) for window in (0, -1, 8)),
        *(with_group(kind=kind) for kind in ("mla", "state")),
        *(with_group(layers=layers) for layers in ((), (0,), (0, 0), (0, 1, 2))),
        *(with_group(buffers=buffers) for buffers in ((), GROUP.buffers[:1], GROUP.buffers * 2, GROUP.buffers[::-1])),
        *(with_buffer(offset_bytes=offset) for offset in (-64, 64, GROUP.page_bytes, 1 << 62)),
        *(with_buffer(nbytes=size) for size in (0, -1, 1, BUFFER.nbytes * 2, 1 << 34)),
        *(with_buffer(num_kv_heads=heads) for heads in (0, -1, 3, 8)),
        *(with_buffer(head_dim=size) for size in (0, -1, 32)),
        *(with_buffer(first_kv_head=head) for head in (-1, 1, 1 << 40)),
        with_buffer(dtype="bfloat16"),
        with_buffer(dtype="float8"),
        with_buffer(layer=7),
        *(msgspec.structs.replace(layout(), tokens_per_block=tokens) for tokens in (0, -8, 4, 16)),
        *(msgspec.structs.replace(layout(), pools=pools) for pools in ((), layout().pools * 2)),
        msgspec.structs.replace(layout(), groups=layout().groups * 2),
        msgspec.structs.replace(layout(), groups=()),
        msgspec.structs.replace(layout(), version=2),
        PageLayout.build(CacheRequirements(LAYERS[:1]), 8),
        PageLayout.build(CacheRequirements(LAYERS), 16),
    ],
)
@pytest.mark.parametrize("side", ["owner", "receiver"])
def test_a_layout_that_contradicts_itself_or_its_digest_is_refused(stated: PageLayout, side: Side) -> None:
    """Bytes outside a page would be another request's."""
    other = handshake("b")
    hello = other._sign(_with(other.hello("a", b""), layout=msgspec.msgpack.encode(stated)), BOND)
    with pytest.raises(PairingRefusedError, match="the page layout of b does not fit: "):
        handshake("a").pair(hello, side, b"")


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("windows", [(None,), (None, 16), (16, None, 32)])
def test_every_layout_that_is_built_is_believed(tp_size: int, windows: tuple[int | None, ...]) -> None:
    layers = [
        msgspec.structs.replace(LAYERS[0], layer_index=number, window=windows[number % len(windows)])
        for number in range(5)
    ]
    if tp_size == 1:
        layers.append(msgspec.structs.replace(LAYERS[0], layer_index=5, kind="state", state_bytes=100))
    built = PageLayout.build(shard_requirements(CacheRequirements(tuple(layers)), tp_size, 1), 8)
    assert read_layout(msgspec.msgpack.encode(built), built) == built


def test_another_backend_is_refused_naming_both() -> None:
    sentence = refusal(handshake("a"), handshake("b", backend="BUILTIN").hello("a", b""))
    assert "b uses BUILTIN, a uses NIXL" in sentence


def test_another_protocol_is_refused() -> None:
    other = handshake("b")
    hello = other._sign(_with(other.hello("a", b""), protocol=99), BOND)
    assert refusal(handshake("a"), hello) == (f"transfer protocol differs: b speaks 99, a speaks {PROTOCOL_VERSION}")


def test_a_stranger_is_refused() -> None:
    sentence = refusal(handshake("a"), handshake("b", secret=b"other").hello("a", b""))
    assert sentence == "a does not share a cluster secret with this peer"
    tampered = _with(handshake("b").hello("a", b""), agent=b"other memory")
    assert refusal(handshake("a"), tampered) == sentence


def test_a_refusal_describes_no_memory() -> None:
    reply = handshake("a").reply(b"", refused="no")
    assert (reply.agent, reply.refused) == (b"", "no")
    handshake("b").pair(reply, "receiver", b"")


def _with(message, **changes):  # type: ignore[no-untyped-def]
    for name, value in changes.items():
        setattr(message, name, value)
    return message


def test_a_recorded_introduction_serves_nobody_else() -> None:
    """Neither at another engine, nor over another connection."""
    hello = handshake("b").hello("a", b"route")
    handshake("a").pair(hello, "owner", b"route")
    for owner, route in (("a", b"another route"), ("c", b"route")):
        with pytest.raises(StrangerError):
            handshake(owner).pair(hello, "owner", route)


def test_a_recorded_answer_serves_nobody_else() -> None:
    """It was given over another connection, or is said by another engine in the owner's name."""
    reply = handshake("a").reply(b"route")
    handshake("b").pair(reply, "receiver", b"route")
    with pytest.raises(StrangerError):
        handshake("b").pair(reply, "receiver", b"another route")
    with pytest.raises(StrangerError):
        handshake("b").pair(_with(reply, instance_id="c"), "receiver", b"route")
