"""Moves a prompt's pages between two engine processes, and compares with memcpy and with the library alone.

For every way (backend, runtime, bounce) and page size, through the whole session layer (ticket, control round trip,
move, acknowledgement), checksums off and on: scattered pages, contiguous pages, and one page. A round is a plain copy
of as many bytes on one thread, the transfer, another plain copy, and the same pages by the library that the way uses,
between two processes of its own (benchmarks/peers/raw_transfer.py). Ratios are medians over rounds, so that a busy
machine disturbs them least. On shared memory there is no library: the kernel that copies the pages runs alone, and
what the session adds is small against the disturbances of wall time, so that ratio is of processor time. Every page has
been moved before: the first transfer, whose pages the system still has to provide, is told apart. Then both engines are
left alone with no session open. A way whose library is missing is skipped with the reason.

The last line is one JSON object; docs/transfers.md has its keys.

    python benchmarks/transfer.py [--ways memfd,tcp,nixl] [--shapes 64KiB] [--mib 128] [--rounds 15] [--threads 1]
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).parent
IDLE_S = 5.0
MIB = 1 << 20


@dataclass(frozen=True)
class Shape:
    """A page size worth measuring."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    tokens_per_block: int


SHAPES = (
    Shape("64KiB", layers=2, kv_heads=4, head_dim=64, tokens_per_block=16),
    # SmolLM2-135M in float32: 1.41 MiB.
    Shape("SmolLM2", layers=30, kv_heads=3, head_dim=64, tokens_per_block=32),
    # Small enough that what a library does for each page counts.
    Shape("4KiB", layers=1, kv_heads=2, head_dim=64, tokens_per_block=4),
)
DEFAULT_SHAPES = ("64KiB", "SmolLM2")


@dataclass(frozen=True)
class Way:
    """How pages move."""

    backend: str
    runtime: str = "PYTHON"
    plane: str = "auto"
    bounce: bool = False
    library: str | None = None
    """What runs alone for comparison; None on shared memory."""
    modules: tuple[str, ...] = ()
    """One of them has to be installed."""
    launcher: tuple[str, ...] = field(default=())
    """What each engine is started with."""


NIXL = ("nixl_cu13", "nixl_cu12")
MPIEXEC = str(Path(sys.executable).with_name("mpiexec"))
WAYS = {
    "memfd": Way("DEFAULT", plane="memfd"),
    "memfd-bounce": Way("DEFAULT", plane="memfd", bounce=True),
    "tcp": Way("DEFAULT", plane="tcp", library="tcp"),
    "tcp-bounce": Way("DEFAULT", plane="tcp", bounce=True, library="tcp"),
    "nixl": Way("NIXL", library="nixl", modules=NIXL),
    "nixl-bounce": Way("NIXL", bounce=True, library="nixl", modules=NIXL),
    "cpp-builtin": Way("DEFAULT", "CPP"),
    "cpp-nixl": Way("NIXL", "CPP", library="nixl", modules=NIXL),
    "cpp-ucx": Way("UCX", "CPP", library="ucx", modules=("ucxx",)),
    "cpp-mooncake": Way("MOONCAKE", "CPP", library="mooncake", modules=("mooncake",)),
    "cpp-mpi": Way("MPI", "CPP", library="mpi", modules=("mpi4py",), launcher=(MPIEXEC, "-n", "1")),
}


class WayError(Exception):
    """A process of the benchmark did not start, or ended early."""


class Process:
    """A process that answers JSON lines with JSON lines."""

    def __init__(self, command: list[str], options: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [*command, json.dumps(options)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.facts = self.answer()

    def tell(self, **command: Any) -> None:
        """Send a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The next answer."""
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise WayError(f"a process ended with {self._process.wait(10)}; what it said is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self.tell(**command)
        return self.answer()

    def end(self) -> None:
        """Close its stdin and wait."""
        self._process.communicate(timeout=20)

    def kill(self) -> None:
        """End it now, if it still runs."""
        self._process.kill()
        self._process.communicate()


class Pair:
    """Two engines, and the library alone."""

    def __init__(self, way: Way, shape: Shape, *, nbytes: int, checksums: bool, threads: int) -> None:
        config: dict[str, Any] = {"backend": way.backend, "transceiver_runtime": way.runtime}
        if way.bounce:
            config["kv_cache_bounce_size_mb"] = -(-nbytes // MIB)
        options = {
            "config": config,
            "plane": way.plane,
            "shape": dataclasses.asdict(shape),
            "nbytes": nbytes,
            "checksums": checksums,
            "threads": threads,
        }
        command = [*way.launcher, sys.executable, str(HERE / "processes" / "transfer_engine.py")]
        self._processes: list[Process] = []
        self.context = self._start(command, {"role": "context", **options})
        self.generation = self._start(command, {"role": "generation", **options})
        self.pages, self.page_bytes = self.generation.facts["pages"], self.generation.facts["page_bytes"]
        self.library = None
        if way.library is not None:
            two = [MPIEXEC, "-n", "2"] if way.library == "mpi" else []
            raw = [*two, sys.executable, str(HERE / "peers" / "raw_transfer.py")]
            wanted = {"library": way.library, "pages": self.pages, "page_bytes": self.page_bytes}
            self.library = self._start(raw, wanted)

    def move(self, kind: str) -> dict[str, float]:
        """One transfer: wall and processor seconds until the pages may be used, and until their owner has let go."""
        handoff = self.context.ask(do="offer", kind=kind)
        self.context.tell(do="settle")
        moved = self.generation.ask(do="receive", kind=kind, **handoff)
        return {**moved, "released_s": self.context.answer()["at_s"] - moved["from_s"]}

    def memcpy_s(self) -> float:
        """Seconds of a plain copy."""
        return float(self.generation.ask(do="memcpy")["s"])

    def raw_s(self, kind: str) -> float | None:
        """Seconds of the library alone."""
        return None if self.library is None else float(self.library.ask(kind=kind)["s"])

    def kernel_cpu_s(self) -> float:
        """Processor seconds of the copying kernel alone."""
        return float(self.generation.ask(do="kernel")["s"])

    def idle_percent(self) -> float:
        """Share of a core of the busier engine without sessions."""
        for engine in (self.context, self.generation):
            engine.tell(do="idle", s=IDLE_S)
        return float(max(engine.answer()["core_percent"] for engine in (self.context, self.generation)))

    def end(self) -> None:
        """End all processes."""
        for process in reversed(self._processes):
            process.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for process in self._processes:
            process.kill()

    def _start(self, command: list[str], options: dict[str, Any]) -> Process:
        try:
            self._processes.append(Process(command, options))
        except WayError:
            self.__exit__()
            raise
        return self._processes[-1]


def measure(name: str, shape: Shape, *, rounds: int, latency_rounds: int, **options: Any) -> dict[str, Any]:
    """One row: ratios to memcpy and to the library, throughput, the latency of one page, and what idling takes."""
    with Pair(WAYS[name], shape, **options) as pair:
        return {"way": name, "page": shape.name, **_measure(pair, rounds, latency_rounds, options["checksums"])}


def _measure(pair: Pair, rounds: int, latency_rounds: int, checksums: bool) -> dict[str, Any]:
    moved = pair.pages * pair.page_bytes
    for _ in range(3):
        pair.memcpy_s()
    pair.move("one")  # Pairs the two.
    first_s = pair.move("scattered")["s"]
    pair.move("scattered")
    seconds: dict[str, list[float]] = {"scattered": [], "contiguous": []}
    ratios: dict[str, list[float]] = {"scattered": [], "contiguous": []}
    raws: dict[str, list[float]] = {"scattered": [], "contiguous": []}
    kernels: list[float] = []
    for _ in range(rounds):
        for kind, taken in seconds.items():
            before_s = pair.memcpy_s()
            move = pair.move(kind)
            taken.append(move["s"])
            ratios[kind].append((before_s + pair.memcpy_s()) / 2 / move["s"])
            if (raw_s := pair.raw_s(kind)) is not None:
                raws[kind].append(raw_s / move["s"])
            elif kind == "scattered":
                kernels.append(pair.kernel_cpu_s() / move["cpu_s"])
    ones = [pair.move("one") for _ in range(latency_rounds)]
    raw_latencies = [pair.raw_s("one") or 0.0 for _ in range(latency_rounds)] if pair.library is not None else []
    idle = pair.idle_percent()
    pair.end()
    return {
        "page_bytes": pair.page_bytes,
        "pages": pair.pages,
        "checksums": checksums,
        "ratio_vs_memcpy": _median(ratios["scattered"]),
        "contiguous_ratio_vs_memcpy": _median(ratios["contiguous"]),
        "ratio_vs_raw_copy": _median(kernels),
        "ratio_vs_library": _median(raws["scattered"]),
        "contiguous_ratio_vs_library": _median(raws["contiguous"]),
        "gib_per_s": round(moved / statistics.median(seconds["scattered"]) / 2**30, 2),
        "first_transfer_gib_per_s": round(moved / first_s / 2**30, 2),
        "page_latency_us_p50": round(statistics.median(one["s"] for one in ones) * 1e6),
        "page_round_trip_us_p50": round(statistics.median(one["released_s"] for one in ones) * 1e6),
        "library_one_page_us_p50": round(statistics.median(raw_latencies) * 1e6) if raw_latencies else None,
        "idle_core_percent": round(idle, 2),
    }


def _median(values: list[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None


def obstacle(way: Way) -> str | None:
    """Why this way cannot run here; None when it can."""
    if way.modules and not any(importlib.util.find_spec(module) for module in way.modules):
        return f"{' or '.join(way.modules)} is not installed"
    return None


def told(row: dict[str, Any]) -> str:
    """A row for people."""
    versus = (
        f"library {row['ratio_vs_library']} (contiguous {row['contiguous_ratio_vs_library']})"
        if row["ratio_vs_library"] is not None
        else f"raw copy {row['ratio_vs_raw_copy']}"
    )
    alone_us = row["library_one_page_us_p50"]
    alone = "" if alone_us is None else f" (library {alone_us})"
    return (
        f"{row['way']:13} {row['page']:8} x {row['pages']:4}  checksums {'on ' if row['checksums'] else 'off'}  "
        f"memcpy {row['ratio_vs_memcpy']:5.2f} (contiguous {row['contiguous_ratio_vs_memcpy']:.2f})  {versus}  "
        f"{row['gib_per_s']:6.2f} GiB/s  one page {row['page_latency_us_p50']} us"
        f"{alone}, {row['page_round_trip_us_p50']} us until the owner knows  idle {row['idle_core_percent']} %"
    )


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The keys that docs/transfers.md describes: of the same-host default, then of every way."""
    small = {(row["way"], row["checksums"]): row for row in rows if row["page"] == SHAPES[0].name}

    def told(key: str, checksums: bool) -> float | None:
        row = small.get(("memfd", checksums))
        return row[key] if row else None

    by_way: dict[str, Any] = {}
    for (way, checksums), row in small.items():
        suffix = "_checksums" if checksums else ""
        by_way.setdefault(way, {}).update(
            {
                f"scattered_ratio_vs_memcpy{suffix}": row["ratio_vs_memcpy"],
                f"contiguous_ratio_vs_memcpy{suffix}": row["contiguous_ratio_vs_memcpy"],
                f"scattered_ratio_vs_library{suffix}": row["ratio_vs_library"],
                f"contiguous_ratio_vs_library{suffix}": row["contiguous_ratio_vs_library"],
                f"page_latency_us_p50{suffix}": row["page_latency_us_p50"],
                f"page_round_trip_us_p50{suffix}": row["page_round_trip_us_p50"],
                f"idle_core_percent{suffix}": row["idle_core_percent"],
            }
        )
    return {
        "scattered_ratio_vs_memcpy": told("ratio_vs_memcpy", checksums=False),
        "scattered_ratio_vs_memcpy_checksums": told("ratio_vs_memcpy", checksums=True),
        "contiguous_ratio_vs_memcpy": told("contiguous_ratio_vs_memcpy", checksums=False),
        "scattered_ratio_vs_raw_copy": told("ratio_vs_raw_copy", checksums=False),
        "page_latency_us_p50": told("page_latency_us_p50", checksums=False),
        "page_latency_us_p50_checksums": told("page_latency_us_p50", checksums=True),
        "page_round_trip_us_p50": told("page_round_trip_us_p50", checksums=False),
        "page_round_trip_us_p50_checksums": told("page_round_trip_us_p50", checksums=True),
        "idle_core_percent": max((row["idle_core_percent"] for row in rows), default=None),
        "ways": by_way,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default=",".join(WAYS), help=f"comma-separated: {', '.join(WAYS)}")
    parser.add_argument(
        "--shapes",
        default=",".join(DEFAULT_SHAPES),
        help=f"comma-separated: {', '.join(shape.name for shape in SHAPES)}",
    )
    parser.add_argument("--mib", type=int, default=128, help="bytes of one transfer, in MiB")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--latency-rounds", type=int, default=500)
    parser.add_argument("--threads", type=int, default=1, help="threads of a copy or checksum; memcpy uses one")
    options = parser.parse_args()
    for given, known in ((options.ways, WAYS), (options.shapes, {shape.name for shape in SHAPES})):
        if unknown := set(given.split(",")) - set(known):
            parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    failed: list[str] = []
    for name in options.ways.split(","):
        if (reason := obstacle(WAYS[name])) is not None:
            skipped[name] = reason
            print(f"{name:13} skipped: {reason}", flush=True)
            continue
        for shape in SHAPES:
            if shape.name not in options.shapes.split(","):
                continue
            for checksums in (False, True):
                try:
                    row = measure(
                        name,
                        shape,
                        rounds=options.rounds,
                        latency_rounds=options.latency_rounds,
                        nbytes=options.mib * MIB,
                        checksums=checksums,
                        threads=options.threads,
                    )
                except WayError as error:
                    failed.append(f"{name} {shape.name}: {error}")
                    print(f"{name:13} {shape.name:8} failed: {error}", flush=True)
                    continue
                rows.append(row)
                print(told(row), flush=True)
    head = {"benchmark": "transfer", "machine": platform.machine(), "threads": options.threads}
    print(json.dumps({**head, **summary(rows), "skipped": skipped, "failed": failed, "rows": rows}))
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
