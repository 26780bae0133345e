"""What each number of a router's ``statistics()`` is, for the ``# HELP`` lines of ``/metrics``."""

from __future__ import annotations

__all__ = ["TEXTS"]

TEXTS = {
    "in_flight": "Requests in the service, as HTTP has them",
    "inflight_requests": "Requests admitted and not answered to the end",
    "queued_requests": "Requests that wait for a place",
    "rejected_requests_total": "Requests answered 429 because as many wait as may",
    "ready": "1 while there are servers enough to answer requests",
    "context_servers": "Usable context servers",
    "generation_servers": "Usable generation servers",
    "aggregated_servers": "Usable servers that do whole requests",
    "unusable_servers": "Servers that are known and not used; GET /cluster_info says why",
    "breaker_opened_total": "Times that a server was taken out after failures in a row",
    "sequences_disaggregated_total": "Sequences begun with prefill and decode on two servers",
    "sequences_local_total": "Sequences that a generation server was to prefill, too",
    "sequences_aggregated_total": "Sequences begun on a server of both roles",
    "sequences_prefill_only_total": "Disaggregated sequences that ended with the first token",
    "sequences_generation_first_total": "Disaggregated sequences whose both legs ran at once",
    "aborted_hand_offs_total": "Finished prompts whose pages nobody was to fetch any more",
    "retries_total": "Further tries at another server",
    "prompt_cache_hits_total": "Prompts that had been tokenised before",
    "prompt_cache_misses_total": "Prompts that were tokenised",
    "match_answered_total": "Questions to the indexer that were answered in time",
    "match_timed_out_total": "Questions to the indexer without an answer in time",
    "match_unreachable_total": "Questions that could not be sent to the indexer",
    "match_resting_total": "Questions not asked because the indexer had failed just before",
    "routed_told_total": "Prompts whose server the indexer was told",
    "routed_lost_total": "Prompts whose server the indexer could not be told",
    "predicted_blocks": "Blocks that servers are expected to hold since prompts went there",
    "coordinator_connected": "1 while the coordinator answers",
    "coordinator_losses_total": "Times that the coordinator was lost",
    "members": "Members of the mesh as this router knows them",
    "ledger_queued": "Entries that wait to be sent to the coordinator's ledger",
    "ledger_dropped_total": "Entries of the ledger that were lost",
}
