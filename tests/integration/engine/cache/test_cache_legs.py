"""64 requests in two legs: prompts in one tight cache, answers in another, pages of all layer groups in between.

``KVMESH_SOAK`` runs more pairs of modes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from cache_modes import MODES
from cache_workload import Ask, check_answers, generate
from watched_engine import WatchedEngine

Make = Callable[..., Any]
pytestmark = pytest.mark.slow

PATIENCE_S = 60.0

PAIRS = [
    ("mistral", "scratch", "v1-host"),
    ("gemma3", "everything", "everything"),
]
MORE_PAIRS = [
    ("llama", "disk-no-evict", "host-no-evict"),
    ("gemma2", "v1-host", "host-disk"),
    ("llama", "host-disk", "host-disk"),
    ("llama-windows", "rebalance-tiers", "rebalance"),
    ("mistral", "host", "disk"),
    ("gemma2", "disk", "v1"),
    ("gemma3", "per-request", "per-conversation"),
]
SOAK = int(os.environ.get("KVMESH_SOAK", "0"))


class Legs:
    """Both engines, stepped in turn."""

    def __init__(self, context: WatchedEngine, generation: WatchedEngine) -> None:
        self.context = context
        self.generation = generation
        self._transfers = 0

    def serve(self, name: str, asks: Sequence[Ask]) -> list[list[int]]:
        """All at once; each goes over when its prompt is computed, and leaves as its client does."""
        waiting: dict[int, int] = {}
        for number, ask in enumerate(asks):
            self._transfers += 1
            waiting[number] = self._transfers
            request = generate(f"{name}-c{number}", ask, kind="context", transfer_id=self._transfers)
            self.context.submit(request)
        decoding: dict[int, Any] = {}
        answers: list[list[int] | None] = [None] * len(asks)
        end_s = time.monotonic() + PATIENCE_S
        while any(answer is None for answer in answers):
            assert time.monotonic() < end_s, "waited too long"
            self.context.step()
            for number, transfer in list(waiting.items()):
                first = self.context.answers[f"{name}-c{number}"]
                assert first.failure is None
                if not first.over:
                    continue
                del waiting[number]
                if first.reason != "not_finished":
                    answers[number] = first.tokens
                    continue
                legs = {
                    "first_tokens": first.tokens,
                    "handoff": first.last.handoff,
                    "retention": asks[number].retention,
                }
                request = generate(
                    f"{name}-g{number}",
                    asks[number],
                    kind="generation",
                    transfer_id=transfer,
                    conversation_id=f"conversation-{asks[number].conversation}",
                    **legs,
                )
                self.generation.submit(request)
                decoding[number] = self.generation.answers[request.request_id]
            self.generation.step()
            for number, answer in list(decoding.items()):
                assert answer.failure is None
                after = asks[number].gone_after
                if not answer.over and after is not None and len(answer.tokens) >= after:
                    self.generation.executor.abort(f"{name}-g{number}")
                if answer.over:
                    answers[number] = answer.tokens
                    del decoding[number]
        return [answer for answer in answers if answer is not None]

    def close(self) -> None:
        """Neither engine holds anything for the other."""
        end_s = time.monotonic() + PATIENCE_S
        while self.context.bench.cache.open_leases or self.generation.bench.cache.open_leases:
            assert time.monotonic() < end_s, "leases stay"
            self.context.step()
            self.generation.step()
        self.generation.close()
        self.context.close()


@pytest.mark.parametrize(("family", "context", "generation"), PAIRS + MORE_PAIRS if SOAK else PAIRS)
def test_two_legs_under_pressure(
    family: str, context: str, generation: str, reference: Make, watched: Make, tmp_path: Path
) -> None:
    expected = reference(family)
    transfers = {"transfers": {"backend": "DEFAULT"}}
    engines = []
    for name, mode in (("context", context), ("generation", generation)):
        directory = tmp_path / name
        directory.mkdir()
        engines.append(watched(family, MODES[mode], expected, disk=directory, name=name, **transfers))
    legs = Legs(*engines)
    for number, (asks, answers) in enumerate(expected.rounds):
        check_answers(legs.serve(f"round{number}", asks), answers, asks)
    moved = legs.generation.statistics()
    evidence = [engine.evidence() for engine in engines]
    legs.close()
    assert moved.transfer_pages_total > 100
    # In a window only the last blocks of a prompt come over, and nothing shorter can be found again.
    assert moved.transfer_pages_reused_total > 0 or family not in ("llama", "llama-windows")
    assert moved.transfers_failed_total == moved.transfers_timed_out_total == 0
    for seen, mode in zip(evidence, (context, generation), strict=True):
        tiers = [tier for tier in ("host", "disk") if getattr(MODES[mode], tier)]
        assert bool(seen["offloaded_pages"]) == bool(tiers)
        assert mode.startswith("v1") or all(seen[f"to_{tier}"] > 0 for tier in tiers)
        assert seen["evicted_pages"] > 0
        assert seen["starved"] == seen["damaged_pages"] == 0
        assert (seen["rebalances"] > 0) == ("enable_kv_pool_rebalance" in MODES[mode].cache)
