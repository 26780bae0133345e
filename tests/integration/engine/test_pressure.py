"""Many streams over few pages: windows, cold tiers, scratch slots, reuse policies and transfers, all at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tiny_models import build

from kvmesh.protocol.engine import Generate

Make = Callable[..., Any]

KIB = 1 << 10
_EXPECTED: dict[str, list[list[int]]] = {}


@pytest.fixture(scope="session")
def crowd(prompt: Make, request_of: Make) -> list[Generate]:
    """Requests of up to 90 tokens; every third begins like the one before it."""
    return [
        request_of(f"r{i}", prompt(6 + (i * 13) % 40, i - (i % 3 == 2)), max_tokens=15 + (i * 7) % 30)
        for i in range(24)
    ]


@pytest.fixture
def expected(crowd: list[Generate], make_engine: Make, tmp_path: Path, family: str) -> list[list[int]]:
    """Each alone, with reuse off; also leaves the model in ``tmp_path``."""
    build(family).save_pretrained(tmp_path)
    if family not in _EXPECTED:
        alone = make_engine(model=str(tmp_path), cache={"enable_block_reuse": False, "host_cache_size": 0})
        _EXPECTED[family] = [alone.run(request)[0].tokens for request in crowd]
    return _EXPECTED[family]


@pytest.mark.parametrize("policy", ["max_utilization", "guaranteed_no_evict"])
@pytest.mark.parametrize(
    ("family", "cache"),
    [
        ("mistral", {"host_cache_size": 0}),
        ("mistral", {"host_cache_size": 32 * KIB, "enable_swa_scratch_reuse": True}),
        ("gemma3", {"host_cache_size": 0, "enable_swa_scratch_reuse": True}),
        ("gemma3", {"host_cache_size": 64 * KIB}),
        ("gemma3", {"host_cache_size": 4096 * KIB, "enable_swa_scratch_reuse": True, "avg_seq_len": 60}),
        ("gemma2", {"host_cache_size": 64 * KIB, "block_reuse_config": {"policy": "per_request"}}),
        ("gemma2", {"host_cache_size": 0, "block_reuse_config": {"policy": "per_request"}}),
        ("gemma2", {"host_cache_size": 64 * KIB, "enable_block_reuse": False, "enable_swa_scratch_reuse": True}),
    ],
    ids=str,
)
@pytest.mark.usefixtures("family")
def test_outputs_are_those_of_runs_alone(
    cache: dict[str, Any],
    policy: str,
    crowd: list[Generate],
    expected: list[list[int]],
    make_engine: Make,
    tmp_path: Path,
) -> None:
    bench = make_engine(
        model=str(tmp_path), tokens=128, max_num_tokens=24, max_batch_size=12, scheduler_policy=policy, cache=cache
    )
    answers = bench.run(*crowd)
    assert [answer.tokens for answer in answers] == expected
    counters = bench.executor.counters
    if policy == "guaranteed_no_evict":
        assert counters.preemptions == 0
    bench.check_idle()


@pytest.mark.parametrize("family", ["gemma3"])
@pytest.mark.parametrize(
    "cache",
    [
        {"host_cache_size": 256 * KIB, "enable_swa_scratch_reuse": True},
        {"host_cache_size": 0, "block_reuse_config": {"policy": "per_request"}},
    ],
    ids=str,
)
@pytest.mark.usefixtures("family")
def test_two_legs(
    cache: dict[str, Any],
    crowd: list[Generate],
    expected: list[list[int]],
    make_engine: Make,
    tmp_path: Path,
) -> None:
    """Prompts are fetched while sequences give way on both sides; only pages inside the windows travel."""
    settings = {"model": str(tmp_path), "transfers": {"backend": "DEFAULT"}, "max_num_tokens": 24, "tokens": 160}
    context = make_engine(name="context", cache=cache, **settings)
    generation = make_engine(name="generation", cache=cache, **settings)
    waiting = {request.request_id: request for request in crowd}
    for number, request in enumerate(crowd, 1):
        context.submit(msgspec.structs.replace(request, kind="context", transfer_id=number))
    end_s = time.monotonic() + 60.0
    while waiting or not all(generation.answers[request.request_id].over for request in crowd):
        assert time.monotonic() < end_s, "waited too long"
        context.step()
        generation.step()
        for number, request in enumerate(crowd, 1):
            first = context.answers[request.request_id]
            if request.request_id in waiting and first.over:
                assert first.failure is None
                del waiting[request.request_id]
                leg = {"kind": "generation", "transfer_id": number, "first_tokens": first.tokens}
                generation.submit(msgspec.structs.replace(request, handoff=first.last.handoff, **leg))
    assert [generation.answers[request.request_id].tokens for request in crowd] == expected
    assert generation.executor.counters.preemptions > 0
    while context.cache.open_leases:
        context.step()
    for bench in (context, generation):
        bench.check_idle()
