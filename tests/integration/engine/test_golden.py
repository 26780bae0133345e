"""The built-in model through the engine: the golden file, whole, chunked, crowded out of a small cache, in two legs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvmesh.models.store import DEFAULT_MODEL

pytestmark = pytest.mark.slow

Make = Callable[..., Any]
GOLDEN = Path(__file__).parents[2] / "data" / "golden" / "smollm2.json"
BLOCK_32 = {"tokens_per_block": 32}
SAFE_MARGIN = 1e-3  # below it, rounding alone may swap the two best tokens


@pytest.fixture(scope="module")
def golden() -> list[dict[str, Any]]:
    return json.loads(GOLDEN.read_text())["items"]


def tokens(item: dict[str, Any]) -> bytes:
    return np.array(item["prompt_ids"], dtype="<i4").tobytes()


def certain(item: dict[str, Any]) -> list[int]:
    """The greedy continuation as far as it is no coin toss."""
    unsure = next((i for i, margin in enumerate(item["top2_margin"]) if margin < SAFE_MARGIN), 64)
    return item["greedy_ids"][:unsure]


def check(answer: Any, item: dict[str, Any]) -> None:
    expected = certain(item)
    assert answer.tokens[: len(expected)] == expected
    assert len(answer.tokens) == 64


def test_one_by_one_and_again(make_engine: Make, request_of: Make, golden: list[dict[str, Any]]) -> None:
    bench = make_engine(model=DEFAULT_MODEL, cache=BLOCK_32)
    for index, item in enumerate(golden):
        check(bench.run(request_of(f"r{index}", tokens(item), max_tokens=64))[0], item)
    item = golden[-1]
    again = bench.run(request_of("again", tokens(item), max_tokens=64))[0]
    check(again, item)
    assert again.last.cached_tokens == len(item["prompt_ids"]) - 1
    bench.check_idle()


def test_together_in_small_chunks(make_engine: Make, request_of: Make, golden: list[dict[str, Any]]) -> None:
    bench = make_engine(model=DEFAULT_MODEL, cache=BLOCK_32, max_num_tokens=48)
    requests = [request_of(f"r{i}", tokens(item), max_tokens=64) for i, item in enumerate(golden)]
    for answer, item in zip(bench.run(*requests), golden, strict=True):
        check(answer, item)
    bench.check_idle()


def test_sixteen_requests_in_a_cache_for_four(
    make_engine: Make, request_of: Make, golden: list[dict[str, Any]]
) -> None:
    bench = make_engine(model=DEFAULT_MODEL, tokens=700, cache=BLOCK_32)
    items = [golden[i % len(golden)] for i in range(16)]
    requests = [request_of(f"r{i}", tokens(item), max_tokens=64, cache_salt=str(i)) for i, item in enumerate(items)]
    for answer, item in zip(bench.run(*requests), items, strict=True):
        check(answer, item)
    assert bench.executor.counters.preemptions > 0
    bench.check_idle()


def test_three_ranks_of_three_heads(make_engine: Make, request_of: Make, golden: list[dict[str, Any]]) -> None:
    """Nine query heads over three KV heads, weights cut at quantised blocks; one prompt alone, then all in chunks."""
    bench = make_engine(model=DEFAULT_MODEL, cache=BLOCK_32, max_num_tokens=48, tensor_parallel_size=3)
    check(bench.run(request_of("alone", tokens(golden[0]), max_tokens=64))[0], golden[0])
    requests = [request_of(f"r{i}", tokens(item), max_tokens=64) for i, item in enumerate(golden)]
    for answer, item in zip(bench.run(*requests), golden, strict=True):
        check(answer, item)
    bench.check_idle()
