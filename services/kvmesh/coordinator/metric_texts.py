"""What each number of a coordinator's ``statistics()`` is, for the ``# HELP`` lines of ``/metrics``."""

from __future__ import annotations

__all__ = ["TEXTS"]

TEXTS = {
    "members": "Members that live",
    "watchers": "Requests that wait for changes of the membership",
    "revision": "Changes of the membership in this life of the coordinator",
    "members_joined_total": "Members that registered, or were found",
    "members_left_total": "Members that said goodbye, or are named by no source any more",
    "members_dead_total": "Members whose lease ended, or that a later life replaced",
    "members_fenced_total": "Calls refused because a newer process has that id",
    "ledger_transfers": "Transfers remembered",
    "ledger_open": "Transfers remembered that are not finished",
    "ledger_events_total": "Ledger events taken in",
    "ledger_late_total": "Ledger events that changed nothing: repeated, or late",
    "ledger_evicted_finished_total": "Finished transfers forgotten for want of room",
    "ledger_evicted_open_total": "Open transfers forgotten for want of room",
    "storage_keys": "Keys of TensorRT-LLM's cluster storage",
    "storage_watches": "Open watches of the cluster storage",
    "leading": "1 while no other coordinator can lead",
    "takeovers_total": "Times that this coordinator took the lead",
    "etcd_connected": "1 while etcd answers",
    "etcd_losses_total": "Times that etcd was lost",
    "etcd_keys": "Keys that the coordinator keeps in etcd",
    "etcd_pending": "Keys that may have to be written to etcd",
    "etcd_writes_total": "Changes written to etcd",
    "discovery_addresses": "Addresses that sources of servers name",
    "discovery_members": "Members at those addresses",
    "discovery_asked_total": "Questions to servers at those addresses",
    "discovery_silent_total": "Questions without an answer",
    "discovery_rejected_total": "Answers of servers that do not fit; GET /discovery says why",
    "discovery_found_total": "Servers that became members by being found",
    "discovery_left_total": "Found members that are named no more",
    "discovery_source_errors_total": "Look-ups, lists and watches that failed",
    "discovery_defects_total": "Defects of a source; the log has the traceback",
}
