"""What a worker measures of each request: latency histograms, spans and the drained ``/perf_metrics`` records."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from opentelemetry.context import Context
from prometheus_client import Counter, Histogram

from kvmesh.protocol.engine import RequestTimings
from kvmesh.telemetry import exemplars
from kvmesh.telemetry.metrics import LATENCY_BUCKETS_S, Metrics
from kvmesh.telemetry.tracing import Tracing
from kvmesh.worker.plans import Plan, PlannedSequence
from kvmesh.worker.runs import Delta

__all__ = ["Observations"]

MAX_RECORDS = 1000
"""Finished requests kept for ``/perf_metrics`` until somebody drains them."""
_TOKEN_BUCKETS = (1, 8, 32, 128, 512, 2048, 8192, 32768)


class Observations:
    """Feeds histograms as tokens come, and spans and records when a request ends."""

    def __init__(self, metrics: Metrics, tracing: Tracing) -> None:
        registry = metrics.registry
        self._tracing = tracing
        self._records: deque[dict[str, Any]] = deque(maxlen=MAX_RECORDS)
        self._last_token_s: dict[str, float] = {}
        self._ttft = Histogram(
            "kvmesh_time_to_first_token_seconds",
            "From a request's arrival at this worker to its first token",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._itl = Histogram(
            "kvmesh_inter_token_latency_seconds",
            "Between two tokens of a sequence",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._first_slice = Histogram(
            "kvmesh_transfer_first_slice_seconds",
            "From asking for a prompt's pages to the first slice of them",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._prompt = Histogram(
            "kvmesh_prompt_tokens", "Prompt length of a sequence", buckets=_TOKEN_BUCKETS, registry=registry
        )
        self._finished = Counter(
            "kvmesh_sequences_total", "Sequences that ended", ["kind", "finish_reason"], registry=registry
        )

    def began(self, plan: Plan) -> None:
        """A request was accepted."""
        now_s = time.perf_counter()
        for sequence in plan.sequences:
            self._prompt.observe(sequence.run.prompt_tokens)
            self._last_token_s[sequence.run.request.request_id] = now_s

    def delta(self, sequence: PlannedSequence, delta: Delta) -> None:
        """A sequence grew."""
        key = sequence.run.request.request_id
        now_s = time.perf_counter()
        since_s = now_s - self._last_token_s[key]
        self._last_token_s[key] = now_s
        if sequence.run.completion_tokens == len(delta.token_ids):
            self._ttft.observe(since_s, exemplars.current())
        elif delta.token_ids:
            self._itl.observe(since_s / len(delta.token_ids))
        if delta.finish_reason is not None:
            self._finished.labels(sequence.run.request.kind, delta.finish_reason).inc()

    def ended(self, plan: Plan, context: Context) -> None:
        """A request is over, well or not: its spans are recorded below ``context``."""
        for sequence in plan.sequences:
            run = sequence.run
            self._last_token_s.pop(run.request.request_id, None)
            if run.timings is not None:
                if run.timings.first_slice_s:
                    self._first_slice.observe(run.timings.first_slice_s)
                self._spans(run.timings, context)
                self._records.append(_record(plan, sequence, run.timings))

    def drain_records(self) -> list[dict[str, Any]]:
        """Records of finished sequences since the last call, oldest first."""
        records = list(self._records)
        self._records.clear()
        return records

    def _spans(self, timings: RequestTimings, context: Context) -> None:
        record = self._tracing.record
        record("queue", context, timings.arrived_ns, timings.scheduled_ns)
        if timings.transfer_start_ns:
            transfer = record(
                "transfer",
                context,
                timings.transfer_start_ns,
                timings.transfer_end_ns,
                bytes=timings.transfer_bytes,
                pages=timings.transfer_pages,
            )
            for start_ns, end_ns in zip(timings.slices[::2], timings.slices[1::2], strict=True):
                record("slice", transfer, start_ns, end_ns)
            record("decode", context, timings.transfer_end_ns, timings.finished_ns)
        else:
            prefill = record("prefill", context, timings.scheduled_ns, timings.first_token_ns)
            noted = timings.chunks
            for start_ns, end_ns, tokens in zip(noted[::3], noted[1::3], noted[2::3], strict=True):
                record("chunk", prefill, start_ns, end_ns, tokens=tokens)
            record("decode", context, timings.first_token_ns, timings.finished_ns)


def _record(plan: Plan, sequence: PlannedSequence, timings: RequestTimings) -> dict[str, Any]:
    run = sequence.run
    return {
        "request_id": plan.request_id,
        "index": sequence.spec.index,
        "kind": run.request.kind,
        "disagg_request_id": run.request.transfer_id or None,
        "prompt_tokens": run.prompt_tokens,
        "cached_tokens": run.cached_tokens,
        "completion_tokens": run.completion_tokens,
        "timings_unix_ns": {
            "arrived": timings.arrived_ns,
            "scheduled": timings.scheduled_ns,
            "first_token": timings.first_token_ns,
            "transfer_start": timings.transfer_start_ns,
            "transfer_end": timings.transfer_end_ns,
            "finished": timings.finished_ns,
        },
        "transfer_bytes": timings.transfer_bytes,
        "transfer_pages": timings.transfer_pages,
    }
