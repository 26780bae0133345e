"""How the index and the indexer scale: with blocks, with workers, and what a fleet asks of them.

* ``blocks``: 64 workers with prompts of 8k tokens that hold from 10^5 to 10^7 blocks together;
* ``workers``: a million blocks held by 8 to 4096 workers with prompts of 2k tokens;
* ``process``: what a block and a question cost a whole ``kvmesh indexer``, ZMQ included, by how blocks are packed;
* ``fleet``: from these, the cores that a fleet needs: every request brings and evicts some blocks and asks once.

The workload is that of benchmarks/indexer.py (benchmarks/peers/index_workload.py), stored events with token ids. Each
size has a process of its own on one core; times are processor time, medians over rounds. With --plots the curves are
written as SVG. The last line is one JSON object; docs/scale.md explains it.

    python benchmarks/indexer_scale.py [--blocks 1e5,3e5,1e6,3e6,1e7] [--workers 8,64,512,4096] [--plots docs/images]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from peers.index_cells import Cell, side
from peers.index_workload import generate, save
from peers.indexer_path import Shape, kvmesh_indexer, make_stream, measure

QUERIES = 600
BLOCKS = "1e5,3e5,1e6,3e6,1e7"
WORKERS = "8,64,512,4096"
PATH_BLOCKS = 200_000
SHAPES = (Shape(1, 64, True), Shape(8, 8, True), Shape(64, 1, True))

BLOCK_TOKENS = 16
QUESTION_TOKENS = 2048
USABLE = 0.5
"""Share of a core that a plan may count on: bursts, and restarts that replay, need the rest."""


class Requests(NamedTuple):
    """What one request of a fleet is like."""

    name: str
    prompt_tokens: int
    reused: float
    """Share of the prompt that is cached already."""
    output_tokens: int

    @property
    def changed_blocks(self) -> float:
        """Blocks that it stores; in a full cache it evicts as many."""
        return (self.prompt_tokens * (1 - self.reused) + self.output_tokens) / BLOCK_TOKENS


FLEETS = (
    Requests("chat: 2k prompt, 70 % reused, 300 out", 2_000, 0.7, 300),
    Requests("retrieval: 8k prompt, 40 % reused, 300 out", 8_000, 0.4, 300),
    Requests("agents: 32k prompt, 95 % reused, 500 out", 32_000, 0.95, 500),
)


def measure_cell(cell: Cell, rounds: int, core: int) -> dict[str, Any]:
    """Rates of one core, and memory, at one size."""
    workload = generate(cell.held_blocks, cell.workers, cell.prompt_tokens, queries=QUERIES)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "workload.npz"
        save(workload, path)
        with side("kvmesh", Path(sys.executable), path, core) as index:
            memory = index.ask("memory")["bytes"] / workload.held_blocks
            taken: dict[str, list[float]] = {}
            answers: list[list[Any]] = []
            for number in range(rounds):
                for do in ("fill_tokens", "fill", "lookup", "answers", "remove", "drop"):
                    if do == "answers":
                        answers = answers if number else index.ask(do)
                        continue
                    for key, value in index.ask(do).items():
                        taken.setdefault(do if key == "s" else key, []).append(value)
    seconds = {key: statistics.median(values) for key, values in taken.items()}
    stored, removed = workload.stored, workload.removed
    return {
        **cell._asdict(),
        "held_blocks": workload.held_blocks,
        "bytes_per_block": memory,
        "stored_blocks_per_s": int((stored[:, 2] - stored[:, 1]).sum()) / seconds["fill_tokens"],
        "removed_blocks_per_s": int((removed[:, 2] - removed[:, 1]).sum()) / seconds["remove"],
        "stored_events_per_s": len(stored) / seconds["fill_tokens"],
        "removed_events_per_s": len(removed) / seconds["remove"],
        "hit_us": seconds["full"] * 1e6,
        "miss_us": seconds["cold"] * 1e6,
        "hit_from_tokens_us": seconds["tokens"] * 1e6,
        "workers_in_an_answer": statistics.fmean(len(answer) for answer in answers if answer),
    }


def measure_process(shape: Shape, core: int) -> dict[str, Any]:
    """Processor time of a whole indexer, for each block and question."""
    stream = make_stream(shape, PATH_BLOCKS)
    figures = measure(partial(kvmesh_indexer, core=core), stream, lambda ids: {"model": "default", "token_ids": ids})
    return {"events": shape.events, "blocks": shape.blocks, **figures}


def plan(rate: float, fleet: Requests, block_us: float, question_us: float) -> dict[str, float]:
    """Cores of indexers that ``rate`` requests a second ask for.

    On the safe side: removals count as dear as stores, and a question grows with its prompt from 2048 tokens on.
    """
    ingest = rate * 2 * fleet.changed_blocks * block_us / 1e6
    questions = rate * question_us * max(1.0, fleet.prompt_tokens / QUESTION_TOKENS) / 1e6
    return {"ingest_cores": ingest, "question_cores": questions, "cores": (ingest + questions) / USABLE}


def print_cell(result: dict[str, Any]) -> None:
    stored, removed = (result[f"{what}_blocks_per_s"] / 1e6 for what in ("stored", "removed"))
    print(
        f"{result['held_blocks']:9d} blocks, {result['workers']:5d} workers: stored {stored:.2f}, "
        f"removed {removed:.2f} Mblocks/s, hit {result['hit_us']:.2f} us "
        f"({result['workers_in_an_answer']:.1f} workers; from tokens {result['hit_from_tokens_us']:.2f}), "
        f"miss {result['miss_us']:.2f} us, {result['bytes_per_block']:.1f} bytes a block",
        flush=True,
    )


def draw(results: dict[str, Any], folder: Path) -> None:
    """The curves."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kvmesh", "font.size": 9, "axes.grid": True})
    from matplotlib import pyplot as plt

    def chart(name: str, lines: dict[str, tuple[Sequence[float], Sequence[float]]], labels: tuple[str, str]) -> None:
        figure, axes = plt.subplots(figsize=(5.6, 3.4), layout="constrained")
        for label, (x, y) in lines.items():
            axes.plot(x, y, marker="o", markersize=3, label=label)
        axes.set(xscale="log", yscale="log", xlabel=labels[0], ylabel=labels[1])
        axes.legend()
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)

    folder.mkdir(parents=True, exist_ok=True)
    for axis, key, what in (("blocks", "held_blocks", "blocks held"), ("workers", "workers", "workers")):
        cells = results[axis]
        x = [cell[key] for cell in cells]
        rates = {
            "blocks stored": [cell["stored_blocks_per_s"] for cell in cells],
            "blocks removed": [cell["removed_blocks_per_s"] for cell in cells],
            "look-ups, hit": [1e6 / cell["hit_us"] for cell in cells],
            "look-ups, miss": [1e6 / cell["miss_us"] for cell in cells],
        }
        chart(f"scale-{axis}", {label: (x, y) for label, y in rates.items()}, (what, "a second and core"))
    cells = results["blocks"]
    memory = [cell["bytes_per_block"] * cell["held_blocks"] / 2**20 for cell in cells]
    chart("scale-memory", {"index": ([cell["held_blocks"] for cell in cells], memory)}, ("blocks held", "MiB"))
    rates_per_s = (10.0, 100.0, 1_000.0, 10_000.0)
    fleets: dict[str, tuple[Sequence[float], Sequence[float]]] = {
        fleet.name: (
            rates_per_s,
            [plan(rate, fleet, results["block_us"], results["question_us"])["cores"] for rate in rates_per_s],
        )
        for fleet in FLEETS
    }
    chart("scale-fleet", fleets, ("requests a second", "cores"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = sorted(os.sched_getaffinity(0))
    parser.add_argument("--blocks", default=BLOCKS, help="blocks held, comma-separated")
    parser.add_argument("--workers", default=WORKERS, help="comma-separated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--core", type=int, default=cores[-1], help="where what is measured runs")
    parser.add_argument("--plots", type=Path, help="folder for the curves")
    options = parser.parse_args()
    others = os.sched_getaffinity(0) - {options.core}
    os.sched_setaffinity(0, others or {options.core})
    results: dict[str, Any] = {"blocks": [], "workers": [], "process": []}
    for held in map(int, map(float, options.blocks.split(","))):
        results["blocks"].append(measure_cell(Cell(8192, 64, held), options.rounds, options.core))
        print_cell(results["blocks"][-1])
    for workers in map(int, options.workers.split(",")):
        results["workers"].append(measure_cell(Cell(2048, workers, 1_000_000), options.rounds, options.core))
        print_cell(results["workers"][-1])
    for shape in SHAPES:
        results["process"].append(measure_process(shape, options.core))
        figures = results["process"][-1]
        print(f"process, {shape}: {figures['block_us']:.2f} us a block, {figures['match_16_us']:.1f} us a question")
    # Engines tell a prompt's blocks in one event and an answer's one by one; the middle is what plans count with.
    results["block_us"] = results["process"][len(SHAPES) // 2]["block_us"]
    results["question_us"] = statistics.median(figures["match_16_us"] for figures in results["process"])
    results["fleet"] = {
        fleet.name: {
            "changed_blocks_per_request": fleet.changed_blocks,
            **plan(1_000, fleet, results["block_us"], results["question_us"]),
        }
        for fleet in FLEETS
    }
    for name, figures in results["fleet"].items():
        print(f"1000 requests/s, {name}: " + ", ".join(f"{key} {value:.2f}" for key, value in figures.items()))
    if options.plots is not None:
        draw(results, options.plots)
    print(json.dumps({**results, "python": platform.python_version(), "machine": platform.machine()}))


if __name__ == "__main__":
    main()
