"""The gauges and counters of a transceiver, gathered from its two sides."""

from __future__ import annotations

from kvmesh.transceiver.bounce import BounceRegions
from kvmesh.transceiver.receiver import ReceiverSide
from kvmesh.transceiver.sender import SenderSide
from kvmesh.transceiver.types import StagingStats, TransceiverStats

__all__ = ["collect_pins", "collect_stats"]


def collect_stats(
    sender: SenderSide,
    receiver: ReceiverSide,
    *,
    staging: StagingStats,
    bounce: BounceRegions | None,
    dropped_messages: int,
    isolated_errors: int,
    ledger_dropped: int,
) -> TransceiverStats:
    """What both sides say, and what only their transceiver knows.

    Args:
        sender: the context side.
        receiver: the generation side.
        staging: of the staging or bounce regions.
        bounce: the bounce regions, if there are any.
        dropped_messages: control messages that were not sent, or not understood.
        isolated_errors: since this transceiver began.
        ledger_dropped: ledger entries that nobody has drained.
    """
    sent, received = sender.table, receiver.table
    return TransceiverStats(
        send_sessions=len(sent.open),
        receive_sessions=len(received.open),
        quarantined_pages=sent.quarantine.pages + received.quarantine.pages,
        links=len(receiver.links) + len(sender.receivers),
        started_total=sent.counters.started + received.counters.started,
        completed_total=sent.counters.completed + received.counters.completed,
        failed_total=sent.counters.failed + received.counters.failed,
        cancelled_total=sent.counters.cancelled + received.counters.cancelled,
        timed_out_total=sent.counters.timed_out + received.counters.timed_out,
        refused_total=sent.counters.refused + received.counters.refused,
        dropped_messages_total=dropped_messages + sent.counters.dropped + received.counters.dropped,
        isolated_errors_total=isolated_errors,
        ledger_dropped_total=ledger_dropped,
        bytes_moved_total=sent.counters.nbytes + received.counters.nbytes,
        pages_moved_total=sent.counters.pages + received.counters.pages,
        pages_reused_total=received.counters.pages_reused,
        borrowed_total=receiver.borrowing.borrowed_total,
        staging_capacity_bytes=staging.capacity_bytes,
        staging_send_used_bytes=staging.send_used_bytes,
        staging_receive_used_bytes=staging.receive_used_bytes,
        staging_send_waiting=staging.send_waiting,
        staging_receive_waiting=staging.receive_waiting,
        bounced_total=0 if bounce is None else bounce.bounced_total,
        bounce_fallbacks={} if bounce is None else bounce.told_fallbacks(),
        bounce_orphaned_bytes=sum(one.run.where.nbytes for one in received.quarantine if one.run is not None),
    )


def collect_pins(sender: SenderSide, receiver: ReceiverSide) -> list[tuple[float, int]]:
    """Of every open transfer, the monotonic time at which it began, and how many pages it pins here."""
    with sender.table.lock:
        sent = [(one.started_s, [len(held.ids) for held in one.held]) for one in sender.table.open.values()]
    with receiver.table.lock:
        received = [(one.started_s, list(map(len, one.local))) for one in receiver.table.open.values()]
    return [(started_s, sum(pages)) for started_s, pages in [*sent, *received]]
