"""What KV events cost the engine: CPU time of one step that stores some blocks and removes as many others.

* ``stream``: the streaming sink and the encoding of its batch;
* ``buffered``: the buffered sink, for each of the three hash algorithms;
* ``json``: what the front spends on a fetch of one such step, not the engine;
* ``keyed``: the streaming sink with a key, its digests, and the encoding of its batch.

``digests`` is what they add to ``stream``, and ``lookup`` what a reader with a key spends on a prompt of 2048 tokens
before it asks the index. Beside the times: bytes that the streaming sink keeps for each block it has told, without and
with a salt, and that a publisher keeps for a block beside that. The last line is one JSON object.

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
from kvmesh.events.keyed import StreamKey
from kvmesh.events.live import LiveBlocks
from kvmesh.events.names import EventHashAlgo, block_names
from kvmesh.events.published import PublishedSet
from kvmesh.events.sink import StreamSink
from kvmesh.hashing import ReuseScope
from kvmesh.protocol.events import EventBatch

VOCABULARIES = (49_152, 128_000)
"""Token ids of 2 bytes on the wire, and of 4."""
ALGORITHMS: tuple[EventHashAlgo, ...] = ("v2_sha256", "v2_sha256_64", "v1_block_key")
MEMORY_STEPS = 200
KEY = StreamKey(bytes(range(32)))
PROMPT_TOKENS = 2048


def steps(count: int, blocks: int, size: int, vocabulary: int, salt: int | None = None) -> list[StoredBlocks]:
    """Chains of new blocks, each under random keys."""
    generator = np.random.default_rng(1)
    priorities = np.full(blocks, 35, np.uint8)
    made = []
    for _ in range(count):
        data = generator.bytes(32 * blocks)
        keys = [data[at : at + 32] for at in range(0, len(data), 32)]
        tokens = generator.integers(0, vocabulary, (blocks, size), dtype=np.int32)
        made.append(StoredBlocks(ReuseScope(salt=salt), None, keys, tokens, 0, priorities))
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


def kept_bytes(blocks: int, size: int, salt: int | None = None) -> float:
    """Bytes that a streaming sink with digests keeps for each told block."""
    published = PublishedSet()
    sink, work = StreamSink(size, published=published), steps(MEMORY_STEPS, blocks, size, VOCABULARIES[0], salt)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for chain in work:
        sink.on_stored(0, chain)
        sink.take()
        published.commit(0)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / (MEMORY_STEPS * blocks)


def publisher_bytes(blocks: int, size: int) -> float:
    """Bytes that a publisher keeps for each told block, tokens included."""
    sink, work = StreamSink(size), steps(MEMORY_STEPS, blocks, size, VOCABULARIES[0])
    live = LiveBlocks()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for chain in work:
        sink.on_stored(0, chain)
        live.take_in(sink.take())
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / (MEMORY_STEPS * blocks)


def streamed(
    size: int, *, key: StreamKey | None = None, digests: bool = False
) -> tuple[StreamSink, Callable[[], object]]:
    """A streaming sink, and what ends its step."""
    published = PublishedSet((None, None if key is None else key.salt)) if digests else None
    sink = StreamSink(size, key=key, published=published)

    def finish() -> None:
        events = sink.take()
        if published is not None:
            published.commit(0)
        encode_batch(EventBatch(0.0, events, 0))

    return sink, finish


def lookup_us(size: int, rounds: int) -> float:
    """Median CPU microseconds of the disguise of a prompt."""
    prompt = np.random.default_rng(1).integers(0, VOCABULARIES[1], PROMPT_TOKENS, dtype=np.int32)
    times = []
    for _ in range(rounds):
        begin = time.process_time_ns()
        KEY.disguise(prompt, size, ReuseScope())
        times.append((time.process_time_ns() - begin) / 1000)
    return statistics.median(times)


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
        cpu_us[f"stream, vocabulary {vocabulary}"] = measure(*streamed(size), work)
    cpu_us["digests"] = measure(*streamed(size, digests=True), work) - cpu_us[f"stream, vocabulary {VOCABULARIES[-1]}"]
    cpu_us["keyed"] = measure(*streamed(size, key=KEY, digests=True), work)
    cpu_us[f"lookup of {PROMPT_TOKENS} tokens"] = lookup_us(size, options.rounds)
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
    kept = {
        "for a told block": kept_bytes(options.blocks, size),
        "for a told block with a salt": kept_bytes(options.blocks, size, salt=1),
        "by the publisher": publisher_bytes(options.blocks, size),
    }
    for name, value in kept.items():
        print(f"kept {name:30s} {value:8.2f} bytes")
    summary = {
        "blocks": options.blocks,
        "tokens_per_block": size,
        "cpu_us": cpu_us,
        "kept_bytes": kept,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
