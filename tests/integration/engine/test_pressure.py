"""Many streams over few pages: windows, cold tiers, scratch slots, reuse policies and transfers, all at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
