"""The cache manager's cost per request, against vLLM's manager, as the cache grows, and in bytes per page.

Prompts of 8,192 tokens in blocks of 32, half of each one of six shared beginnings, one after another through a cache of
40,000 pages: block keys, match, allocate, commit, free, and the step's KV events as msgpack. 60 requests make a round;
the figures come from those after the twelfth, when half of every prompt is cached. CPU time of the process, no garbage
collection. Ours is given its prompts as int32 arrays, which is how the engine gets them; vLLM's as lists.

vLLM is measured beside it, rounds taking turns, when its sources and an interpreter that can import what they need are
there (only Python files are used; no torch, no GPU):

    pip download --no-deps vllm==0.33.0 && unzip -q vllm-*.whl 'vllm/*.py' -d ~/.cache/kvmesh-peers/vllm_src
    python -m venv ~/.cache/kvmesh-peers/vllm_env
    ~/.cache/kvmesh-peers/vllm_env/bin/pip install msgspec pyzmq cbor2 xxhash

``growth`` repeats the round with as many pages as stated, all of them cached before, so that every request evicts;
each size, and the memory of a million pages, has a process of its own. The last line is one JSON object.

    python benchmarks/cache_manager.py [--rounds 5] [--pages 10000,100000,1000000] [--vllm DIR] [--vllm-python EXE]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvmesh.cache.device import CpuDevice
from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, PageLayout
from kvmesh.cache.manager import KvCacheManager
from kvmesh.cache.settings import CacheSettings
from kvmesh.cache.storage import Storage
from kvmesh.events.encoding import encode_batch
from kvmesh.events.sink import StreamSink
from kvmesh.hashing import ReuseScope, TokenIds
from kvmesh.protocol.events import EventBatch, KvEvent

PHASES = ("hash", "match", "allocate", "commit", "free", "events")
WARM_FROM = 12
PEERS = Path(os.environ.get("PEERS", "~/.cache/kvmesh-peers")).expanduser()
TARGET_RATIO = 0.125
MILLION = 1_000_000
MAX_BYTES_PER_PAGE = 300
"""A million pages in 300 MB."""


class Workload(NamedTuple):
    """Prompts and the cache they go through."""

    seed: int = 1
    tokens_per_block: int = 32
    num_pages: int = 40_000
    prompt_tokens: int = 8192
    num_shared: int = 6
    vocabulary: int = 128_000
    requests: int = 60


def prompts(work: Workload) -> Iterator[TokenIds]:
    """The prompts that the peer makes from the same seed."""
    rng = random.Random(work.seed)
    half = work.prompt_tokens // 2

    def draw(count: int) -> list[int]:
        return [rng.randrange(work.vocabulary) for _ in range(count)]

    shared = [draw(half) for _ in range(work.num_shared)]
    for number in range(work.requests):
        yield np.array(shared[number % work.num_shared] + draw(work.prompt_tokens - half), dtype=np.int32)


class Cache:
    """Our manager, with the sink that feeds the event stream. All that depends on its constructor is here."""

    def __init__(self, work: Workload, *, events: bool = True) -> None:
        layer = LayerCacheSpec(layer_index=0, num_kv_heads=1, head_dim=1, dtype="float16")
        layout = PageLayout.build(CacheRequirements((layer,)), work.tokens_per_block)
        self._sink = StreamSink(work.tokens_per_block) if events else None
        device = CpuDevice(work.num_pages * layout.pools[0].page_bytes)
        num_pages = [[work.num_pages]]
        storage = Storage(layout, num_pages, ("gpu",), device)
        self.manager = KvCacheManager(layout, storage, num_pages, CacheSettings(max_util_for_resume=1.0), self._sink)
        self._scope = ReuseScope()

    def serve(self, token_ids: TokenIds) -> tuple[list[int], int]:
        """One request through all phases: CPU nanoseconds of each, and its cached tokens."""
        manager, clock = self.manager, time.process_time_ns
        begin = clock()
        keys = manager.block_keys(self._scope, token_ids)
        hashed = clock()
        sequence = manager.create(self._scope, token_ids, "request", block_keys=keys)
        matched = clock()
        if not (sequence.resume() and sequence.resize(len(token_ids))):
            raise RuntimeError("the cache has no room")
        allocated = clock()
        sequence.commit(token_ids[sequence.committed :])
        committed = clock()
        sequence.close()
        freed = clock()
        self.take_events()
        told = clock()
        marks = (begin, hashed, matched, allocated, committed, freed, told)
        return [after - before for before, after in itertools.pairwise(marks)], sequence.num_cached_tokens

    def take_events(self) -> None:
        """What the publisher does after every step."""
        events: list[KvEvent] = self._sink.take() if self._sink is not None else []
        if events:
            encode_batch(EventBatch(0.0, events, 0))

    def fill(self, work: Workload) -> None:
        """Cache blocks of prompts that share nothing until no page is free."""
        rng = np.random.default_rng(work.seed)
        while self.manager.stats().free >= work.prompt_tokens // work.tokens_per_block:
            self.serve(rng.integers(0, work.vocabulary, work.prompt_tokens, dtype=np.int32))


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def our_round(work: Workload, *, full: bool = False) -> tuple[list[list[int]], int]:
    """Nanoseconds by request and phase, and the tokens that hit, in a new cache; ``full``: one without a free page."""
    cache = Cache(work)
    if full:
        cache.fill(work)
    with no_garbage_collection():
        results = [cache.serve(token_ids) for token_ids in prompts(work)]
    cache.manager.close()
    return [row for row, _ in results], sum(hits for _, hits in results)


def warm_us(rows: Sequence[Sequence[int]]) -> dict[str, float]:
    """Median microseconds by phase, and of the whole request."""
    warm = rows[WARM_FROM:]
    medians = {
        name: statistics.median(column) / 1e3 for name, column in zip(PHASES, zip(*warm, strict=True), strict=True)
    }
    return {**medians, "request": statistics.median(map(sum, warm)) / 1e3}


def middle(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Median over rounds, by phase."""
    return {name: round(statistics.median(each[name] for each in rounds), 1) for name in rounds[0]}


@contextmanager
def vllm_rounds(
    work: Workload, sources: Path, python: Path
) -> Iterator[Callable[[], tuple[list[list[int]], int]] | None]:
    """A function that runs one round of vLLM's manager; None where it is not installed."""
    if not (sources / "vllm").is_dir() or not python.is_file():
        yield None
        return
    script = Path(__file__).parent / "peers" / "vllm_cache_manager.py"
    process = subprocess.Popen(
        [python, script, sources, json.dumps(work._asdict())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    asked, answers = process.stdin, process.stdout

    def read() -> dict[str, Any]:
        line = answers.readline()
        if not line:
            raise RuntimeError("vLLM's manager did not answer; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def one_round() -> tuple[list[list[int]], int]:
        print("round", file=asked, flush=True)
        answer = read()
        return answer["rows"], answer["hit_tokens"]

    try:
        read()
        yield one_round
    finally:
        asked.close()
        answers.close()
        process.wait()


def in_a_process(function: Callable[..., Any], *arguments: object) -> Any:
    """The result of one of the functions below in a new process, where nothing was allocated before."""
    output = subprocess.run(
        [sys.executable, __file__, "--part", function.__name__, json.dumps(arguments)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    return json.loads(output)


def measure_growth(num_pages: int, rounds: int) -> dict[str, float]:
    """Microseconds by phase with ``num_pages`` pages, all cached before."""
    work = Workload(num_pages=num_pages)
    return middle([warm_us(our_round(work, full=True)[0]) for _ in range(rounds)])


def measure_memory(num_pages: int, events: bool) -> tuple[float, float]:
    """Bytes of bookkeeping per cached page: what the process grew by in the end, and at most. No page was written."""
    work = Workload(num_pages=num_pages)
    Cache(Workload(num_pages=1000), events=events).fill(Workload(num_pages=1000))
    gc.collect()
    before = resident_bytes()
    cache = Cache(work, events=events)
    cache.fill(work)
    gc.collect()
    grown = resident_bytes() - before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    cached = cache.manager.stats().cached_blocks
    return round(grown / cached, 1), round(peak / cached, 1)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


PARTS = {function.__name__: function for function in (measure_growth, measure_memory)}


def compare(work: Workload, rounds: int, sources: Path, python: Path) -> dict[str, Any]:
    """Rounds of both managers in turns."""
    ours, theirs, ratios = [], [], []
    with vllm_rounds(work, sources, python) as vllm_round:
        for _ in range(rounds):
            rows, hits = our_round(work)
            ours.append(warm_us(rows))
            if vllm_round is not None:
                rows, their_hits = vllm_round()
                if abs(hits - their_hits) > 0.01 * their_hits:
                    raise RuntimeError(f"{hits} tokens hit here and {their_hits} in vLLM: not the same workload")
                theirs.append(warm_us(rows))
                ratios.append(ours[-1]["request"] / theirs[-1]["request"])
    return {
        "us": middle(ours),
        "vllm_us": middle(theirs) if theirs else None,
        "cpu_ratio_vs_vllm": round(statistics.median(ratios), 3) if ratios else None,
        "cpu_ratio_vs_vllm_range": [round(min(ratios), 3), round(max(ratios), 3)] if ratios else None,
        "cpu_ratio_target": TARGET_RATIO,
        **({} if ratios else {"vllm": f"not installed: no {sources}/vllm or no {python}; see the head of this file"}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each manager")
    parser.add_argument("--pages", default="10000,100000,1000000", help="cache sizes for growth, comma-separated")
    parser.add_argument("--vllm", type=Path, default=PEERS / "vllm_src", help="folder with vLLM's package")
    parser.add_argument("--vllm-python", type=Path, default=PEERS / "vllm_env/bin/python", help="its interpreter")
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        name, arguments = options.part
        print(json.dumps(PARTS[name](*json.loads(arguments))))
        return
    result = compare(Workload(), options.rounds, options.vllm, options.vllm_python)
    growth = {}
    for size in map(int, options.pages.split(",")):
        growth[size] = in_a_process(measure_growth, size, 3 if size < MILLION else 1)
    result["growth"] = {str(size): row["request"] for size, row in growth.items()}
    result["growth_us"] = {str(size): row for size, row in growth.items()}
    result["growth_ratio"] = round(growth[max(growth)]["request"] / growth[min(growth)]["request"], 2)
    for name, events in (("bytes_per_cached_page", False), ("bytes_per_cached_page_with_events", True)):
        result[name], result[f"{name}_peak"] = in_a_process(measure_memory, MILLION, events)
    result["bytes_per_cached_page_target"] = MAX_BYTES_PER_PAGE
    print_table(result)
    print(json.dumps(result))


def print_table(result: dict[str, Any]) -> None:
    rows = {"ours": result["us"], "vLLM": result["vllm_us"]}
    rows |= {f"ours, {size} pages, all cached": row for size, row in result["growth_us"].items()}
    print(f"{'CPU us per request':32}" + "".join(f"{name:>10}" for name in (*PHASES, "request")))
    for label, row in rows.items():
        if row is not None:
            print(f"{label:32}" + "".join(f"{row[name]:10.1f}" for name in (*PHASES, "request")))
    ratio = result["cpu_ratio_vs_vllm"]
    print(f"ratio to vLLM: {ratio} (target {TARGET_RATIO})" if ratio else result["vllm"])
    for name, label in (("bytes_per_cached_page", ""), ("bytes_per_cached_page_with_events", ", with the event sink")):
        print(f"bytes of bookkeeping per cached page{label}: {result[name]}, at most {result[name + '_peak']}", end=" ")
        print(f"(target {MAX_BYTES_PER_PAGE})")


if __name__ == "__main__":
    main()
