"""What a front knows of its context legs: who reads their pages, and which are left over by a router that is gone."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from kvmesh.protocol.transfer import LedgerEvent, TransferState
from kvmesh.worker.context_legs import MAX_LEGS, ContextLegs
from kvmesh.worker.readers import MAX_TOLD


def event(transfer_id: int, state: TransferState, side: str = "context", **fields: Any) -> LedgerEvent:
    return LedgerEvent(
        transfer_id=transfer_id, side=side, instance_id="context-0", epoch=1, state=state, **{"unix_ms": 1000, **fields}
    )


@pytest.fixture
def legs() -> ContextLegs:
    legs = ContextLegs()
    for transfer_id in (1, 2, 3, 4):
        legs.remember(transfer_id, f"request-{transfer_id}", "router-a" if transfer_id < 4 else "router-b")
    legs.note([event(transfer_id, "registered", num_tokens=10) for transfer_id in (1, 2, 4)])
    return legs


def test_orphans_are_what_nobody_has_come_for_also_what_still_runs(legs):
    legs.note([event(2, "transferring", peer_instance_id="generation-0", num_pages=3)])
    assert legs.take_orphans("router-a") == ["request-1", "request-3"]
    assert legs.take_orphans("router-a") == []
    assert legs.take(2) == "request-2"
    assert legs.take(4) == "request-4", "another router's stay"


def test_what_has_ended_is_not_given_up(legs):
    legs.note([event(1, "completed"), event(2, "failed", side="generation")])
    assert legs.take(1) is None
    assert legs.take(2) == "request-2", "the other side's word is none about these pages"


def test_legs_are_bounded(legs):
    for transfer_id in range(10, 10 + MAX_LEGS):
        legs.remember(transfer_id, "r", None)
    assert legs.take(4) is None
    assert legs.take(10) == "r"


def test_who_is_waited_for_is_told(legs):
    assert legs.transfers.describe(4000) == (
        "waits until 3 prompts (30 tokens, 0 pages asked for) are read: 3 by nobody yet; oldest 1, 3.0 s"
    )
    legs.note([event(2, "transferring", peer_instance_id="generation-0", num_pages=3, unix_ms=2000)])
    legs.note([event(1, "cancelled")])
    assert legs.transfers.describe(4000) == (
        "waits until 2 prompts (20 tokens, 3 pages asked for) are read: 1 by generation-0, 1 by nobody yet; "
        "oldest 2, 3.0 s"
    )
    told = {"transfer_id": 2, "reader": "generation-0", "tokens": 10, "pages": 3, "age_s": 3.0}
    assert legs.transfers.list(4000)[0] == told
    legs.note([event(2, "timed_out")])
    assert len(legs.transfers) == 2, "its pages are still held"
    legs.note([event(number, "registered") for number in range(100)])
    assert len(legs.transfers.list(4000)) == MAX_TOLD


async def test_the_last_reader_ends_the_wait(legs):
    transfers = legs.transfers
    with anyio.move_on_after(0.01) as scope:
        await transfers.finished()
    assert scope.cancelled_caught
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(transfers.finished)
        await anyio.wait_all_tasks_blocked()
        legs.note([event(transfer_id, "completed") for transfer_id in (1, 2, 4)])
    assert transfers.describe(4000) == ""
    await transfers.finished()
