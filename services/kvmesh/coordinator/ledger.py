"""What both sides of every KV transfer said, within bounded memory; no I/O, time comes from outside.

A side's word is final once its state is ``completed``, ``failed`` or ``cancelled``. ``timed_out`` is not final: pages
stay pinned until the peer is quiescent, and the side says so by a last event. A transfer is finished when every side
that was heard of is final; one that is not and is past its deadline is *stuck*.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from heapq import nlargest
from typing import Literal, NamedTuple

import msgspec

from kvmesh.net.clock import Clock
from kvmesh.protocol.ranks import server_of
from kvmesh.protocol.transfer import (
    FINAL_STATES,
    LedgerEvent,
    TransferList,
    TransferRecord,
    TransferSide,
    TransferState,
)

__all__ = ["LedgerQuery", "LedgerStatistics", "TransferLedger"]

DEFAULT_MAX_TRANSFERS = 100_000
"""About 100 MB at the worst."""

STUCK_AFTER_MS = 120_000
"""For a side that gave no deadline: twice the default transfer timeout."""

MAX_SIDES = 8
"""Sides kept of one transfer (retries on other servers add some); the oldest final one makes room."""

_WORST_FIRST: tuple[TransferState, ...] = (
    "failed",
    "timed_out",
    "cancelled",
    "transferring",
    "registered",
    "completed",
)


class LedgerStatistics(NamedTuple):
    """Sizes now and counters since the start."""

    transfers: int
    open: int
    events_total: int
    late_total: int
    """Events that came after their side's final word and were dropped."""
    evicted_finished_total: int
    evicted_open_total: int


class LedgerQuery(NamedTuple):
    """Which transfers are asked for: those that all that is set applies to."""

    state: TransferState | None = None
    open: bool = False
    """Not finished."""
    stuck: bool = False
    """Not finished and past the deadline."""
    instance: str | None = None
    """A server that takes part."""
    request: str | None = None
    """Request id, or the beginning of one."""
    older_than_ms: int = 0
    """Age of an open transfer, time that a finished one took."""

    def matches(self, record: TransferRecord, age_ms: int) -> bool:
        """Whether a transfer is asked for; ``open`` and ``stuck`` are for the caller."""
        return (
            self.state in (None, record.state)
            and age_ms >= self.older_than_ms
            and (self.request is None or record.request_id.startswith(self.request))
            and (self.instance is None or any(server_of(side.instance_id) == self.instance for side in record.sides))
        )


class TransferLedger:
    """Transfers by id.

    Args:
        clock: its Unix time is compared with deadlines.
        max_transfers: memory bound; beyond it the oldest finished transfer is forgotten, or, when none is
            finished, the oldest of all.
    """

    def __init__(self, clock: Clock, *, max_transfers: int = DEFAULT_MAX_TRANSFERS) -> None:
        if max_transfers < 1:
            raise ValueError("max_transfers must be at least 1")
        self.on_touched: Callable[[int], None] = _ignored
        """Hears of every transfer that has changed or is forgotten."""
        self._clock = clock
        self._max_transfers = max_transfers
        # Two queues in order of their last change: what is open, and what may be forgotten first.
        self._open: OrderedDict[int, TransferRecord] = OrderedDict()
        self._finished: OrderedDict[int, TransferRecord] = OrderedDict()
        self._counts: Counter[TransferState] = Counter()
        self._events = self._late = self._evicted_finished = self._evicted_open = 0

    def record(self, events: Iterable[LedgerEvent]) -> None:
        """Take in what a side said. Repeated and late events change nothing."""
        for event in events:
            self._events += 1
            if not self._apply(event):
                self._late += 1
        self._evict()

    def member_gone(self, instance_id: str, epoch: int, kind: Literal["left", "dead"]) -> int:
        """Close the sides that a process left open, those of its attention data-parallel ranks included.

        Args:
            instance_id: the member.
            epoch: its life that is over, and with it every earlier one.
            kind: whether it said goodbye, which cancels what nobody had fetched, or died, which fails it.

        Returns:
            How many transfers it had open.
        """
        now_ms = self._now_ms
        orphaned = [
            (record, side)
            for record in self._open.values()
            for side in record.sides
            if server_of(side.instance_id) == instance_id and side.epoch <= epoch and side.state not in FINAL_STATES
        ]
        for record, side in orphaned:
            side.state, side.reason = (
                ("failed", f"{instance_id} died") if kind == "dead" else ("cancelled", f"{instance_id} left")
            )
            side.unix_ms = now_ms
            record.updated_unix_ms = now_ms
            self._settle(record)
        return len({record.transfer_id for record, _ in orphaned})

    def restore(self, record: TransferRecord) -> bool:
        """Take in an open transfer that was stored by an earlier coordinator.

        Returns:
            Whether it is news; what this ledger has heard of it itself counts more.
        """
        if record.transfer_id in self._open or record.transfer_id in self._finished or not record.sides:
            return False
        self._settle(record)
        self._evict()
        return True

    def open_transfer(self, transfer_id: int) -> TransferRecord | None:
        """A transfer that is not finished, as it is kept here: not to be changed."""
        return self._open.get(transfer_id)

    def open_ids(self) -> list[int]:
        """The transfers that are not finished."""
        return list(self._open)

    def forget_all(self) -> None:
        """Begin anew: another coordinator has taken over."""
        self._open.clear()
        self._finished.clear()
        self._counts.clear()

    def get(self, transfer_id: int) -> TransferRecord | None:
        """One transfer, or None when it was never heard of or is forgotten."""
        record = self._open.get(transfer_id) or self._finished.get(transfer_id)
        return None if record is None else self._view(record)

    def find(self, digits: str) -> list[int]:
        """The transfers that a person may mean: the one with this id, else all whose ids begin so."""
        if int(digits) in self._open or int(digits) in self._finished:
            return [int(digits)]
        return [number for queue in (self._open, self._finished) for number in queue if str(number).startswith(digits)]

    def query(self, wanted: LedgerQuery | None = None, *, limit: int = 100) -> TransferList:
        """Newest first, or with ``wanted.stuck`` oldest first.

        Args:
            wanted: which transfers; None: all.
            limit: at most so many.
        """
        wanted = wanted or LedgerQuery()
        now_ms = self._now_ms
        stuck_records = self._stuck()
        if wanted.stuck:
            chosen = [record for record in stuck_records if wanted.matches(record, record.age_at(now_ms))][:limit]
        else:
            queues = (self._open,) if wanted.open else (self._open, self._finished)
            every = (
                (record, now_ms if queue is self._open else record.updated_unix_ms)
                for queue in queues
                for record in queue.values()
            )
            matching = (record for record, end_ms in every if wanted.matches(record, record.age_at(end_ms)))
            chosen = nlargest(limit, matching, key=lambda record: record.started_unix_ms)
        return TransferList(
            transfers=[self._view(record) for record in chosen],
            counts={state: count for state, count in self._counts.items() if count},
            stuck=len(stuck_records),
            evicted=self._evicted_finished + self._evicted_open,
        )

    def statistics(self) -> LedgerStatistics:
        """See :class:`LedgerStatistics`."""
        return LedgerStatistics(
            transfers=len(self._open) + len(self._finished),
            open=len(self._open),
            events_total=self._events,
            late_total=self._late,
            evicted_finished_total=self._evicted_finished,
            evicted_open_total=self._evicted_open,
        )

    def _apply(self, event: LedgerEvent) -> bool:
        record = self._open.get(event.transfer_id) or self._finished.get(event.transfer_id)
        if record is None:
            record = TransferRecord(
                transfer_id=event.transfer_id,
                request_id=event.request_id,
                state=event.state,
                sides=[],
                started_unix_ms=event.unix_ms,
                updated_unix_ms=event.unix_ms,
            )
        side = next((s for s in record.sides if (s.side, s.instance_id) == (event.side, event.instance_id)), None)
        if side is None:
            side = TransferSide(
                side=event.side,
                instance_id=event.instance_id,
                epoch=event.epoch,
                state=event.state,
                unix_ms=event.unix_ms,
            )
            _make_room(record.sides)
            record.sides.append(side)
        elif event.epoch < side.epoch or (event.epoch == side.epoch and side.state in FINAL_STATES):
            return False
        _update(side, event)
        record.request_id = record.request_id or event.request_id
        record.started_unix_ms = min(record.started_unix_ms, event.unix_ms)
        record.updated_unix_ms = max(record.updated_unix_ms, event.unix_ms)
        self._settle(record)
        return True

    def _settle(self, record: TransferRecord) -> None:
        if self._open.pop(record.transfer_id, None) or self._finished.pop(record.transfer_id, None):
            self._counts[record.state] -= 1
        record.state = _state_of(record.sides)
        self._counts[record.state] += 1
        finished = all(side.state in FINAL_STATES for side in record.sides)
        (self._finished if finished else self._open)[record.transfer_id] = record
        self.on_touched(record.transfer_id)

    def _evict(self) -> None:
        while len(self._open) + len(self._finished) > self._max_transfers:
            if self._finished:
                _, record = self._finished.popitem(last=False)
                self._evicted_finished += 1
            else:
                _, record = self._open.popitem(last=False)
                self._evicted_open += 1
                self.on_touched(record.transfer_id)
            self._counts[record.state] -= 1

    def _stuck(self) -> list[TransferRecord]:
        now_ms = self._now_ms
        stuck = [record for record in self._open.values() if _is_stuck(record, now_ms)]
        return sorted(stuck, key=lambda record: record.started_unix_ms)

    def _view(self, record: TransferRecord) -> TransferRecord:
        open_ = record.transfer_id in self._open
        end_ms = self._now_ms if open_ else record.updated_unix_ms
        return msgspec.structs.replace(
            record,
            sides=[msgspec.structs.replace(side) for side in record.sides],
            age_ms=record.age_at(end_ms),
            stuck=open_ and _is_stuck(record, self._now_ms),
        )

    @property
    def _now_ms(self) -> int:
        return self._clock.unix_ns() // 1_000_000


def _ignored(_transfer_id: int) -> None:
    """Nobody wants to know."""


def _update(side: TransferSide, event: LedgerEvent) -> None:
    side.epoch = event.epoch
    side.state = event.state
    side.unix_ms = event.unix_ms
    # Later events need not repeat what an earlier one said.
    side.num_tokens = event.num_tokens or side.num_tokens
    side.num_pages = event.num_pages or side.num_pages
    side.num_bytes = event.num_bytes or side.num_bytes
    side.deadline_unix_ms = event.deadline_unix_ms or side.deadline_unix_ms
    side.reason = event.reason or side.reason


def _make_room(sides: list[TransferSide]) -> None:
    if len(sides) >= MAX_SIDES:
        sides.remove(next((side for side in sides if side.state in FINAL_STATES), sides[0]))


def _state_of(sides: list[TransferSide]) -> TransferState:
    """The worst state among the context side and the latest generation side (earlier ones were retried)."""
    latest = {side.side: side for side in sides}
    return min((side.state for side in latest.values()), key=_WORST_FIRST.index)


def _is_stuck(record: TransferRecord, now_ms: int) -> bool:
    return any(
        now_ms > (side.deadline_unix_ms or side.unix_ms + STUCK_AFTER_MS)
        for side in record.sides
        if side.state not in FINAL_STATES
    )
