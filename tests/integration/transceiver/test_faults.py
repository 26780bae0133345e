"""Processes that are killed or stopped at named points: every wait is bounded and no page is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

Pair = Any
"""tests/integration/transceiver/conftest.py"""

WAYS = ["memfd", "tcp", "nixl", "staged-memfd", "staged-tcp", "staged-nixl"]
SOURCE, TARGET = list(range(10, 50)), list(range(50, 90))
DURING = "transceiver.during_transfer"


def begin(pair: Pair, transfer: int = 7) -> None:
    handoff = pair.context.offer(transfer=transfer, pages=SOURCE)
    pair.generation.ask(transfer=transfer, handoff=handoff, pages=TARGET)


def mover(pair: Pair) -> Any:
    """The process that moves the bytes."""
    return pair.context if pair.way == "nixl" else pair.generation


def watcher(pair: Pair) -> Any:
    """The other one."""
    return pair.generation if pair.way == "nixl" else pair.context


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("point", ["before_send", "during_transfer", "before_ack"])
def test_the_receiver_is_killed(make_pair: Callable[..., Pair], way: str, point: str) -> None:
    pair = make_pair(way)
    where = {"before_send": pair.context, "during_transfer": mover(pair), "before_ack": pair.generation}[point]
    where.close_gate(point=f"transceiver.{point}")
    begin(pair)
    assert where.reached(point=f"transceiver.{point}")
    pair.generation.kill()
    if where is pair.context:
        pair.context.open_gate(point=f"transceiver.{point}")
    # Nobody tells the owner: it sees the process die by itself.
    ended = pair.settle(pair.context, "context", {7})
    assert ended["completed"] == []
    pair.release(pair.context, "context")
    assert pair.context.stats()["quarantined_pages"] == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("point", ["before_send", "during_transfer", "before_ack"])
def test_the_owner_is_killed(make_pair: Callable[..., Pair], way: str, point: str) -> None:
    pair = make_pair(way)
    where = {"before_send": pair.context, "during_transfer": mover(pair), "before_ack": pair.generation}[point]
    where.close_gate(point=f"transceiver.{point}")
    begin(pair)
    assert where.reached(point=f"transceiver.{point}")
    expected = pair.context.digest(pages=SOURCE) if where is not pair.context else ""
    pair.context.kill()
    if where is pair.generation:
        pair.generation.open_gate(point=f"transceiver.{point}")
    ended = pair.settle(pair.generation, "generation", {7})
    if ended["completed"]:
        # All that it needed was mapped, or had arrived.
        assert pair.generation.digest(pages=TARGET) == expected
    else:
        ((_, status, _code, _message),) = ended["failed"]
        assert status in (502, 503)
    pair.release(pair.generation, "generation")


@pytest.mark.parametrize("way", WAYS)
def test_a_killed_owner_is_replaced_by_a_new_one(make_pair: Callable[..., Pair], way: str) -> None:
    pair = make_pair(way)
    pair.move(1, [1, 2], [3, 4])
    pair.context.kill()
    fresh = make_pair(way, context={"called": "context-2"})
    fresh.generation.kill()
    fresh.generation = pair.generation
    fresh.move(2, [5, 6], [7, 8])


@pytest.mark.parametrize("way", WAYS)
def test_a_stopped_owner_does_not_hold_up_its_receiver(make_pair: Callable[..., Pair], way: str) -> None:
    pair = make_pair(way, timeout_ms=500)
    pair.move(1, [1], [2])
    handoff = pair.context.offer(transfer=7, pages=SOURCE)
    pair.context.stop()
    start_s = time.monotonic()
    pair.generation.ask(transfer=7, handoff=handoff, pages=TARGET)
    ended = pair.settle(pair.generation, "generation", {7})
    assert ended["overdue"] == [7]
    assert ended["cancelled"] == [7]
    assert time.monotonic() - start_s < 10
    if way == "nixl":
        # It might still write: its target pages are not reused until it says that it will not.
        assert pair.generation.held() == [7]
        assert not pair.generation.cancel(transfer=7)
        assert pair.generation.stats()["quarantined_pages"] == len(TARGET)
    else:
        assert pair.generation.held() == []
    pair.context.proceed()
    pair.release(pair.generation, "generation")
    pair.release(pair.context, "context")
    pair.move(8, [5, 6], [7, 8])


def test_a_stopped_writer_that_dies_frees_the_quarantine(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("nixl", timeout_ms=300)
    pair.move(1, [1], [2])
    handoff = pair.context.offer(transfer=7, pages=SOURCE)
    pair.context.stop()
    pair.generation.ask(transfer=7, handoff=handoff, pages=TARGET)
    pair.settle(pair.generation, "generation", {7})
    assert pair.generation.held() == [7]
    pair.context.kill()
    pair.release(pair.generation, "generation")
    assert pair.generation.stats()["quarantined_pages"] == 0


@pytest.mark.parametrize("ending", ["continues", "dies"])
def test_a_stopped_writer_that_is_taken_for_dead_gets_no_page_back(make_pair: Callable[..., Pair], ending: str) -> None:
    """Its lease has run out, yet it may go on: its target pages belong to nobody until it says that it does not."""
    pair = make_pair("nixl")
    pair.move(1, [1], [2])
    handoff = pair.context.offer(transfer=7, pages=SOURCE)
    pair.context.stop()
    pair.generation.ask(transfer=7, handoff=handoff, pages=TARGET)
    pair.generation.dead(instance="context")
    ((_, status, code, _),) = pair.settle(pair.generation, "generation", {7})["failed"]
    assert (status, code) == (503, "peer_dead")
    for _ in range(20):
        pair.generation.step(side="generation")
    assert pair.generation.held() == [7]
    assert pair.generation.stats()["quarantined_pages"] == len(TARGET)
    if ending == "continues":
        pair.context.proceed()
    else:
        pair.context.kill()
    pair.release(pair.generation, "generation")
    assert pair.generation.stats()["quarantined_pages"] == 0


@pytest.mark.parametrize("way", ["memfd", "tcp", "staged-memfd", "staged-tcp"])
def test_a_stopped_reader_that_is_taken_for_dead_gets_nobody_elses_pages(
    make_pair: Callable[..., Pair], way: str
) -> None:
    """Its lease has run out, the owner's pages belong to another request, and it goes on; no checksum tells."""
    pair = make_pair(way, checksums=False)
    pair.generation.close_gate(point=DURING)
    wanted = pair.context.digest(pages=SOURCE)
    begin(pair)
    assert pair.generation.reached(point=DURING)
    pair.context.dead(instance="generation")
    pair.release(pair.context, "context")
    pair.context.fill(seed=99)
    assert pair.context.digest(pages=SOURCE) != wanted
    pair.generation.open_gate(point=DURING)
    ended = pair.settle(pair.generation, "generation", {7})
    if ended["completed"]:
        assert way == "tcp", "all of it lay in the sockets before"
        assert pair.generation.digest(pages=TARGET) == wanted
    else:
        assert ended["failed"][0][2] in ("transfer_failed", "peer_lost", "peer_dead")
    pair.release(pair.generation, "generation")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ending", ["continues", "dies"])
def test_a_stopped_receiver_keeps_the_owners_pages_pinned(
    make_pair: Callable[..., Pair], way: str, ending: str
) -> None:
    pair = make_pair(way, timeout_ms=500)
    mover(pair).close_gate(point=DURING)
    begin(pair)
    assert mover(pair).reached(point=DURING)
    pair.generation.stop()
    if mover(pair) is pair.context:
        pair.context.open_gate(point=DURING)
    deadline_s = time.monotonic() + 20
    overdue: list[int] = []
    while not overdue:
        overdue = pair.context.step(side="context")["overdue"]
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    drained = pair.context.cancel(transfer=7)
    if way != "nixl":
        # The reader has not said that it stopped.
        for _ in range(5):
            assert not pair.context.cancel(transfer=7)
            pair.context.step(side="context")
        assert pair.context.held() == [7]
        assert not drained
    if ending == "dies":
        pair.generation.kill()
    else:
        pair.generation.proceed()
        if mover(pair) is pair.generation:
            pair.generation.open_gate(point=DURING)
    pair.release(pair.context, "context")
    if ending == "continues":
        pair.release(pair.generation, "generation")
        pair.move(8, [5, 6], [7, 8])


@pytest.mark.parametrize("way", WAYS)
def test_a_cancel_in_mid_transfer_waits_for_the_mover(make_pair: Callable[..., Pair], way: str) -> None:
    pair = make_pair(way)
    mover(pair).close_gate(point=DURING)
    begin(pair)
    assert mover(pair).reached(point=DURING)
    assert not pair.generation.cancel(transfer=7)
    assert pair.generation.step(side="generation")["cancelled"] == [7]
    assert pair.generation.held() == [7]
    assert pair.context.held() == [7]
    mover(pair).open_gate(point=DURING)
    pair.release(pair.generation, "generation")
    pair.release(pair.context, "context")
    pair.move(8, [5, 6], [7, 8])


@pytest.mark.parametrize("way", WAYS)
def test_a_stopped_receiver_does_not_hold_up_others(make_pair: Callable[..., Pair], way: str) -> None:
    pair = make_pair(way)
    others = make_pair(way, generation={"called": "generation-2"})
    others.context.kill()
    others.context = pair.context
    mover(pair).close_gate(point=DURING)
    begin(pair)
    assert mover(pair).reached(point=DURING)
    pair.generation.stop()
    if mover(pair) is pair.context:
        pair.context.open_gate(point=DURING)
    others.move(20, [1, 2, 3], [4, 5, 6])
    pair.generation.proceed()


def test_a_dead_address_fails_at_once(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("memfd")
    handoff = pair.context.offer(transfer=7, pages=SOURCE)
    pair.context.kill()
    start_s = time.monotonic()
    pair.generation.ask(transfer=7, handoff=handoff, pages=TARGET)
    ((_, status, code, _),) = pair.settle(pair.generation, "generation", {7})["failed"]
    assert (status, code) == (503, "peer_unreachable")
    assert time.monotonic() - start_s < 5
    assert pair.generation.held() == []
