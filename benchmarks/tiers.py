"""Moves pages between the cache's levels and compares with memcpy of as many bytes in the same run.

For every pair of levels (device to host and back, device to disk and back) and page size: scattered pages to scattered
slots, through the whole storage, checksums included. Each move is timed between two plain copies of the same number of
bytes, and the ratio is the median over these triples, so that a busy machine disturbs it least. The device is the CPU.
Files are not synced, so a disk move is a move to and from the system's page cache. The last line is one JSON object.

    python benchmarks/tiers.py [--mib 128] [--rounds 15] [--threads 1] [--disk-path DIRECTORY]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvmesh.cache.device import CpuDevice
from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, PageLayout
from kvmesh.cache.storage import Storage
from kvmesh.kernels import ops

PAGES_KIB = (64, 512)
TIERS = ("gpu", "host", "disk")
NAMES = ("device", "host", "disk")
MOVES = ((0, 1), (1, 0), (0, 2), (2, 0))
WARM_UP = 2


def one_pool(page_bytes: int) -> PageLayout:
    """A layout whose only pool has pages of ``page_bytes``."""
    layers = page_bytes // (2 * 4 * 16 * 64 * 4)  # K and V, 4 heads, 16 tokens of 64 float32
    specs = tuple(LayerCacheSpec(layer_index=i, num_kv_heads=4, head_dim=64, dtype="float32") for i in range(layers))
    layout = PageLayout.build(CacheRequirements(specs), 16)
    assert layout.pools[0].page_bytes == page_bytes
    return layout


def memcpy_s(target: np.ndarray, source: np.ndarray) -> float:
    """Seconds of one plain copy."""
    start_s = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - start_s


def measure(page_bytes: int, *, nbytes: int, rounds: int, disk_path: Path) -> list[dict[str, Any]]:
    """One row for each pair of levels."""
    moving = nbytes // page_bytes
    slots = 2 * moving
    generator = np.random.default_rng(0)
    device = CpuDevice(slots * page_bytes)
    storage = Storage(one_pool(page_bytes), [[slots]] * len(TIERS), TIERS, device, disk_path=disk_path)
    pages = storage.pools[0].array
    pages[:] = generator.integers(0, 256, len(pages), dtype=np.uint8)
    everything = np.arange(slots, dtype=np.int32)
    for level in (1, 2):
        storage.move(0, 0, everything, level, everything)
    source, target = np.ones(nbytes, dtype=np.uint8), np.zeros(nbytes, dtype=np.uint8)
    ratios: dict[tuple[int, int], list[float]] = {move: [] for move in MOVES}
    seconds: dict[tuple[int, int], list[float]] = {move: [] for move in MOVES}
    for number in range(WARM_UP + rounds):
        for move in MOVES:
            here, there = (generator.permutation(slots)[:moving].astype(np.int32) for _ in range(2))
            before_s = memcpy_s(target, source)
            start_s = time.perf_counter()
            arrived = storage.move(0, move[0], here, move[1], there)
            took_s = time.perf_counter() - start_s
            after_s = memcpy_s(target, source)
            if not arrived.all():
                raise RuntimeError("a page was damaged")
            if number >= WARM_UP:
                ratios[move].append((before_s + after_s) / 2 / took_s)
                seconds[move].append(took_s)
    storage.close()
    return [
        {
            "move": f"{NAMES[move[0]]} to {NAMES[move[1]]}",
            "page_bytes": page_bytes,
            "pages": moving,
            "ratio_vs_memcpy": round(statistics.median(ratios[move]), 3),
            "gb_per_s": round(nbytes / statistics.median(seconds[move]) / 1e9, 2),
        }
        for move in MOVES
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=128, help="bytes of one move, in MiB")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1, help="threads of a move in memory; memcpy uses one")
    parser.add_argument("--disk-path", type=Path, help="where the disk tier is; a temporary directory by default")
    options = parser.parse_args()
    ops.set_num_threads(options.threads)
    rows = []
    with tempfile.TemporaryDirectory(dir=options.disk_path) as directory:
        for kib in PAGES_KIB:
            found = measure(kib << 10, nbytes=options.mib << 20, rounds=options.rounds, disk_path=Path(directory))
            for row in found:
                print(
                    f"{row['move']:14} {kib:4} KiB x {row['pages']:5}  {row['ratio_vs_memcpy']:5.2f} of memcpy  "
                    f"{row['gb_per_s']:6.2f} GB/s",
                    flush=True,
                )
            rows += found
    ratio = {(row["move"], row["page_bytes"]): row["ratio_vs_memcpy"] for row in rows}
    print(
        json.dumps(
            {
                "benchmark": "tiers",
                "machine": platform.machine(),
                "threads": options.threads,
                "offload_ratio_vs_memcpy": ratio["device to host", PAGES_KIB[0] << 10],
                "onboard_ratio_vs_memcpy": ratio["host to device", PAGES_KIB[0] << 10],
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
