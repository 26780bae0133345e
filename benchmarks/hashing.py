"""Block hashing on one core, against a Python loop over the same C hash and against the hash's own speed.

For each kind of key, prompts of several lengths and block sizes 16, 32 and 64:

* ``native``: kvmesh.hashing on an int32 buffer, keys returned as Python objects or an array;
* ``loop``: the best plain Python for the job: one call of hashlib or the xxhash package per block, over slices of one
  buffer;
* ``limit``: one call over as many bytes as all blocks together (parents included): what the hash itself costs.

The three are interleaved in random order and their medians of CPU time compared, so that a busy machine disturbs the
ratios least. dynamo's ``compute_block_hash_for_seq`` is measured beside them where it is installed. The last line is
one JSON object.

    python benchmarks/hashing.py [--tokens 2048,8192,65536] [--rounds 15]
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import platform
import random
import statistics
import time
from collections.abc import Callable

import numpy as np
import xxhash

from kvmesh.hashing import ROUTING_SEED, ReuseScope, TokenIds, local_hashes, v1_block_keys, v2_block_keys, v2_root
from kvmesh.kernels import _native

BLOCK_SIZES = (16, 32, 64)
HEADLINE = (8192, 32)
VOCABULARY = 128_000
MIN_TIMED_TOKENS = 65_536
"""Short prompts are repeated to this many tokens per timing: the CPU clock is coarse."""

ROOT = v2_root(ReuseScope())


def sha256_loop(tokens: TokenIds, size: int) -> list[bytes]:
    data, width, key = tokens.tobytes(), 4 * size, ROOT
    keys = []
    for begin in range(0, len(data) - width + 1, width):
        key = hashlib.sha256(key + data[begin : begin + width]).digest()
        keys.append(key)
    return keys


def xxh3_loop(tokens: TokenIds, size: int) -> list[int]:
    data, width, digest = tokens.tobytes(), 4 * size, xxhash.xxh3_64_intdigest
    return [digest(data[begin : begin + width], ROUTING_SEED) for begin in range(0, len(data) - width + 1, width)]


def contenders(tokens: TokenIds, size: int) -> dict[str, Callable[[], object]]:
    blocks = len(tokens) // size
    sha_bytes = bytes(blocks * (32 + 4 * size))
    xxh_bytes = bytes(blocks * 4 * size)
    found: dict[str, Callable[[], object]] = {
        "v2 native": lambda: v2_block_keys(tokens, size, ROOT),
        "v2 loop": lambda: sha256_loop(tokens, size),
        "v2 limit": lambda: hashlib.sha256(sha_bytes).digest(),
        "local native": lambda: local_hashes(tokens, size),
        "local loop": lambda: xxh3_loop(tokens, size),
        "local limit": lambda: xxhash.xxh3_64_intdigest(xxh_bytes, ROUTING_SEED),
        "v1 native": lambda: v1_block_keys(tokens, size),
    }
    if importlib.util.find_spec("dynamo") is not None:
        from dynamo.llm import compute_block_hash_for_seq

        ids = tokens.tolist()
        found["local dynamo"] = lambda: compute_block_hash_for_seq(ids, size)
    return found


def measure(tokens: TokenIds, size: int, rounds: int) -> dict[str, float]:
    """Median CPU microseconds of each contender for one prompt."""
    functions = contenders(tokens, size)
    repeats = max(1, MIN_TIMED_TOKENS // len(tokens))
    times: dict[str, list[float]] = {name: [] for name in functions}
    names = list(functions)
    for _ in range(rounds):
        random.shuffle(names)
        for name in names:
            function = functions[name]
            begin = time.process_time()
            for _ in range(repeats):
                function()
            times[name].append((time.process_time() - begin) / repeats * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="2048,8192,65536", help="prompt lengths, comma-separated")
    parser.add_argument("--rounds", type=int, default=15, help="timings of each contender")
    options = parser.parse_args()
    generator = np.random.default_rng(1)
    results = []
    for length in sorted({*map(int, options.tokens.split(",")), HEADLINE[0]}):
        tokens = generator.integers(0, VOCABULARY, length, dtype=np.int32)
        for size in BLOCK_SIZES:
            medians = measure(tokens, size, options.rounds)
            results.append({"tokens": length, "tokens_per_block": size, "cpu_us": medians})
            print(f"{length:6d} tokens, blocks of {size}:")
            for name, value in medians.items():
                print(f"    {name:14s} {value:9.1f} us   {length / value:7.1f} Mtok/s")
    (headline,) = (r["cpu_us"] for r in results if (r["tokens"], r["tokens_per_block"]) == HEADLINE)
    summary = {
        "sha256": _native.sha256_implementation(),
        "machine": platform.processor() or platform.machine(),
        "v2_ratio_vs_python_loop": headline["v2 loop"] / headline["v2 native"],
        "v2_ratio_vs_limit": headline["v2 native"] / headline["v2 limit"],
        "local_ratio_vs_python_loop": headline["local loop"] / headline["local native"],
        "local_ratio_vs_limit": headline["local native"] / headline["local limit"],
        "results": results,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
