"""Many streams in a cache too small for them: all finish, nothing is lost, nobody's text depends on the others."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from meshes.by_hand import Mesh

from kvmesh.models.store import DEFAULT_MODEL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STREAMS = 64
CACHE_TOKENS = 256
"""8 pages, and one for resuming; the streams would need some 200 at once, and the largest needs 6."""
SAFE_MARGIN = 1e-3


def bodies() -> list[dict[str, Any]]:
    """Streams of mixed length."""
    choose = random.Random(64)
    prompts = [[choose.randrange(1000, 45_000) for _ in range(choose.randrange(4, 100))] for _ in range(STREAMS)]
    return [
        {
            "model": DEFAULT_MODEL,
            "prompt": prompt,
            "max_tokens": choose.choice([2, 5, 12, 70]),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "logprobs": 2,
        }
        for prompt in prompts
    ]


def ask(mesh: Mesh, body: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Tokens, and each one's lead over the second best."""
    status, events = mesh["router"].post("/v1/completions", body, timeout_s=200.0)
    assert status == 200, events
    assert events.pop() == "[DONE]"
    tokens: list[int] = []
    margins: list[float] = []
    finish = []
    for event in events:
        [choice] = msgspec.json.decode(event)["choices"]
        tokens += choice.get("token_ids") or []
        for top in (choice.get("logprobs") or {}).get("top_logprobs") or []:
            best, *others = sorted(top.values(), reverse=True)
            margins.append(best - others[0] if others else 0.0)
        finish += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert finish == ["length"]
    assert len(tokens) == len(margins) == body["max_tokens"]
    return tokens, margins


def test_sixty_four_streams_in_a_small_cache(mesh: Mesh, make_mesh: Callable[..., Mesh]) -> None:
    small = {"kv_cache_config": {"max_tokens": CACHE_TOKENS}}
    crowded = make_mesh({"context": small, "generation": small})
    begun = {worker.name: worker.stats() for worker in crowded.workers()}
    assert begun["generation"]["pages_total"] < 1.2 * CACHE_TOKENS / 32
    asked = bodies()
    solo = [ask(mesh, body) for body in asked]
    with ThreadPoolExecutor(STREAMS) as together:
        answers = list(together.map(lambda body: ask(crowded, body), asked))
    compared = 0
    for (alone, margins), (tokens, _) in zip(solo, answers, strict=True):
        sure = next((i for i, margin in enumerate(margins) if margin < SAFE_MARGIN), len(margins))
        assert tokens[:sure] == alone[:sure]
        compared += sure
    assert compared > 0.8 * sum(len(tokens) for tokens, _ in solo)
    crowded.wait_idle()
    ended = {worker.name: worker.settled_stats() for worker in crowded.workers()}
    assert ended["generation"]["preemptions_total"] > 0, "the cache was meant to be too small"
    for name, stats in ended.items():
        assert stats["pages_total"] == begun[name]["pages_total"]
        assert stats["integrity_checks_total"] > 0
        assert stats["integrity_failures_total"] == 0
        assert stats["transfers_failed_total"] == stats["transfers_timed_out_total"] == 0
