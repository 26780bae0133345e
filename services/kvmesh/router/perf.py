"""``/perf_metrics``: what router and workers recorded of finished requests, joined and drained."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

from kvmesh.router.explain import Explanation

__all__ = ["PerfRecords"]

MAX_RECORDS = 1000
"""Finished sequences kept until somebody drains them."""

_LEGS = {"context": "ctx_perf_metrics", "generation": "gen_perf_metrics", "aggregated": "perf_metrics"}


class PerfRecords:
    """Records of finished sequences, and the workers' records that still wait for theirs."""

    def __init__(self, max_records: int = MAX_RECORDS) -> None:
        self._max_records = max_records
        self._ended: deque[dict[str, Any]] = deque(maxlen=max_records)
        self._workers: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def ended(self, explanation: Explanation) -> None:
        """A request is over."""
        single = len(explanation.sequences) == 1
        for sequence in explanation.sequences:
            last = sequence.attempts[-1] if sequence.attempts else None
            self._ended.append(
                {
                    "request_id": explanation.request_id if single else f"{explanation.request_id}-{sequence.index}",
                    "disagg_request_id": last.transfer_id if last else None,
                    "outcome": last.outcome if last else explanation.outcome,
                    "ctx_server": last.context.chosen if last and last.context else None,
                    "gen_server": last.generation.chosen if last and last.generation else None,
                    "received_unix_ms": explanation.received_unix_ms,
                    "queue_ms": explanation.queue_ms,
                    "tokenize_ms": explanation.tokenize_ms,
                    "match_ms": explanation.match_ms,
                    "first_byte_ms": explanation.first_byte_ms,
                    "total_ms": explanation.total_ms,
                }
            )

    def heard(self, records: list[dict[str, Any]]) -> None:
        """A worker's drained records; kept until their request is over, the oldest forgotten first."""
        for record in records:
            leg = _LEGS.get(str(record.get("kind")))
            request_id = record.get("request_id")
            if leg is not None and isinstance(request_id, str):
                self._workers.setdefault(request_id, {})[leg] = record
                self._workers.move_to_end(request_id)
        while len(self._workers) > self._max_records:
            self._workers.popitem(last=False)

    def drain(self) -> list[dict[str, Any]]:
        """The finished sequences since the last call, each with what its workers recorded."""
        joined = [{**record, **self._workers.pop(record["request_id"], {})} for record in self._ended]
        self._ended.clear()
        return joined
