"""Moves a prompt's pages between two processes and compares with memcpy of as many bytes in the same run.

For every way (shared memory, TCP, NIXL) and page size, through the whole session layer (ticket, control round trip,
move, acknowledgement), checksums off and on: scattered pages, contiguous pages, and one page. Each transfer is timed
between two plain copies of the same number of bytes on one thread, and the ratio is the median over rounds, so that a
busy machine disturbs it least. On shared memory the kernel that copies the pages runs alone, too; what the session adds
is small against the disturbances of wall time, so that ratio is of processor time. Every page has been moved before:
the first transfer, whose pages the system still has to provide, is told apart. Then both processes are left alone with
no session open. The last line is one JSON object; docs/transfers.md has its keys.

    python benchmarks/transfer.py [--ways memfd,tcp,nixl] [--mib 128] [--rounds 15] [--threads 1]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import platform
import statistics
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from kvmesh.cache.device import CpuDevice
from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, PageLayout
from kvmesh.config.cache_transceiver import CacheTransceiverConfig
from kvmesh.kernels import ops
from kvmesh.protocol.disagg import HandOff
from kvmesh.telemetry import configure_logging
from kvmesh.transceiver import PoolMemory, Transceiver, create_transceiver

WAYS = {"memfd": ("DEFAULT", "memfd"), "tcp": ("DEFAULT", "tcp"), "nixl": ("NIXL", "auto")}
LATENCY_ROUNDS = 500
IDLE_S = 5.0
PROMPT_DIGEST = bytes(32)
"""Every transfer is of the same prompt."""


@dataclass(frozen=True)
class Shape:
    """A page size worth measuring."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    tokens_per_block: int


SHAPES = (
    Shape("64 KiB", layers=2, kv_heads=4, head_dim=64, tokens_per_block=16),
    # SmolLM2-135M in float32: 1.41 MiB.
    Shape("SmolLM2", layers=30, kv_heads=3, head_dim=64, tokens_per_block=32),
)


class Lease:
    """Pages that nobody else wants."""

    def __init__(self, pages: np.ndarray) -> None:
        self._pages = pages

    def page_ids(self, _group: int) -> np.ndarray:
        """The pages."""
        return self._pages

    def quarantine(self) -> None:
        """A peer may still write."""

    def release(self) -> None:
        """Nothing to give back."""


class Engine:
    """A pool of twice the pages that move, and a transceiver over it."""

    def __init__(self, name: str, way: str, shape: Shape, nbytes: int, checksums: bool) -> None:
        spec = [
            LayerCacheSpec(layer_index=i, num_kv_heads=shape.kv_heads, head_dim=shape.head_dim, dtype="float32")
            for i in range(shape.layers)
        ]
        self.layout = PageLayout.build(CacheRequirements(tuple(spec)), shape.tokens_per_block)
        self.page_bytes = self.layout.pools[0].page_bytes
        self.moving = nbytes // self.page_bytes
        self.num_pages = 2 * self.moving
        self._device = CpuDevice(self.num_pages * self.page_bytes)
        self.buffer = self._device.allocate(self.num_pages * self.page_bytes)
        backend, plane = WAYS[way]
        made = create_transceiver(
            CacheTransceiverConfig(backend=backend),  # type: ignore[arg-type]
            layout=self.layout,
            pools=[
                PoolMemory(
                    address=self.buffer.address,
                    nbytes=self.buffer.nbytes,
                    num_pages=self.num_pages,
                    page_bytes=self.page_bytes,
                    fd=self.buffer.fd,
                )
            ],
            instance_id=name,
            epoch=1,
            cluster_secret=b"benchmark",
            digest=self.layout.digest("benchmark"),
            summary=self.layout.summary(),
            plane=plane,  # type: ignore[arg-type]
            checksums=checksums,
        )
        assert made is not None
        self.transceiver: Transceiver = made
        self.order = np.random.default_rng(0 if name == "context" else 1)
        self._rest = np.empty(0, dtype=np.int32)
        self.transfers = 0

    def pages(self, kind: str) -> np.ndarray:
        """One page, or half of the pool: ``contiguous``, or ``scattered``, then every second time the other half."""
        if kind == "one":
            return self.order.integers(0, self.num_pages, 1, dtype=np.int32)
        if kind == "contiguous":
            return np.arange(self.moving, dtype=np.int32)
        if not len(self._rest):
            self._rest = self.order.permutation(self.num_pages).astype(np.int32)
        drawn, self._rest = self._rest[: self.moving], self._rest[self.moving :]
        return drawn


def core_percent(seconds: float) -> float:
    """Share of one core that this process takes while it is left alone."""
    begin_s = time.process_time()
    time.sleep(seconds)
    return 100 * (time.process_time() - begin_s) / seconds


def context_process(pipe: Connection, arguments: tuple[Any, ...], threads: int) -> None:
    """Offers what it is asked for: a kind of pages goes in, a hand-off comes out."""
    configure_logging("context", "warning")
    ops.set_num_threads(threads)
    engine = Engine("context", *arguments)
    engine.buffer.array[:] = np.random.default_rng(0).integers(0, 256, engine.buffer.nbytes, dtype=np.uint8)
    while (kind := pipe.recv()) is not None:
        engine.transceiver.check_context_transfer_status(0)
        if kind == "idle":
            pipe.send(core_percent(IDLE_S))
            continue
        engine.transfers += 1
        pages = engine.pages(kind)
        tokens = len(pages) * engine.layout.tokens_per_block
        handoff = engine.transceiver.respond_and_send(
            engine.transfers, "benchmark", Lease(pages), tokens, 0, PROMPT_DIGEST
        )
        pipe.send(handoff)
    engine.transceiver.shutdown()


def move_s(engine: Engine, pipe: Connection, kind: str) -> float:
    """Seconds of one transfer, from the request to the acknowledged end."""
    pipe.send(kind)
    handoff = msgspec.msgpack.decode(pipe.recv(), type=HandOff)
    engine.transfers += 1
    lease = Lease(engine.pages(kind))
    start_s = time.perf_counter()
    engine.transceiver.request_and_receive(engine.transfers, "benchmark", handoff, lease, [0], PROMPT_DIGEST)
    ended = engine.transceiver.check_gen_transfer_status(1)
    elapsed_s = time.perf_counter() - start_s
    if ended.completed != [engine.transfers]:
        raise RuntimeError(f"the transfer did not complete: {ended}")
    return elapsed_s


class Raw:
    """The kernel that the shared-memory plane uses, on scattered pages between two pools of one process."""

    def __init__(self, engine: Engine, checksums: bool) -> None:
        self._engine = engine
        self._source = CpuDevice(engine.buffer.nbytes).allocate(engine.buffer.nbytes)
        self._source.array[:] = 1
        self._copy = ops.copy_pages_checksummed if checksums else ops.copy_pages

    def cpu_s(self) -> float:
        """Processor seconds of one copy."""
        engine = self._engine
        to, of = (engine.order.permutation(engine.num_pages)[: engine.moving].astype(np.int32) for _ in range(2))
        start_s = time.thread_time()
        self._copy(engine.buffer.address, to, self._source.address, of, engine.page_bytes)
        return time.thread_time() - start_s


def memcpy_s(target: np.ndarray, source: np.ndarray) -> float:
    """Seconds of one plain copy."""
    start_s = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - start_s


def measure(way: str, shape: Shape, *, nbytes: int, checksums: bool, rounds: int, threads: int) -> dict[str, Any]:
    """One row: ratios to memcpy and to the raw copy, throughput, the latency of one page, and what idling takes."""
    processes = multiprocessing.get_context("spawn")
    pipe, theirs = processes.Pipe()
    arguments = (way, shape, nbytes, checksums)
    context = processes.Process(target=context_process, args=(theirs, arguments, threads))
    context.start()
    engine = Engine("generation", *arguments)
    moved = engine.moving * engine.page_bytes
    source, target = np.ones(moved, dtype=np.uint8), np.zeros(moved, dtype=np.uint8)
    for _ in range(3):
        memcpy_s(target, source)
    move_s(engine, pipe, "one")  # Pairs the two.
    first_s = move_s(engine, pipe, "scattered")
    move_s(engine, pipe, "scattered")
    raw = Raw(engine, checksums) if way == "memfd" else None
    seconds: dict[str, list[float]] = {"scattered": [], "contiguous": []}
    ratios: dict[str, list[float]] = {"scattered": [], "contiguous": []}
    raws: list[float] = []
    for _ in range(rounds):
        for kind, taken in seconds.items():
            around = [memcpy_s(target, source)]
            begin_cpu_s = time.process_time()
            taken.append(move_s(engine, pipe, kind))
            used_s = time.process_time() - begin_cpu_s
            around.append(memcpy_s(target, source))
            ratios[kind].append(statistics.mean(around) / taken[-1])
            if raw is not None and kind == "scattered":
                raws.append(raw.cpu_s() / used_s)
    latencies = [move_s(engine, pipe, "one") for _ in range(LATENCY_ROUNDS)]
    pipe.send("idle")
    idle = max(core_percent(IDLE_S), pipe.recv())
    pipe.send(None)
    context.join()
    engine.transceiver.shutdown()
    return {
        "way": way,
        "page": shape.name,
        "page_bytes": engine.page_bytes,
        "pages": engine.moving,
        "checksums": checksums,
        "ratio_vs_memcpy": round(statistics.median(ratios["scattered"]), 3),
        "contiguous_ratio_vs_memcpy": round(statistics.median(ratios["contiguous"]), 3),
        "ratio_vs_raw_copy": round(statistics.median(raws), 3) if raws else None,
        "gib_per_s": round(moved / statistics.median(seconds["scattered"]) / 2**30, 2),
        "first_transfer_gib_per_s": round(moved / first_s / 2**30, 2),
        "one_page_us_p50": round(statistics.median(latencies) * 1e6),
        "idle_core_percent": round(idle, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    has_nixl = any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13"))
    ways = [way for way in WAYS if way != "nixl" or has_nixl]
    parser.add_argument("--ways", default=",".join(ways), help="comma-separated: memfd, tcp, nixl")
    parser.add_argument("--mib", type=int, default=128, help="bytes of one transfer, in MiB")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1, help="threads of a copy or checksum; memcpy uses one")
    options = parser.parse_args()
    configure_logging("generation", "warning")
    ops.set_num_threads(options.threads)
    rows = []
    for way in options.ways.split(","):
        for shape in SHAPES:
            for checksums in (False, True):
                row = measure(
                    way,
                    shape,
                    nbytes=options.mib << 20,
                    checksums=checksums,
                    rounds=options.rounds,
                    threads=options.threads,
                )
                rows.append(row)
                print(
                    f"{way:6} {shape.name:8} x {row['pages']:4}  checksums {'on ' if checksums else 'off'}  "
                    f"{row['ratio_vs_memcpy']:5.2f} of memcpy (contiguous {row['contiguous_ratio_vs_memcpy']:.2f}, "
                    f"of the raw copy {row['ratio_vs_raw_copy']})  {row['gib_per_s']:6.2f} GiB/s  "
                    f"one page {row['one_page_us_p50']} us  idle {row['idle_core_percent']} %",
                    flush=True,
                )
    default = {row["checksums"]: row for row in rows if row["way"] == "memfd" and row["page"] == SHAPES[0].name}

    def told(key: str, checksums: bool) -> float | None:
        return default[checksums][key] if default else None

    print(
        json.dumps(
            {
                "benchmark": "transfer",
                "machine": platform.machine(),
                "threads": options.threads,
                "scattered_ratio_vs_memcpy": told("ratio_vs_memcpy", checksums=False),
                "scattered_ratio_vs_memcpy_checksums": told("ratio_vs_memcpy", checksums=True),
                "contiguous_ratio_vs_memcpy": told("contiguous_ratio_vs_memcpy", checksums=False),
                "scattered_ratio_vs_raw_copy": told("ratio_vs_raw_copy", checksums=False),
                "one_page_us_p50": told("one_page_us_p50", checksums=False),
                "one_page_us_p50_checksums": told("one_page_us_p50", checksums=True),
                "idle_core_percent": max(row["idle_core_percent"] for row in rows),
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
