"""The prefix index against the plain way: a dict from prefix hash to a mask of workers, walked block by block.

The workload is a fleet with popular system prompts: half of each prompt is one of a few system prompts (zipf), the
other half is the user's; each system prompt has two home workers. Both sides are given the same tokens and hash them
with the same native functions. The plain dict keeps no parents, so it cannot remove by the engine's hash, place a block
whose parent comes late, or tell tiers apart; it is the floor of what an index may cost.

Each round times the dict, then the index; ratios (dict / index, above 1 the index is faster) are medians of the rounds'
own, given with the lowest and the highest. The last line is JSON.

    python benchmarks/index.py [--prompt-tokens 2048] [--block 32] [--workers 8] [--blocks 100000] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvmesh.events.decoding import decode_batch
from kvmesh.events.encoding import encode_batch
from kvmesh.events.index import PrefixIndex, Source
from kvmesh.events.records import Removed, Stored
from kvmesh.hashing import local_hashes, sequence_hashes
from kvmesh.protocol.events import BlockStored, EventBatch

VOCABULARY = 49_152
USERS = 50
"""Prompts of each system prompt."""
QUERIES = 400


class Prompt(NamedTuple):
    """One prompt that one worker holds."""

    worker: int
    tokens: np.ndarray
    hashes: list[int]
    """What the worker's engine calls the blocks."""


class Workload(NamedTuple):
    """What is stored, and what is asked for."""

    prompts: list[Prompt]
    block: int
    queries: dict[str, list[np.ndarray]]


class PlainDict:
    """dict[prefix hash] -> mask, one walk for all workers."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}

    def store(self, worker: int, tokens: np.ndarray, block: int) -> None:
        """A worker holds all full blocks of ``tokens``."""
        bit = 1 << worker
        masks = self._masks
        for key in sequence_hashes(local_hashes(tokens, block)).tolist():
            masks[key] = masks.get(key, 0) | bit

    def match(self, tokens: np.ndarray, block: int) -> dict[int, int]:
        """Leading tokens by worker."""
        get = self._masks.get
        ends: dict[int, int] = {}
        alive, depth = -1, 0
        for key in sequence_hashes(local_hashes(tokens, block)).tolist():
            still = get(key, 0) & alive
            if still != alive and depth:
                _note(ends, alive & ~still, depth * block)
            alive = still
            if not alive:
                return ends
            depth += 1
        if depth:
            _note(ends, alive, depth * block)
        return ends


def _note(ends: dict[int, int], mask: int, tokens: int) -> None:
    while mask:
        low = mask & -mask
        ends[low.bit_length() - 1] = tokens
        mask ^= low


def make_workload(tokens: int, block: int, workers: int, blocks: int, seed: int = 7) -> Workload:
    """Prompts until ``blocks`` residencies are reached, and three kinds of queries."""
    rng = np.random.default_rng(seed)
    half = tokens // 2
    systems = [
        rng.integers(0, VOCABULARY, half, dtype=np.int32) for _ in range(max(2, 2 * blocks * block // (half * USERS)))
    ]
    homes = rng.integers(0, workers, (len(systems), 2))
    weights = 1.0 / np.arange(1, len(systems) + 1) ** 1.05
    weights /= weights.sum()
    prompts: list[Prompt] = []
    while len(prompts) * tokens // block < blocks:
        system = int(rng.choice(len(systems), p=weights))
        at_home = rng.random() < 0.8
        worker = int(homes[system, rng.integers(2)]) if at_home else int(rng.integers(workers))
        user = rng.integers(0, VOCABULARY, tokens - half, dtype=np.int32)
        text = np.concatenate([systems[system], user])
        # Any 64-bit numbers will do, as long as equal prefixes of one worker have equal ones.
        hashes = (sequence_hashes(local_hashes(text, block)) ^ np.uint64(worker)).tolist()
        prompts.append(Prompt(worker, text, hashes))
    picked = [prompts[i].tokens for i in rng.integers(0, len(prompts), QUERIES)]
    fresh = rng.integers(0, VOCABULARY, (QUERIES, tokens - half), dtype=np.int32)
    queries = {
        "full": picked,
        "system_only": [np.concatenate([text[:half], new]) for text, new in zip(picked, fresh, strict=True)],
        "cold": [np.concatenate([new, new])[:tokens] for new in fresh],
    }
    return Workload(prompts, block, queries)


def fill_dict(workload: Workload) -> tuple[PlainDict, float]:
    """A filled dict, and the seconds that took."""
    plain = PlainDict()
    started = time.perf_counter()
    for prompt in workload.prompts:
        plain.store(prompt.worker, prompt.tokens, workload.block)
    return plain, time.perf_counter() - started


def fill_index(workload: Workload, workers: int) -> tuple[PrefixIndex, float]:
    """A filled index, and the seconds that took."""
    index = PrefixIndex(1 << 40)
    for worker in range(workers):
        index.add(Source(str(worker)), model="m")
    events = [
        (
            Source(str(prompt.worker)),
            [Stored(hashes=prompt.hashes, parent=None, token_ids=prompt.tokens, block_size=workload.block)],
        )
        for prompt in workload.prompts
    ]
    started = time.perf_counter()
    for source, records in events:
        index.apply(source, records)
    return index, time.perf_counter() - started


def ingest_from_the_wire(workload: Workload) -> float:
    """Blocks per second from msgpack payloads into an index, decoding included."""
    index = PrefixIndex(1 << 40)
    payloads = []
    for prompt in workload.prompts[:500]:
        index.add(Source(str(prompt.worker)), model="m")
        event = BlockStored(
            block_hashes=prompt.hashes,
            parent_block_hash=None,
            token_ids=prompt.tokens.tolist(),
            block_size=workload.block,
        )
        payloads.append((Source(str(prompt.worker)), encode_batch(EventBatch(0.0, [event], 0))))
    started = time.perf_counter()
    for source, payload in payloads:
        index.apply(source, decode_batch(payload).records)
    return sum(len(prompt.hashes) for prompt in workload.prompts[:500]) / (time.perf_counter() - started)


def remove_leaves(index: PrefixIndex, workload: Workload) -> float:
    """Blocks per second, for the user's half of every prompt, deepest first."""
    events = [
        (Source(str(prompt.worker)), [Removed(hashes=prompt.hashes[len(prompt.hashes) // 2 :][::-1])])
        for prompt in workload.prompts
    ]
    before = index.statistics().removed_blocks_total
    started = time.perf_counter()
    for source, records in events:
        index.apply(source, records)
    return (index.statistics().removed_blocks_total - before) / (time.perf_counter() - started)


def median_us(ask: Callable[[np.ndarray], object], prompts: list[np.ndarray]) -> float:
    """Median time of one question."""
    took = []
    for tokens in prompts:
        started = time.perf_counter()
        ask(tokens)
        took.append(time.perf_counter() - started)
    return statistics.median(took) * 1e6


def ratio(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """Median, lowest and highest of first / second."""
    ratios = [first / second for first, second in pairs]
    return {
        "median": round(statistics.median(ratios), 2),
        "lowest": round(min(ratios), 2),
        "highest": round(max(ratios), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    workload = make_workload(args.prompt_tokens, args.block, args.workers, args.blocks)
    residencies = sum(len(prompt.hashes) for prompt in workload.prompts)
    print(f"{len(workload.prompts)} prompts of {args.prompt_tokens} tokens, {residencies} blocks of {args.block} told")

    filled: list[tuple[float, float]] = []
    asked: dict[str, list[tuple[float, float]]] = {kind: [] for kind in workload.queries}
    wire, removed = [], []
    for _ in range(args.rounds):
        plain, plain_s = fill_dict(workload)
        index, index_s = fill_index(workload, args.workers)
        filled.append((plain_s, index_s))
        for kind, prompts in workload.queries.items():
            for tokens in prompts[:50]:
                expected = plain.match(tokens, args.block)
                found = {int(match.instance_id): match.device_tokens for match in index.match(tokens, model="m")}
                assert found == expected, "both must give the same answer"
            asked[kind].append(
                (
                    median_us(lambda tokens, plain=plain: plain.match(tokens, args.block), prompts),
                    median_us(lambda tokens, index=index: index.match(tokens, model="m"), prompts),
                )
            )
        wire.append(ingest_from_the_wire(workload))
        removed.append(remove_leaves(index, workload))

    result = {
        "prompt_tokens": args.prompt_tokens,
        "block": args.block,
        "workers": args.workers,
        "match_us": {kind: round(statistics.median(mine for _, mine in pairs), 1) for kind, pairs in asked.items()},
        "match_ratio_vs_dict": {kind: ratio(pairs) for kind, pairs in asked.items()},
        "stored_blocks_per_s": round(residencies / statistics.median(mine for _, mine in filled)),
        "stored_ratio_vs_dict": ratio(filled),
        "stored_from_wire_blocks_per_s": round(statistics.median(wire)),
        "removed_blocks_per_s": round(statistics.median(removed)),
    }
    for kind, pairs in asked.items():
        plain_us, mine_us = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"match, {kind}: index {mine_us:.1f} us, dict {plain_us:.1f} us")
    for name in ("stored", "stored_from_wire", "removed"):
        print(f"{name}: {result[f'{name}_blocks_per_s']:,} blocks/s")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
