"""What KV events cost the engine: CPU time of one step that stores some blocks and removes as many others.

* ``stream``: the streaming sink and the encoding of its batch;
* ``buffered``: the buffered sink, for each of the three hash algorithms;
* ``json``: what the front spends on a fetch of one such step, not the engine.

Beside the times: bytes that the streaming sink keeps for each block it has told. The last line is one JSON object.

    python benchmarks/events.py [--blocks 128] [--tokens-per-block 32] [--rounds 300]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from kvmesh.cache.events import EventSink, StoredBlocks
from kvmesh.events.buffered import BufferedSink, Envelope
from kvmesh.events.buffered_json import events_as_json
from kvmesh.events.encoding import encode_batch
from kvmesh.events.names import EventHashAlgo, block_names
from kvmesh.events.sink import StreamSink
from kvmesh.hashing import ReuseScope
from kvmesh.protocol.events import EventBatch

VOCABULARIES = (49_152, 128_000)
"""Token ids of 2 bytes on the wire, and of 4."""
ALGORITHMS: tuple[EventHashAlgo, ...] = ("v2_sha256", "v2_sha256_64", "v1_block_key")
MEMORY_STEPS = 200


def steps(count: int, blocks: int, size: int, vocabulary: int) -> list[StoredBlocks]:
    """Chains of new blocks, each under random keys."""
    generator = np.random.default_rng(1)
    priorities = np.full(blocks, 35, np.uint8)
    made = []
    for _ in range(count):
        data = generator.bytes(32 * blocks)
        keys = [data[at : at + 32] for at in range(0, len(data), 32)]
        tokens = generator.integers(0, vocabulary, (blocks, size), dtype=np.int32)
        made.append(StoredBlocks(ReuseScope(), None, keys, tokens, 0, priorities))
    return made


def measure(sink: EventSink, finish: Callable[[], object], work: list[StoredBlocks]) -> float:
    """Median CPU microseconds of a step that stores ``work[i]`` and removes ``work[i - 1]``."""
    times = []
    for before, now in itertools.pairwise(work):
        begin = time.process_time_ns()
        sink.on_stored(0, now)
        sink.on_removed(0, before.keys, 0)
        finish()
        times.append((time.process_time_ns() - begin) / 1000)
    return statistics.median(times)


def kept_bytes(blocks: int, size: int) -> float:
    """Bytes that a streaming sink keeps for each told block."""
    sink, work = StreamSink(size), steps(MEMORY_STEPS, blocks, size, VOCABULARIES[0])
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for chain in work:
        sink.on_stored(0, chain)
        sink.take()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / (MEMORY_STEPS * blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=128, help="blocks stored, and removed, in a step")
    parser.add_argument("--tokens-per-block", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=300, help="steps measured")
    options = parser.parse_args()
    size = options.tokens_per_block
    cpu_us: dict[str, float] = {}
    for vocabulary in VOCABULARIES:
        work = steps(options.rounds, options.blocks, size, vocabulary)
        stream = StreamSink(size)
        cpu_us[f"stream, vocabulary {vocabulary}"] = measure(
            stream, lambda sink=stream: encode_batch(EventBatch(0.0, sink.take(), 0)), work
        )
    for algo in ALGORITHMS:
        names = block_names(algo, manager_v2=True, tokens_per_block=size, vocab_size=VOCABULARIES[1])
        buffered = BufferedSink(size, names, Envelope(algo, (8192,)))
        cpu_us[f"buffered, {algo}"] = measure(buffered, buffered.take, work)
    buffered = BufferedSink(
        size, block_names("v2_sha256", manager_v2=True, tokens_per_block=size), Envelope("v2_sha256", (8192,))
    )
    with_json = measure(buffered, lambda: events_as_json(buffered.take()), work)
    cpu_us["json"] = with_json - cpu_us["buffered, v2_sha256"]
    for name, value in cpu_us.items():
        print(f"{name:28s} {value:8.1f} us")
    kept = kept_bytes(options.blocks, size)
    print(f"{'kept for a told block':28s} {kept:8.2f} bytes")
    summary = {
        "blocks": options.blocks,
        "tokens_per_block": size,
        "cpu_us": cpu_us,
        "kept_bytes_per_block": kept,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
