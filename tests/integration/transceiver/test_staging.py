"""Staging buffers between real processes: small ones, frozen and killed peers, no deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

Pair = Any
"""tests/integration/transceiver/conftest.py"""

WAYS = ["staged-memfd", "staged-tcp", "staged-nixl"]
TWO_PAGES = {"max_tokens_in_buffer": 32}
SOURCE, TARGET = list(range(40)), list(range(50, 90))
SENDING, RECEIVING = "transceiver.during_send", "transceiver.during_transfer"


def begin(pair: Pair, transfer: int = 7) -> None:
    handoff = pair.context.offer(transfer=transfer, pages=SOURCE)
    pair.generation.ask(transfer=transfer, handoff=handoff, pages=TARGET)


def wait_unused(peer: Any) -> None:
    """Until every room of both buffers is free, and nobody waits."""
    deadline_s = time.monotonic() + 20
    names = ("send_used_bytes", "receive_used_bytes", "send_waiting", "receive_waiting")
    while any((stats := peer.stats())[f"staging_{name}"] for name in names):
        assert time.monotonic() < deadline_s, stats
        time.sleep(0.005)


def small(make_pair: Callable[..., Pair], way: str, number: int = 1, **transceiver: Any) -> Pair:
    return make_pair(
        way,
        transceiver={**TWO_PAGES, **transceiver},
        context={"called": f"context-{number}"},
        generation={"called": f"generation-{number}"},
    )


@pytest.mark.parametrize("way", WAYS)
def test_64_transfers_both_ways_through_buffers_of_two_pages(make_pair: Callable[..., Pair], way: str) -> None:
    """§2b max_tokens_in_buffer: in pieces, and no deadlock."""
    pair = small(make_pair, way)
    one, other = pair.context, pair.generation
    for number in range(32):
        for owner, receiver, transfer in ((one, other, 100 + number), (other, one, 200 + number)):
            handoff = owner.offer(transfer=transfer, pages=[number % 8, 8 + number % 16, 24])
            receiver.ask(transfer=transfer, handoff=handoff, pages=[25, 32 + number, 64 + number], first=1)
    for owner, receiver, first in ((one, other, 100), (other, one, 200)):
        wanted = set(range(first, first + 32))
        assert set(pair.settle(receiver, "generation", wanted, timeout_s=60)["completed"]) == wanted
        assert set(pair.settle(owner, "context", wanted)["completed"]) == wanted
    for number in range(32):
        source, target = [8 + number % 16], [32 + number]
        assert other.digest(pages=target) == one.digest(pages=source)
        assert one.digest(pages=target) == other.digest(pages=source)
    wait_unused(one)
    wait_unused(other)


@pytest.mark.parametrize("way", WAYS)
def test_a_frozen_owner_costs_rooms_and_no_pages(make_pair: Callable[..., Pair], way: str) -> None:
    """The receiver stops at once; only a room into which the owner may still write stays out of use."""
    pair = small(make_pair, way)
    others = small(make_pair, way, 2)
    others.generation.kill()
    others.generation = pair.generation
    pair.context.close_gate(point=SENDING)
    begin(pair)
    assert pair.context.reached(point=SENDING)
    pair.context.stop()
    pair.generation.cancel(transfer=7)
    pair.release(pair.generation, "generation", timeout_s=5)
    used_bytes = pair.generation.stats()["staging_receive_used_bytes"]
    assert (used_bytes == 0) == (way == "staged-tcp")
    others.move(20, SOURCE, TARGET)
    pair.context.proceed()
    pair.context.open_gate(point=SENDING)
    wait_unused(pair.generation)
    pair.release(pair.context, "context")
    wait_unused(pair.context)
    pair.move(21, SOURCE, TARGET)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("point", [SENDING, RECEIVING])
def test_rooms_are_free_after_a_peer_was_killed(make_pair: Callable[..., Pair], way: str, point: str) -> None:
    """The end of the piece connection tells it at once, both ways."""
    pair = small(make_pair, way)
    dead, survivor = (pair.context, pair.generation) if point == SENDING else (pair.generation, pair.context)
    dead.close_gate(point=point)
    begin(pair)
    assert dead.reached(point=point)
    dead.kill()
    side = "generation" if survivor is pair.generation else "context"
    assert pair.settle(survivor, side, {7})["completed"] == []
    pair.release(survivor, side)
    wait_unused(survivor)
    fresh = small(make_pair, way, 2)
    if survivor is pair.context:
        fresh.context.kill()
        fresh.context = survivor
    else:
        fresh.generation.kill()
        fresh.generation = survivor
    fresh.move(8, SOURCE, TARGET)


def test_without_a_timeout_nothing_is_swept_and_a_cancel_ends_it(make_pair: Callable[..., Pair]) -> None:
    """§2b kv_transfer_timeout_ms: None means no sweeps at all."""
    pair = small(make_pair, "staged-memfd", kv_transfer_timeout_ms=None)
    pair.move(1, SOURCE, TARGET)
    pair.context.offer(transfer=2, pages=[1])
    assert pair.context.step(side="context")["overdue"] == pair.context.step(side="context")["timed_out"] == []
    assert pair.context.cancel(transfer=2)
    pair.release(pair.context, "context")


def test_runtimes_do_not_pair_and_both_are_named(make_pair: Callable[..., Pair]) -> None:
    """§2b transceiver_runtime: each server decides alone, and a difference is said."""
    pair = make_pair("memfd", generation={"transceiver": {"transceiver_runtime": "CPP"}})
    pair.generation.ask(transfer=1, handoff=pair.context.offer(transfer=1, pages=[1]), pages=[2])
    ((_, _status, code, message),) = pair.settle(pair.generation, "generation", {1})["failed"]
    assert code == "pairing_refused"
    assert "generation uses CPP/BUILTIN" in message
    assert "context uses BUILTIN" in message
    assert "transceiver_runtime" in message
    assert pair.settle(pair.context, "context", {1})["cancelled"] == [1]
