"""Admission credits: whoever never fetches its prompts takes a share of the context server, and starves nobody."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from meshes.by_hand import Mesh

from kvmesh.engine.credits import patience_s
from kvmesh.models.store import DEFAULT_MODEL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SHARE = 0.25
TIMEOUT_S = 60.0
PROMPT_PAGES = 2
SLACK_S = 15.0
"""What a busy machine needs for the computing itself."""


def test_a_generation_server_that_never_fetches_does_not_starve_the_others(
    make_brief_mesh: Callable[..., Mesh],
) -> None:
    settings = {
        "cache_transceiver_config": {"backend": "DEFAULT", "kv_transfer_timeout_ms": round(TIMEOUT_S * 1000)},
        "kv_cache_config": {"host_cache_size": 0},
        "device_memory_bytes": 128 << 20,
        "max_unread_share": SHARE,
    }
    mesh = make_brief_mesh({"context": dict(settings), "generation": dict(settings)})
    total = mesh["context"].stats()["pages_total"]
    began_s = time.monotonic()
    for transfer_id in range(1, 2 + int(SHARE * total) // PROMPT_PAGES):
        body = {
            "model": DEFAULT_MODEL,
            "prompt": [(transfer_id * 50 + number) % 40_000 for number in range(40)],
            "max_tokens": 4,
            "disaggregated_params": {"request_type": "context_only", "disagg_request_id": transfer_id},
        }
        status, answer = mesh["context"].post("/v1/completions", body)
        assert status == 200, answer
    pinned = mesh["context"].settled_stats()["pages_pinned"]
    assert pinned >= SHARE * total
    # The others: one after the other, each fetched at once.
    waits: list[float] = []
    for number in range(8):
        asked_s = time.monotonic()
        body = {"model": DEFAULT_MODEL, "prompt": [20_000 + number * 60 + one for one in range(40)], "max_tokens": 3}
        status, answer = mesh["router"].post("/v1/completions", body)
        assert status == 200, answer
        waits.append(time.monotonic() - asked_s)
    print("waits", [round(wait, 2) for wait in waits])
    assert max(waits) < patience_s(PROMPT_PAGES / total, SHARE, TIMEOUT_S) + SLACK_S
    if time.monotonic() - began_s < TIMEOUT_S:
        assert mesh["context"].stats()["pages_pinned"] >= pinned, "all that while nothing was fetched"
    assert mesh["context"].stats()["held_back"] == 0
    for transfer_id in range(1, 2 + int(SHARE * total) // PROMPT_PAGES):
        mesh["context"].post("/abort", {"disagg_request_id": transfer_id})
    mesh.wait_idle()
