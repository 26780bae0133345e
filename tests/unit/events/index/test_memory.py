"""The memory bound under everything at once, what comes and goes, and the gauge against the process's own memory."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from soaks import soak_only

from kvmesh.events.index import PrefixIndex, Source
from kvmesh.events.records import Cleared, EventRecord, Removed, Stored, Tier

BLOCK = 2
A, B, C = Source("a"), Source("b"), Source("c", 1)


def tokens_of(chain: tuple[int, ...]) -> np.ndarray:
    return np.repeat(np.array(chain, np.int32), BLOCK)


def stored(hashes: list[int], chain: tuple[int, ...], parent: int | None = None, **fields: Any) -> Stored:
    return Stored(hashes=hashes, parent=parent, token_ids=tokens_of(chain), block_size=BLOCK, **fields)


actions = st.tuples(
    st.sampled_from([A, B, C]),
    st.sampled_from(["store", "store", "store", "host", "predict", "remove", "clear", "ask", "orphan", "restart"]),
    st.integers(0, 60),
    st.integers(1, 300),
)


@settings(max_examples=40, deadline=None)
@given(st.integers(30_000, 200_000), st.lists(actions, min_size=1, max_size=120))
def test_a_tiny_index_keeps_its_bound_and_never_claims_too_much(
    bound: int, steps: list[tuple[Source, str, int, int]]
) -> None:
    """Against the chains that each worker really holds; forgetting may only make the answer shorter."""
    index = PrefixIndex(bound)
    truth: dict[Source, set[tuple[int, ...]]] = {source: set() for source in (A, B, C)}
    empty = index.memory_bytes
    for source in truth:
        index.add(source, model="m")
    floor = index.memory_bytes
    for source, what, seed, length in steps:
        chain = (seed, *range(length))
        hashes = [hash((seed, depth)) & (2**63 - 1) for depth in range(len(chain))]
        prefixes = {chain[: depth + 1] for depth in range(len(chain))}
        if what in ("store", "host"):
            tier = Tier.HOST if what == "host" else Tier.DEVICE
            index.apply(source, [stored(hashes, chain, tier=tier)])
            truth[source] |= prefixes
        elif what == "predict":
            index.predict(source, tokens_of(chain), model="m", block_size=BLOCK, ttl_s=1e6)
            truth[source] |= prefixes
        elif what == "remove":
            index.apply(source, [Removed(hashes=hashes[::-1])])  # others of its kinds may remain
        elif what == "orphan":
            index.apply(source, [stored(hashes[1:], chain[1:], parent=hashes[0])])
            truth[source] |= prefixes
        elif what == "clear":
            index.apply(source, [Cleared()])
            truth[source] = set()
        elif what == "restart":
            chunks = list(index.snapshot())
            index = PrefixIndex(bound)
            index.restore(chunks)
        assert index.memory_bytes <= max(bound, floor + 4096)
        for match in index.match(tokens_of(chain), model="m"):
            held = truth[Source(match.instance_id, match.dp_rank)]
            assert chain[: match.disk_tokens // BLOCK] in held
    for source in truth:
        index.remove(source)
    while index.reclaim():
        pass
    statistics = index.statistics()
    assert (statistics.blocks, statistics.residencies, statistics.scopes) == (0, 0, 0)
    assert statistics.parked_runs == 0
    assert empty <= index.memory_bytes <= max(bound, floor + 4096)


def churn(index: PrefixIndex, chains: int, length: int, first: int) -> None:
    """Chains below a prompt that is kept, each removed some steps after it was stored."""
    window = 64
    for number in range(first, first + chains):
        base = number * length * 4
        hashes = list(range(base + 10, base + 10 + length))
        index.apply(A, [stored(hashes, tuple(base % 2**30 + i for i in range(length)), parent=3)])
        if number >= first + window:
            gone = (number - window) * length * 4
            index.apply(A, [Removed(hashes=list(range(gone + 9 + length, gone + 9, -1)))])
    for number in range(first + chains - window, first + chains):
        gone = number * length * 4
        index.apply(A, [Removed(hashes=list(range(gone + 9 + length, gone + 9, -1)))])


@pytest.mark.parametrize("chains", [20_000, pytest.param(1_000_000, marks=soak_only)])
def test_churn_under_a_kept_prompt_leaves_nothing(chains: int) -> None:
    """Unique chains stored and removed below a system prompt: the node count is back at its base line, and a second
    round of the same size needs less than 5 % more of the process's memory."""
    index = PrefixIndex()
    index.add(A, model="m")
    index.apply(A, [stored([1, 2, 3], (1, 2, 3))])
    churn(index, chains, 4, 0)
    assert index.statistics().blocks == 3
    first_bytes, first_rss = index.memory_bytes, resident_bytes()
    churn(index, chains, 4, chains)
    assert index.statistics().blocks == 3
    assert index.memory_bytes <= first_bytes * 1.05
    assert resident_bytes() <= first_rss * 1.05
    assert index.match(tokens_of((1, 2, 3)), model="m")[0].device_tokens == 3 * BLOCK


def test_a_thousand_adapters_come_and_go() -> None:
    """1000 LoRA scopes added and removed, again and again: nothing is left of them, and memory is constant."""
    index = PrefixIndex()
    index.add(A, model="m")

    def round_of_adapters() -> int:
        for number in range(1000):
            index.apply(A, [stored([number * 2 + 1, number * 2 + 2], (1, 2), lora=f"adapter-{number}")])
        assert index.statistics().scopes == 1000
        for number in range(1000):
            index.apply(A, [Removed(hashes=[number * 2 + 2, number * 2 + 1])])
        assert (index.statistics().scopes, index.statistics().blocks) == (0, 0)
        return index.memory_bytes

    first = round_of_adapters()
    assert max(round_of_adapters() for _ in range(9)) < first * 1.05


def test_many_sources_do_not_make_nodes_larger() -> None:
    """The masks of 4096 holders are shared by all blocks that have the same ones."""
    index = PrefixIndex(1 << 34)
    run = list(range(1, 201))
    record = [stored(run, tuple(run))]
    sizes = {}
    for number in range(4096):
        source = Source(f"w{number}")
        index.add(source, model="m")
        index.apply(source, record)
        sizes[number + 1] = index.memory_bytes
    per_residency = (sizes[4096] - sizes[512]) / ((4096 - 512) * len(run))
    assert per_residency < 48, "a source's own tables, and hardly anything for the masks"
    assert len(index.match(tokens_of(tuple(run)), model="m")) == 4096


@pytest.mark.parametrize(("what", "within"), [("blocks", 0.1), ("twins", 0.2), ("salts", 0.2)])
def test_the_gauge_is_the_share_of_the_process(what: str, within: float) -> None:
    """In a process of its own, so that nothing else grows: what is counted against resident memory.

    Twins are further hashes of blocks that are held already; a salt has a scope and a digest of its own.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run(
        [sys.executable, __file__, what], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    counted, grown = map(int, child.stdout.split())
    assert counted == pytest.approx(grown, rel=within)


def _measured(what: str) -> str:
    index = PrefixIndex(1 << 34)
    index.add(A, model="m")
    records: list[list[EventRecord]] = [[run_of(i)] for i in range(4000)]
    again: list[list[EventRecord]] = [[run_of(i, first=1 << 20)] for i in range(4000)]
    if what == "twins":
        for record in records:
            index.apply(A, record)
        records = again
    elif what == "salts":
        records = [[stored([i + 1], (i,), salt=f"salt-{i}")] for i in range(60_000)]
    ctypes.CDLL(None).malloc_trim(0)  # what others have freed must not make room for it
    before, counted = resident_bytes(), index.memory_bytes
    for record in records:
        index.apply(A, record)
    return f"{index.memory_bytes - counted} {resident_bytes() - before}"


def run_of(i: int, *, first: int = 1) -> Stored:
    tokens = np.arange(64 * BLOCK, dtype=np.int32) + i
    return Stored(
        hashes=list(range(first + 64 * i, first + 64 * i + 64)), parent=None, token_ids=tokens, block_size=BLOCK
    )


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    print(_measured(sys.argv[1]))
