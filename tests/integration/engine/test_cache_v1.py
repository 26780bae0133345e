"""Engines on KV cache manager V1: the same tokens as with no reuse at all, whatever the cache goes through."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import build

from kvmesh.cache.v1 import V1CacheManager
from kvmesh.engine.build import EngineBuildError

Make = Callable[..., Any]

V1 = {"use_kv_cache_manager_v2": False}

BRANCHES = 24
"""Requests that share a beginning and differ after some of its tokens."""


def prompts(prompt: Make) -> list[bytes]:
    """Prompts that share whole blocks, parts of blocks and nothing with one another."""
    shared = prompt(38, 1)
    return [shared[: 4 * (7 * i % 38)] + prompt(5 + i % 13, 100 + i) for i in range(BRANCHES)]


def serve(bench: Any, request_of: Make, name: str, tokens: list[bytes]) -> list[list[int]]:
    """All at once; returns what was generated."""
    requests = [request_of(f"{name}-{i}", prompt, max_tokens=6 + i % 9) for i, prompt in enumerate(tokens)]
    return [answer.tokens for answer in bench.run(*requests)]


@pytest.mark.parametrize("model", ["llama", "mistral", "gemma2", "gemma3"])
@pytest.mark.parametrize("copy", [True, False])
def test_tokens_are_those_without_reuse(
    model: str, copy: bool, make_engine: Make, prompt: Make, request_of: Make, tmp_path: Path
) -> None:
    """Reuse, partial reuse both ways, eviction, offload to the host and back, preemption, under pressure."""
    options: dict[str, Any] = {"max_num_tokens": 24}
    if model != "llama":
        build(model).save_pretrained(tmp_path)
        options["model"] = str(tmp_path)
    plain = make_engine(cache={"enable_block_reuse": False}, **options)
    bench = make_engine(
        tokens=150, cache={**V1, "copy_on_partial_reuse": copy, "host_cache_size": 1 << 17}, max_batch_size=6, **options
    )
    assert isinstance(bench.engine.manager, V1CacheManager)
    assert bench.engine.manager.tiers == ("gpu", "host")
    first = prompts(prompt)
    expected = serve(plain, request_of, "first", first)
    # A second turn goes on in the trailing partial block of the first.
    second = [
        tokens + np.array(answer, dtype=np.int32).tobytes() + prompt(3, 200 + i)
        for i, (tokens, answer) in enumerate(zip(first, expected, strict=True))
    ]
    assert serve(bench, request_of, "first", first) == expected
    assert serve(bench, request_of, "second", second) == serve(plain, request_of, "second", second)
    for i in range(0, BRANCHES, 3):
        assert serve(bench, request_of, f"first alone {i}", [first[i]]) == [expected[i][:6]]
        [answer] = serve(plain, request_of, f"second alone {i}", [second[i]])
        assert serve(bench, request_of, f"second alone {i}", [second[i]]) == [answer]
        bench.engine.manager.check_integrity()
    bench.check_idle()
    counters = bench.cache.counters
    assert counters.reused_full_blocks > 20
    assert counters.reused_partial_blocks > 2
    assert counters.offloaded_pages > 20
    assert counters.onboarded_pages > 5
    assert counters.damaged_pages == 0


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
def test_a_cache_too_small_for_all_serves_all(policy: str, make_engine: Make, prompt: Make, request_of: Make) -> None:
    roomy = make_engine(cache=V1)
    tight = make_engine(cache=V1, tokens=64, scheduler_policy=policy)
    many = [request_of(f"r{i}", prompt(10 + i, 50 + i), max_tokens=30) for i in range(8)]
    expected = [answer.tokens for answer in roomy.run(*many)]
    assert [answer.tokens for answer in tight.run(*many)] == expected
    tight.check_idle()


@pytest.mark.parametrize("length", [5, 21, 50])
@pytest.mark.parametrize("managers", [("v1", "v1"), ("v1", "v2"), ("v2", "v1")])
def test_two_legs(
    length: int, managers: tuple[str, str], make_engine: Make, prompt: Make, request_of: Make, tmp_path: Path
) -> None:
    """Pages of all layer groups go from one engine to the other, whichever manager has them."""
    build("gemma3").save_pretrained(tmp_path)
    options = {"model": str(tmp_path), "transfers": {"backend": "DEFAULT"}, "max_num_tokens": 16}
    context, generation = (
        make_engine(name=name, cache=V1 if manager == "v1" else {}, **options)
        for name, manager in zip(("context", "generation"), managers, strict=True)
    )
    [expected] = make_engine(model=str(tmp_path)).run(request_of("whole", prompt(length)))
    for leg in (1, 2):
        first, *_ = context.run(request_of(f"c{leg}", prompt(length), kind="context", transfer_id=leg))
        request = request_of(
            f"g{leg}",
            prompt(length),
            kind="generation",
            transfer_id=leg,
            first_tokens=first.tokens,
            handoff=first.last.handoff,
        )
        generation.submit(request)
        answer = generation.answers[request.request_id]
        end_s = time.monotonic() + 20.0
        while not answer.over:
            assert time.monotonic() < end_s, "waited too long"
            context.step()
            generation.step()
        assert answer.tokens == expected.tokens
    context.engine.manager.check_integrity()
    generation.engine.manager.check_integrity()


@pytest.mark.parametrize(("preference", "v1"), [(None, True), ("mistral", False)])
def test_auto_asks_the_model(preference: str | None, v1: bool, make_engine: Make, tmp_path: Path) -> None:
    """§2 use_kv_cache_manager_v2: 'auto' is the model's preference, else V1."""
    options = {}
    if preference is not None:
        build(preference).save_pretrained(tmp_path)
        options["model"] = str(tmp_path)
    bench = make_engine(cache={"use_kv_cache_manager_v2": "auto"}, **options)
    assert isinstance(bench.engine.manager, V1CacheManager) == v1


def test_what_only_v2_has_is_refused_with_its_remedy(make_engine: Make) -> None:
    with pytest.raises(EngineBuildError, match="use_kv_cache_manager_v2: true"):
        make_engine(cache={**V1, "enable_kv_pool_rebalance": True})
