"""The prefix index and the indexer process against Dynamo's, on one core.

``index``: ``kvmesh.events.index.PrefixIndex`` and ``dynamo.llm.RadixTree`` are given the same events and asked the same
questions (``benchmarks/peers/index_workload.py``), for prompts of 2k, 8k and 64k tokens on 8 and 64 workers that hold a
million blocks together. Each side is a process of its own under its own project's interpreter, both of them pinned to
the same core, so that neither shares its heap or its modules with the other; phases take turns in random order, and the
processor time of all threads is taken inside, without the garbage collector. The interpreters are of one version, which
is printed. What either is given was made before. A stored event is the engine's hash and the hash of the tokens of each
block: to us as arrays, to Dynamo's tree as JSON, its only form. ``stored_from_tokens`` gives us the token ids instead,
which we hash, as of the events of engines; Dynamo's tree takes hashes only, so that its time is the same. A question is
the rolling hashes of its blocks (Dynamo's: their local hashes). ``tokens`` starts at token ids on both sides. All
answers must be equal, question by question, before the removals and after them. Memory is what the process grows by.

``path``: ``kvmesh indexer`` and ``python -m dynamo.indexer`` hear the same messages over ZMQ, one after the other
(``benchmarks/peers/indexer_path.py``): processor time and memory of a block, and of a question of 2048 tokens over HTTP
and on our match socket.

Ratios are medians over rounds, and geometric means over cells. ``make peers ARGS=dyn`` sets Dynamo up. The last line is
one JSON object; docs/indexer.md has its keys.

    python benchmarks/indexer.py [--parts index,path] [--cells 2048x8,65536x64] [--held 1000000] [--rounds 3] [--core 1]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from peers.index_cells import Cell, compare_cell, geometric_mean
from peers.indexer_path import SHAPES, Shape, compare_paths, path_ratios

PEERS = Path(os.environ.get("PEERS", "~/.cache/kvmesh-peers")).expanduser()
CELLS = "2048x8,2048x64,8192x8,8192x64,65536x8,65536x64"

TARGETS = {
    "lookup_hit_ratio_vs_dynamo": ("at most", 0.1),
    "lookup_miss_ratio_vs_dynamo": ("at most", 0.04),
    "stored_ratio_vs_dynamo": ("at least", 4.0),
    "removed_ratio_vs_dynamo": ("at least", 4.0),
    "memory_ratio_vs_dynamo": ("at most", 1.0),
    "hash_list_ratio_vs_dynamo": ("at least", 5.0),
    "hash_int32_ratio_vs_dynamo": ("at least", 5.0),
    "ingest_cpu_ratio_vs_dynamo": ("at least", 2.0),
    "query_match_cpu_1_ratio_vs_dynamo": ("at least", 3.0),
    "query_match_cpu_16_ratio_vs_dynamo": ("at least", 3.0),
    "query_http_cpu_1_ratio_vs_dynamo": ("at most", 1.0),
    "query_http_cpu_16_ratio_vs_dynamo": ("at most", 1.0),
}
"""Of the geometric means. Look-ups, memory and HTTP: ours by Dynamo's; the rest: how many times faster ours is."""

COLUMNS = {
    "full": "hit",
    "system": "part",
    "cold": "miss",
    "tokens": "tokens",
    "stored_event": "stored",
    "stored_event_tokens": "from tokens",
    "removed_event": "removed",
    "hash_list": "hash list",
    "hash_int32": "int32",
}


def print_cell(result: dict[str, Any]) -> None:
    """Microseconds of both sides, and the ratios."""
    cell = Cell(*(result[name] for name in Cell._fields))
    print(
        f"{cell}: {result['held_blocks']} blocks held, {result['unique_blocks']} different, answers {result['answers']}"
    )
    for name, times in result["us"].items():
        columns = "  ".join(f"{title} {times[key]:.2f}" for key, title in COLUMNS.items() if key in times)
        print(f"    {name:8s} us: {columns}  bytes a block {result['bytes_per_block'][name]:.1f}")
    print_ratios(result["ratios"])


def print_path(shape: Shape, taken: dict[str, dict[str, list[float]]], ratios: dict[str, float]) -> None:
    """Medians of both sides, and the ratios."""
    print(f"path, {shape}:")
    for name, figures in taken.items():
        print(
            f"    {name:8s} " + "  ".join(f"{key} {statistics.median(values):.2f}" for key, values in figures.items())
        )
    print_ratios(ratios)


def print_ratios(ratios: dict[str, float]) -> None:
    print("    ratios    " + "  ".join(f"{name} {value:.3f}" for name, value in ratios.items()), flush=True)


def means(parts: list[dict[str, float]]) -> dict[str, float]:
    """Geometric means, under the names of the summary."""
    return {
        f"{name}_ratio_vs_dynamo": round(geometric_mean([part[name] for part in parts]), 4)
        for name in (parts[0] if parts else ())
    }


def met(name: str, value: float) -> bool:
    """Whether a target is."""
    direction, target = TARGETS[name]
    return value <= target if direction == "at most" else value >= target


def version_of(python: Path) -> str:
    command = [str(python), "-c", "import platform; print(platform.python_version())"]
    return str(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout).strip()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = sorted(os.sched_getaffinity(0))
    parser.add_argument("--parts", default="index,path", help="what to measure")
    parser.add_argument("--cells", default=CELLS, help="prompt tokens x workers, comma-separated")
    parser.add_argument("--held", type=int, default=1_000_000, help="blocks held, counted for each worker")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--path-blocks", type=int, default=200_000, help="blocks published")
    parser.add_argument("--shapes", default="0,1,2,3", help=f"of messages: {', '.join(map(str, SHAPES))}")
    parser.add_argument("--core", type=int, default=cores[-1], help="where what is measured runs")
    parser.add_argument("--dynamo-python", type=Path, default=PEERS / "dyn/bin/python", help="its interpreter")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if not options.dynamo_python.is_file():
        print(f"no Dynamo at {options.dynamo_python}: make peers ARGS=dyn sets it up", file=sys.stderr)
        print(json.dumps({"skipped": "Dynamo is not installed"}))
        return
    others = os.sched_getaffinity(0) - {options.core}
    os.sched_setaffinity(0, others or {options.core})
    versions = {"kvmesh": platform.python_version(), "dynamo": version_of(options.dynamo_python)}
    print("Python: " + ", ".join(f"{name} {version}" for name, version in versions.items()), flush=True)
    cells: list[dict[str, Any]] = []
    paths: list[dict[str, Any]] = []
    if "index" in options.parts.split(","):
        for text in options.cells.split(","):
            tokens, workers = map(int, text.split("x"))
            cell = Cell(tokens, workers, options.held)
            cells.append(compare_cell(cell, options.dynamo_python, rounds=options.rounds, core=options.core))
            print_cell(cells[-1])
    if "path" in options.parts.split(","):
        for shape in (SHAPES[int(number)] for number in options.shapes.split(",")):
            taken = compare_paths(
                shape, options.dynamo_python, blocks=options.path_blocks, rounds=options.rounds, core=options.core
            )
            paths.append({**shape._asdict(), "figures": taken, "ratios": path_ratios(taken)})
            print_path(shape, taken, paths[-1]["ratios"])
    summary = means([cell["ratios"] for cell in cells]) | means([path["ratios"] for path in paths])
    for name, (direction, target) in TARGETS.items():
        if (value := summary.get(name)) is not None:
            print(f"{name:36s} {value:8.3f}  {direction} {target}: {'met' if met(name, value) else 'MISSED'}")
    print(
        json.dumps(
            {
                **summary,
                "targets_met": all(met(name, summary[name]) for name in TARGETS if name in summary),
                "python": versions,
                "machine": platform.processor() or platform.machine(),
                "rounds": options.rounds,
                "cells": cells,
                "paths": paths,
            }
        )
    )


if __name__ == "__main__":
    main()
