"""Sequences that give way and go on, over real pages and a tiny real model: outputs are those of runs alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvmesh.cache.manager import KvCacheManager
from kvmesh.engine.sequence import Phase
from kvmesh.protocol.engine import Generate

BLOCK = 4
MIB = 1 << 20
Make = Callable[..., Any]


@pytest.fixture
def crowd(prompt: Make, request_of: Make) -> list[Generate]:
    """Sixteen requests that need several times a cache of 120 tokens."""
    return [
        request_of(f"r{i}", prompt(5 + (i * 13) % 40, i), max_tokens=20 + (i * 7) % 30, seed=i, temperature=i % 2 * 0.8)
        for i in range(16)
    ]


@pytest.fixture
def expected(make_engine: Make, crowd: list[Generate]) -> list[list[int]]:
    """Each alone, with reuse off."""
    alone = make_engine(cache={"enable_block_reuse": False, "host_cache_size": 0})
    return [alone.run(request)[0].tokens for request in crowd]


def tokens_of(answers: list[Any]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


@pytest.mark.parametrize("reuse", [True, False])
def test_nothing_is_computed_twice_with_a_host_tier(
    make_engine: Make, crowd: list[Generate], expected: list[list[int]], reuse: bool
) -> None:
    bench = make_engine(tokens=120, max_num_tokens=32, cache={"host_cache_size": 4 * MIB, "enable_block_reuse": reuse})
    assert tokens_of(bench.run(*crowd)) == expected
    counters = bench.executor.counters
    assert counters.suspended == counters.resumed > 0
    assert counters.recomputed == counters.lost == 0
    assert counters.prefilled_tokens == sum(len(request.prompt_token_ids) // 4 for request in crowd)
    assert bench.cache.counters.offloaded_pages > 0
    bench.check_idle()


def test_a_disk_tier_serves_as_well(
    make_engine: Make, crowd: list[Generate], expected: list[list[int]], tmp_path: Path
) -> None:
    bench = make_engine(
        tokens=120,
        max_num_tokens=32,
        cache={"host_cache_size": 0, "disk_cache_size": 4 * MIB, "disk_cache_path": str(tmp_path)},
    )
    assert bench.engine.manager.tiers == ("gpu", "disk")
    assert tokens_of(bench.run(*crowd)) == expected
    counters = bench.executor.counters
    assert counters.suspended == counters.resumed > 0
    assert counters.recomputed == 0
    bench.check_idle()


def test_a_host_tier_that_is_too_small_ends_in_computing_again(
    make_engine: Make, crowd: list[Generate], expected: list[list[int]]
) -> None:
    bench = make_engine(tokens=120, max_num_tokens=32, cache={"host_cache_size": 8 * 1024, "enable_block_reuse": False})
    assert tokens_of(bench.run(*crowd)) == expected
    counters = bench.executor.counters
    assert counters.suspended > 0
    assert counters.recomputed > 0
    bench.check_idle()


def test_damage_on_disk_is_computed_again(
    make_engine: Make, crowd: list[Generate], expected: list[list[int]], tmp_path: Path
) -> None:
    """§8 item 14 and content safety: every page that is on disk at some moment is broken there."""
    bench = make_engine(
        tokens=120,
        max_num_tokens=32,
        cache={"host_cache_size": 0, "disk_cache_size": 4 * MIB, "disk_cache_path": str(tmp_path)},
    )
    for request in crowd:
        bench.submit(request)
    while bench.executor.counters.suspended < 3:
        bench.step()
    for file in [file for file in tmp_path.rglob("*") if file.is_file()]:
        with file.open("r+b") as stream:
            size = file.stat().st_size
            stream.write(bytes(index % 251 for index in range(min(size, MIB))))
    answers = bench.run()
    for _ in range(4000):
        if all(answer.over for answer in bench.answers.values()):
            break
        bench.step()
    answers = [bench.answers[request.request_id] for request in crowd]
    assert tokens_of(answers) == expected
    assert bench.executor.counters.lost > 0
    assert bench.cache.counters.damaged_pages > 0
    bench.check_idle()


def test_a_suspended_request_can_be_cancelled(make_engine: Make, crowd: list[Generate]) -> None:
    bench = make_engine(tokens=120, max_num_tokens=32, cache={"host_cache_size": 4 * MIB})
    for request in crowd:
        bench.submit(request)
    while not bench.executor.num_suspended:
        bench.step()
    [seq, *_] = [seq for seq in bench.executor._scheduler.waiting if seq.phase is Phase.SUSPENDED]
    bench.executor.abort(seq.request_id)
    bench.step()
    assert bench.answers[seq.request_id].reason == "cancelled"
    while bench.executor.num_live:
        bench.step()
    bench.check_idle()


def test_a_rebalance_in_the_middle_changes_no_output(
    make_engine: Make, crowd: list[Generate], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """§3.9: every third iteration all sequences are suspended and go on."""
    moments: list[int] = []

    def rebalance(manager: KvCacheManager, _now_s: float) -> bool:
        assert all(sequence.state.value == "suspended" for sequence in manager.sequences)
        moments.append(len(manager.sequences))
        return True

    monkeypatch.setattr(KvCacheManager, "wants_rebalance", lambda _manager, _now_s: True)
    monkeypatch.setattr(KvCacheManager, "rebalance", rebalance)
    bench = make_engine(
        tokens=300,
        max_num_tokens=32,
        cache={
            "host_cache_size": 4 * MIB,
            "enable_kv_pool_rebalance": True,
            "kv_pool_rebalance_config": {"check_interval": 3},
        },
    )
    assert tokens_of(bench.run(*crowd)) == expected
    assert max(moments) > 3
    bench.check_idle()


def test_disk_pages_of_queued_prompts_are_fetched_ahead(
    make_engine: Make, prompt: Make, request_of: Make, tmp_path: Path
) -> None:
    """§2 disk_prefetch_num_reqs CHECK: N=1, two queued requests with disk-resident prefixes: only the first moves."""
    bench = make_engine(
        tokens=120,
        max_batch_size=1,
        cache={
            "host_cache_size": 64 * 1024,
            "disk_cache_size": 4 * MIB,
            "disk_cache_path": str(tmp_path),
            "disk_prefetch_num_reqs": 1,
        },
    )
    first, second = prompt(41, 1), prompt(41, 2)
    bench.run(request_of("a", first, max_tokens=1), request_of("b", second, max_tokens=1))
    manager = bench.engine.manager

    def coldest(tokens: bytes) -> int:
        seq = bench.executor._intake.admit(request_of("probe", tokens), 0)
        return int(manager.match(seq.scope, seq.history.all()).coldest_level)

    for index in range(3, 40):
        if coldest(first) == coldest(second) == 2:
            break
        bench.run(request_of(f"fill{index}", prompt(60, index), max_tokens=2))
    assert coldest(first) == coldest(second) == 2
    bench.submit(request_of("busy", prompt(8, 99), max_tokens=40))
    bench.step()
    assert not len(manager.store.tables[0].free_slots[1]), "the host is full, as it is when pages go to disk"
    bench.submit(request_of("c", first))
    bench.submit(request_of("d", second))
    bench.step()
    assert bench.executor.num_waiting == 2
    assert (coldest(first), coldest(second)) == (1, 2)
    while bench.executor.num_live:
        bench.step()
    bench.check_idle()
