"""Many streams in a cache too small for them: all finish, nothing is lost, nobody's text depends on the others."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from meshes.by_hand import Mesh
from meshes.streams import ask, body, certain

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STREAMS = 64
CACHE_TOKENS = 256
"""8 pages, and one for resuming; the streams would need some 200 at once, and the largest needs 6."""


def bodies() -> list[dict[str, Any]]:
    """Streams of mixed length."""
    choose = random.Random(64)
    prompts = [[choose.randrange(1000, 45_000) for _ in range(choose.randrange(4, 100))] for _ in range(STREAMS)]
    return [body(prompt, choose.choice([2, 5, 12, 70])) for prompt in prompts]


def test_sixty_four_streams_in_a_small_cache(mesh: Mesh, make_mesh: Callable[..., Mesh]) -> None:
    small = {"kv_cache_config": {"max_tokens": CACHE_TOKENS}}
    crowded = make_mesh({"context": small, "generation": small})
    begun = {worker.name: worker.stats() for worker in crowded.workers()}
    assert begun["generation"]["pages_total"] < 1.2 * CACHE_TOKENS / 32
    asked = bodies()
    solo = [ask(mesh, body) for body in asked]
    with ThreadPoolExecutor(STREAMS) as together:
        answers = list(together.map(lambda body: ask(crowded, body), asked))
    assert certain(solo, answers) > 0.8
    crowded.wait_idle()
    ended = {worker.name: worker.settled_stats() for worker in crowded.workers()}
    assert ended["generation"]["preemptions_total"] > 0, "the cache was meant to be too small"
    for name, stats in ended.items():
        assert stats["pages_total"] == begun[name]["pages_total"]
        assert stats["integrity_failures_total"] == 0, "after the streams; the mesh looks for later ones when it stops"
        assert stats["transfers_failed_total"] == stats["transfers_timed_out_total"] == 0
