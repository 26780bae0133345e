"""Whatever the KV cache does, the tokens are those of a run without it, for every architecture (decisions 13).

64 streams at a time in a cache for a handful of them, then the next turn of half of them. Some clients leave. Every
case asserts from counters that what it is about really happened, and that nothing is left behind.
``KVMESH_SOAK`` runs every mode on every architecture, with so many sets of requests.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from cache_modes import MODES, check_evidence
from cache_workload import check_answers, serve

SOAK = int(os.environ.get("KVMESH_SOAK", "0"))


def cases() -> list[Any]:
    """Every mode on one architecture, and so every architecture in some modes; all combinations when soaking."""
    chosen = []
    for number, (name, mode) in enumerate(MODES.items()):
        for family in mode.families if SOAK else [mode.families[number % len(mode.families)]]:
            chosen += [pytest.param(family, name, seed, id=f"{family}-{name}-{seed}") for seed in range(max(1, SOAK))]
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mode", "seed"), cases())
def test_tokens_are_those_without_a_cache(
    family: str, mode: str, seed: int, reference: Callable[..., Any], watched: Callable[..., Any]
) -> None:
    expected = reference(family, seed)
    engine = watched(family, MODES[mode], expected)
    for number, (asks, answers) in enumerate(expected.rounds):
        check_answers(serve(engine, f"round{number}", asks), answers, asks)
    evidence = engine.evidence()
    engine.close()
    check_evidence(evidence, MODES[mode])
