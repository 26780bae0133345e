from __future__ import annotations

import pytest

from kvmesh.coordinator.ledger import STUCK_AFTER_MS, LedgerQuery, TransferLedger
from kvmesh.net.clock import ManualClock
from kvmesh.protocol.transfer import LedgerEvent

START_MS = 1_700_000_000_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def ledger(clock: ManualClock) -> TransferLedger:
    return TransferLedger(clock, max_transfers=4)


def event(transfer_id: int, side: str, state: str, at_ms: int = 0, **fields: object) -> LedgerEvent:
    return LedgerEvent(
        **{
            "transfer_id": transfer_id,
            "side": side,
            "instance_id": f"{side}-0",
            "epoch": 1,
            "state": state,
            "unix_ms": START_MS + at_ms,
            **fields,
        }
    )


def test_both_sides_of_a_transfer(clock, ledger):
    ledger.record([event(7, "context", "registered", request_id="r", num_tokens=100, num_pages=4)])
    assert ledger.get(7).state == "registered"
    ledger.record(
        [
            event(7, "generation", "registered", 2),
            event(7, "context", "transferring", 3),
            event(7, "generation", "transferring", 4),
        ]
    )
    assert ledger.get(7).state == "transferring"
    ledger.record([event(7, "generation", "completed", 9, num_bytes=4096)])
    assert ledger.get(7).state == "transferring", "the context side holds pages still"
    ledger.record([event(7, "context", "completed", 10)])
    record = ledger.get(7)
    assert (record.state, record.request_id, record.age_ms, record.stuck) == ("completed", "r", 10, False)
    context, generation = record.sides
    assert (context.num_tokens, context.num_pages) == (100, 4), "later events need not repeat"
    assert generation.num_bytes == 4096
    assert ledger.query().counts == {"completed": 1}


def test_final_words_are_final(ledger):
    ledger.record([event(7, "context", "failed", 5, reason="no route"), event(7, "context", "transferring", 4)])
    assert ledger.get(7).state == "failed"
    assert ledger.statistics().late_total == 1
    ledger.record([event(7, "context", "registered", 6, epoch=2)])
    assert ledger.get(7).state == "registered", "a newer epoch is another life"


def test_timed_out_is_not_the_end(ledger):
    ledger.record([event(7, "context", "timed_out", 5)])
    assert ledger.statistics().open == 1
    ledger.record([event(7, "context", "cancelled", 9)])
    assert ledger.get(7).state == "cancelled"
    assert ledger.statistics().open == 0


def test_a_retry_on_another_generation_server_counts(ledger):
    ledger.record(
        [
            event(7, "context", "registered"),
            event(7, "generation", "failed", 1),
            event(7, "generation", "completed", 5, instance_id="generation-1"),
            event(7, "context", "completed", 6),
        ]
    )
    record = ledger.get(7)
    assert record.state == "completed"
    assert len(record.sides) == 3


def test_stuck_transfers_by_age(clock, ledger):
    ledger.record(
        [
            event(1, "context", "transferring", 100, deadline_unix_ms=START_MS + 5_000),
            event(2, "context", "registered", 0),
            event(3, "context", "completed", 0, deadline_unix_ms=START_MS + 1),
        ]
    )
    assert ledger.query(LedgerQuery(stuck=True)).transfers == []
    clock.advance(6)
    assert [r.transfer_id for r in ledger.query(LedgerQuery(stuck=True)).transfers] == [1]
    clock.advance(STUCK_AFTER_MS / 1000)
    stuck = ledger.query(LedgerQuery(stuck=True))
    assert [r.transfer_id for r in stuck.transfers] == [2, 1], "oldest first"
    assert stuck.stuck == 2
    assert all(r.stuck for r in stuck.transfers)
    assert [r.transfer_id for r in ledger.query(LedgerQuery(stuck=True, state="registered")).transfers] == [2]


def test_a_dead_member_leaves_nothing_open(clock, ledger):
    ledger.record(
        [
            event(1, "context", "transferring"),
            event(1, "generation", "transferring"),
            event(2, "context", "registered", epoch=2),
            event(3, "context", "completed"),
        ]
    )
    clock.advance(1)
    assert ledger.member_gone("context-0", 1, "dead") == 1
    record = ledger.get(1)
    assert record.state == "failed"
    assert record.sides[0].reason == "context-0 died"
    assert ledger.statistics().open == 2, "the other side, and the newer epoch, have not spoken"
    assert ledger.get(3).state == "completed"


def test_a_member_that_left_leaves_nothing_open(ledger):
    ledger.record([event(1, "context", "registered"), event(2, "context", "completed")])
    assert ledger.member_gone("context-0", 1, "left") == 1
    record = ledger.get(1)
    assert (record.state, record.sides[0].reason) == ("cancelled", "context-0 left")
    assert ledger.get(2).state == "completed"
    assert ledger.statistics().open == 0


def test_memory_is_bounded_and_the_oldest_finished_goes_first(ledger):
    ledger.record([event(n, "context", "completed" if n in (2, 3) else "registered", n) for n in range(1, 5)])
    ledger.record([event(5, "context", "registered", 5)])
    assert ledger.get(2) is None
    ledger.record([event(6, "context", "registered", 6), event(7, "context", "registered", 7)])
    assert ledger.get(3) is None
    assert ledger.get(1) is None, "nothing finished is left: the oldest goes"
    statistics = ledger.statistics()
    assert (statistics.transfers, statistics.evicted_finished_total, statistics.evicted_open_total) == (4, 2, 1)
    assert ledger.query().counts == {"registered": 4}


def test_many_sides_are_bounded(ledger):
    ledger.record([event(1, "generation", "failed", n, instance_id=f"generation-{n}") for n in range(20)])
    assert len(ledger.get(1).sides) == 8
    assert ledger.get(1).sides[-1].instance_id == "generation-19"


def test_newest_first_and_limited(ledger):
    ledger.record([event(n, "context", "registered", n) for n in (3, 1, 2)])
    assert [r.transfer_id for r in ledger.query().transfers] == [3, 2, 1]
    assert [r.transfer_id for r in ledger.query(limit=1).transfers] == [3]
    assert ledger.query(LedgerQuery(state="completed")).transfers == []


def test_a_view_is_a_copy(ledger):
    ledger.record([event(1, "context", "registered")])
    ledger.get(1).sides[0].state = "failed"
    assert ledger.get(1).sides[0].state == "registered"


def test_with_a_server_all_its_ranks_die(ledger):
    ledger.record(
        [
            event(7, "context", "registered", instance_id="ctx/0"),
            event(8, "context", "registered", instance_id="ctx/1"),
            event(9, "context", "registered", instance_id="ctx-1"),
        ]
    )
    assert ledger.member_gone("ctx", 1, "dead") == 2
    assert [ledger.get(number).state for number in (7, 8, 9)] == ["failed", "failed", "registered"]


def test_what_is_searched_for(clock):
    ledger = TransferLedger(clock)
    ledger.record([event(1, "context", "registered", request_id="alpha-1", instance_id="context-1")])
    ledger.record(
        [event(2, "context", "completed", 300, request_id="alpha-2"), event(2, "generation", "completed", 900)]
    )
    ledger.record([event(3, "context", "registered", request_id="beta", deadline_unix_ms=START_MS + 500)])
    clock.advance(1.0)

    def found(**wanted: object) -> list[int]:
        return sorted(record.transfer_id for record in ledger.query(LedgerQuery(**wanted)).transfers)

    assert found() == [1, 2, 3]
    assert found(open=True) == [1, 3]
    assert found(stuck=True) == [3]
    assert found(instance="context-1") == [1]
    assert found(instance="generation-0") == [2]
    assert found(instance="context") == []
    assert found(request="alpha") == [1, 2]
    assert found(older_than_ms=700) == [1, 3], "a finished one took 600 ms, however long ago"
    assert found(older_than_ms=600) == [1, 2, 3]
    assert found(state="registered", request="beta", open=True) == [3]
