"""Engines of several ranks in processes of their own: their answers are those of one rank, whatever goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cache_modes import REBALANCE
from tiny_models import build

from kvmesh.net.clock import ManualClock
from kvmesh.protocol.engine import DrainKvEvents, KvEventsDrained
from kvmesh.protocol.kv_cache_events import CreatedData

Make = Callable[..., Any]

SIZES = [(2, 1), (4, 1), (1, 2), (2, 2)]
ONE = {"tensor_parallel_size": 1}


def sizes(tp_size: int, pp_size: int) -> dict[str, int]:
    return {"tensor_parallel_size": tp_size, "pipeline_parallel_size": pp_size}


def answers(bench: Any, requests: list[Any]) -> list[list[int]]:
    return [answer.tokens for answer in bench.run(*requests)]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers with a window of 7, then a full one, then a windowed one again; four heads of which two have KV."""
    directory = tmp_path_factory.mktemp("gemma3")
    build("gemma3", max_position_embeddings=512).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(("tp_size", "pp_size"), SIZES)
def test_tokens_equal_those_of_one_rank(
    tp_size: int, pp_size: int, make_engine: Make, request_of: Make, prompt: Make
) -> None:
    """Two KV heads on four ranks are duplicated; prompts come in chunks, and share prefixes."""
    requests = [request_of(f"r{i}", prompt(5 + 9 * i, i)) for i in range(5)]
    again = [request_of(f"again{i}", prompt(5 + 9 * i, i)) for i in range(5)]
    plain = make_engine(max_num_tokens=16)
    expected = answers(plain, requests)
    bench = make_engine(max_num_tokens=16, **sizes(tp_size, pp_size))
    assert answers(bench, requests) == expected
    assert answers(bench, again) == expected
    assert bench.executor.counters.cached_tokens > 0
    assert bench.engine.ready.layout_digest == plain.engine.ready.layout_digest
    bench.check_idle()


@pytest.mark.parametrize(("tp_size", "pp_size", "scratch"), [(2, 1, False), (2, 1, True), (1, 3, True), (2, 2, False)])
def test_windows(
    tp_size: int, pp_size: int, scratch: bool, gemma: Path, make_engine: Make, request_of: Make, prompt: Make
) -> None:
    """Stages have other windows than their neighbours, and pages of other sizes."""
    options = {"model": str(gemma), "max_num_tokens": 24, "cache": {"enable_swa_scratch_reuse": scratch}}
    requests = [request_of(f"r{i}", prompt(7 + 21 * i, i)) for i in range(3)]
    expected = answers(make_engine(**options), requests)
    bench = make_engine(**options, **sizes(tp_size, pp_size))
    assert answers(bench, requests) == expected
    bench.check_idle()


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "cache"),
    [(2, 1, {"host_cache_size": 0}), (1, 2, {}), (2, 1, {"use_kv_cache_manager_v2": False})],
    ids=["computed-anew", "host-tier", "V1"],
)
def test_out_of_pages(
    tp_size: int, pp_size: int, cache: dict[str, Any], make_engine: Make, request_of: Make, prompt: Make
) -> None:
    """Sequences give way: computed anew, or brought back from the host tier, on all ranks alike."""
    requests = [request_of(f"r{i}", prompt(20 + i, i), max_tokens=24) for i in range(6)]
    expected = answers(make_engine(), requests)
    bench = make_engine(tokens=120, cache=cache, **sizes(tp_size, pp_size))
    assert answers(bench, requests) == expected
    counters = bench.executor.counters
    assert counters.preemptions > 0
    bench.check_idle()


def test_the_disk_tier(make_engine: Make, request_of: Make, prompt: Make, tmp_path: Path) -> None:
    """A conversation whose blocks have gone down to the disk comes back on both ranks."""
    requests = [request_of(f"r{i}", prompt(60, i)) for i in range(6)]
    cache = {"host_cache_size": 1 << 14, "disk_cache_size": 1 << 20, "disk_cache_path": str(tmp_path)}
    expected = answers(make_engine(), requests)
    bench = make_engine(tokens=100, cache=cache, **sizes(2, 1))
    assert [bench.run(request)[0].tokens for request in requests] == expected
    again = bench.run(request_of("again", prompt(60, 0)))[0]
    assert again.tokens == expected[0]
    assert again.last.cached_tokens == 59
    bench.check_idle()


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 3)])
def test_events_are_those_of_one_rank(
    tp_size: int, pp_size: int, gemma: Path, make_engine: Make, request_of: Make, prompt: Make
) -> None:
    """Each block is told once for each layer group of the model, whichever and how many ranks have its pages."""
    options = {"model": str(gemma), "cache": {"event_buffer_max_size": 500, "host_cache_size": 0}}

    def told(bench: Any) -> list[bytes]:
        bench.run(*(request_of(f"r{i}", prompt(9 + 4 * i, i)) for i in range(3)))
        bench.engine.reporter.drain_kv_events(DrainKvEvents(1))
        (drained,) = (message for message in bench.messages if isinstance(message, KvEventsDrained))
        # How many pages there are is the one thing that differs.
        return [msgspec.json.encode(event) for event in drained.events if not isinstance(event.data, CreatedData)]

    expected = told(make_engine(**options))
    assert len(expected) > 6
    assert told(make_engine(**options, **sizes(tp_size, pp_size))) == expected


def test_pools_exchange_memory(gemma: Path, make_engine: Make, request_of: Make, prompt: Make) -> None:
    """What grows for the leader has grown for whoever maps it."""
    options = {"model": str(gemma), "max_num_tokens": 24, "tokens": 400}
    requests = [request_of(f"r{i}", prompt(30 + 40 * (i % 3), i)) for i in range(9)]
    expected = answers(make_engine(**options), requests)
    clock = ManualClock()
    bench = make_engine(**options, cache=REBALANCE, clock=clock, **sizes(2, 1))
    for request, tokens in zip(requests, expected, strict=True):
        clock.advance(1.0)
        assert bench.run(request)[0].tokens == tokens
    assert bench.cache.counters.rebalances > 0
    again = bench.run(request_of("again", prompt(110, 2), cache_salt="anew"))[0]
    assert again.tokens == expected[2]
    bench.check_idle()
