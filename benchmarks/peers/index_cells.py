"""Our prefix index and Dynamo's RadixTree on one workload after another, phases taking turns in random order."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from peers.index_workload import Workload, generate, save

__all__ = ["Cell", "compare_cell", "geometric_mean"]

HERE = Path(__file__).parent
SIDES = ("kvmesh", "dynamo")
QUERY_BLOCKS = 2_500_000
"""Of all questions together, at most."""
MAX_QUERIES = 2400


class Cell(NamedTuple):
    """One workload."""

    prompt_tokens: int
    workers: int
    held_blocks: int

    def __str__(self) -> str:
        return f"{self.prompt_tokens:6d} tokens, {self.workers:3d} workers"


class SideProcess:
    """An index_side.py."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, do: str) -> Any:
        """The answer to one command."""
        assert self._process.stdin is not None
        print(json.dumps({"do": do}), file=self._process.stdin, flush=True)
        return self.read()

    def read(self) -> Any:
        """The next answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a side of the comparison has ended; its error is above")
        return json.loads(line)


@contextmanager
def side(name: str, python: Path, workload: Path, core: int) -> Iterator[SideProcess]:
    """One side, running."""
    process = subprocess.Popen(
        [python, HERE / "index_side.py", name, workload, str(core)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "DYN_LOG": "error"},
    )
    assert process.stdin is not None
    try:
        running = SideProcess(process)
        running.read()
        yield running
    finally:
        process.stdin.close()
        if process.stdout is not None:
            process.stdout.close()
        process.wait()


def compare_cell(cell: Cell, dynamo_python: Path, *, rounds: int, core: int) -> dict[str, Any]:
    """Times of both sides by round.

    Raises:
        RuntimeError: the sides answer differently.
    """
    queries = min(MAX_QUERIES, QUERY_BLOCKS * 16 // cell.prompt_tokens)
    workload = generate(cell.held_blocks, cell.workers, cell.prompt_tokens, queries=queries)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder) / "workload.npz"
        save(workload, path)
        pythons = {"kvmesh": Path(sys.executable), "dynamo": dynamo_python}
        sides = {name: stack.enter_context(side(name, pythons[name], path, core)) for name in SIDES}
        memory = {name: sides[name].ask("memory")["bytes"] / workload.held_blocks for name in SIDES}
        taken: dict[str, dict[str, list[float]]] = {name: {} for name in SIDES}
        checksums = []
        for number in range(rounds):
            for do in ("fill_tokens", "fill", "lookup", "answers", "remove", "answers", "drop"):
                if do == "answers":
                    if number == 0:
                        checksums.append(_same_answers(cell, sides))
                    continue
                for name in random.sample(SIDES, len(SIDES)):
                    for key, value in sides[name].ask(do).items():
                        taken[name].setdefault(do if key == "s" else key, []).append(value)
        for _ in range(rounds):
            for name in random.sample(SIDES, len(SIDES)):
                for form, value in sides[name].ask("hash").items():
                    taken[name].setdefault(f"hash_{form}", []).append(value)
    return _result(cell, workload, taken, memory, checksums)


def _same_answers(cell: Cell, sides: dict[str, SideProcess]) -> str:
    """Checksum of all answers."""
    ours, theirs = (sides[name].ask("answers") for name in SIDES)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one != other:
            raise RuntimeError(f"{cell}: question {number} is answered {one} by kvmesh and {other} by dynamo")
    if not any(ours):
        raise RuntimeError(f"{cell}: no question has matched anything")
    return hashlib.sha256(json.dumps(ours).encode()).hexdigest()[:16]


def _result(
    cell: Cell,
    workload: Workload,
    taken: dict[str, dict[str, list[float]]],
    memory: dict[str, float],
    checksums: list[str],
) -> dict[str, Any]:
    for times in taken.values():
        # In the proportion in which they are asked.
        times["hit"] = [(2 * full + system) / 3 for full, system in zip(times["full"], times["system"], strict=True)]
    ours, theirs = taken["kvmesh"], taken["dynamo"]

    def time_ratio(kind: str, their_kind: str | None = None) -> float:
        pairs = zip(ours[kind], theirs[their_kind or kind], strict=True)
        return statistics.median(one / other for one, other in pairs)

    stored, removed = len(workload.stored), len(workload.removed)
    return {
        **cell._asdict(),
        "unique_blocks": sum({(begin, end): end - begin for _, begin, end, _ in workload.stored.tolist()}.values()),
        "stored_events": stored,
        "removed_events": removed,
        "questions": len(workload.queries),
        "answers": checksums,
        "us": {
            name: {
                **{kind: statistics.median(times[kind]) * 1e6 for kind in ("full", "system", "cold", "hit", "tokens")},
                "stored_event": statistics.median(times["fill"]) / stored * 1e6,
                **(
                    {"stored_event_tokens": statistics.median(times["fill_tokens"]) / stored * 1e6}
                    if "fill_tokens" in times
                    else {}
                ),
                "removed_event": statistics.median(times["remove"]) / removed * 1e6,
                **{kind: statistics.median(values) * 1e6 for kind, values in times.items() if kind.startswith("hash")},
            }
            for name, times in taken.items()
        },
        "bytes_per_block": memory,
        "ratios": {
            "lookup_hit": time_ratio("hit"),
            "lookup_miss": time_ratio("cold"),
            "lookup_from_tokens": time_ratio("tokens"),
            "stored": 1 / time_ratio("fill"),
            "stored_from_tokens": 1 / time_ratio("fill_tokens", "fill"),
            "removed": 1 / time_ratio("remove"),
            "memory": memory["kvmesh"] / memory["dynamo"],
            "hash_list": 1 / time_ratio("hash_list"),
            "hash_int32": 1 / time_ratio("hash_int32", "hash_list"),
        },
    }


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers."""
    return math.exp(statistics.fmean(map(math.log, values)))
