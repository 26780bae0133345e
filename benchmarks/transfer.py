"""Moves a prompt's pages between two processes and compares with memcpy of as many bytes in the same run.

For every way (shared memory, TCP, NIXL) and page size: scattered pages, checksums off and on, through the whole session
layer (ticket, control round trip, move, acknowledgement). Each transfer is timed between two plain copies of the same
number of bytes, and the ratio is the median over these triples, so that a busy machine disturbs it least. Also the
latency of a transfer of one page. The last line is one JSON object.

    python benchmarks/transfer.py [--ways memfd,tcp,nixl] [--mib 128] [--rounds 9] [--threads 1]
"""

from __future__ import annotations

import argparse
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
LATENCY_ROUNDS = 200
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
        self.transfers = 0

    def scattered(self, count: int) -> np.ndarray:
        """``count`` pages of the pool in random order."""
        return self.order.permutation(self.num_pages)[:count].astype(np.int32)


def context_process(pipe: Connection, arguments: tuple[Any, ...], threads: int) -> None:
    """Offers what it is asked for: the number of pages goes in, a hand-off comes out."""
    configure_logging("context", "warning")
    ops.set_num_threads(threads)
    engine = Engine("context", *arguments)
    engine.buffer.array[:] = np.random.default_rng(0).integers(0, 256, engine.buffer.nbytes, dtype=np.uint8)
    while (count := pipe.recv()) is not None:
        engine.transceiver.check_context_transfer_status(0)
        engine.transfers += 1
        tokens = count * engine.layout.tokens_per_block
        lease = Lease(engine.scattered(count))
        pipe.send(engine.transceiver.respond_and_send(engine.transfers, "benchmark", lease, tokens, 0, PROMPT_DIGEST))
    engine.transceiver.shutdown()


def move_s(engine: Engine, pipe: Connection, count: int) -> float:
    """Seconds of one transfer, from the request to the acknowledged end."""
    pipe.send(count)
    handoff = msgspec.msgpack.decode(pipe.recv(), type=HandOff)
    engine.transfers += 1
    lease = Lease(engine.scattered(count))
    start_s = time.perf_counter()
    engine.transceiver.request_and_receive(engine.transfers, "benchmark", handoff, lease, [0], PROMPT_DIGEST)
    ended = engine.transceiver.check_gen_transfer_status(1)
    elapsed_s = time.perf_counter() - start_s
    if ended.completed != [engine.transfers]:
        raise RuntimeError(f"the transfer did not complete: {ended}")
    return elapsed_s


def memcpy_s(target: np.ndarray, source: np.ndarray) -> float:
    """Seconds of one plain copy."""
    start_s = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - start_s


def measure(way: str, shape: Shape, *, nbytes: int, checksums: bool, rounds: int, threads: int) -> dict[str, Any]:
    """One row: ratio to memcpy, throughput and the latency of one page."""
    processes = multiprocessing.get_context("spawn")
    pipe, theirs = processes.Pipe()
    arguments = (way, shape, nbytes, checksums)
    context = processes.Process(target=context_process, args=(theirs, arguments, threads))
    context.start()
    engine = Engine("generation", *arguments)
    moved = engine.moving * engine.page_bytes
    source, target = np.ones(moved, dtype=np.uint8), np.zeros(moved, dtype=np.uint8)
    for _ in range(3):
        move_s(engine, pipe, engine.moving)
        memcpy_s(target, source)
    ratios, seconds = [], []
    for _ in range(rounds):
        before_s = memcpy_s(target, source)
        took_s = move_s(engine, pipe, engine.moving)
        ratios.append((before_s + memcpy_s(target, source)) / 2 / took_s)
        seconds.append(took_s)
    latencies = [move_s(engine, pipe, 1) for _ in range(LATENCY_ROUNDS)]
    pipe.send(None)
    context.join()
    engine.transceiver.shutdown()
    return {
        "way": way,
        "page": shape.name,
        "page_bytes": engine.page_bytes,
        "pages": engine.moving,
        "checksums": checksums,
        "ratio_vs_memcpy": round(statistics.median(ratios), 3),
        "gib_per_s": round(moved / statistics.median(seconds) / 2**30, 2),
        "one_page_us_p50": round(statistics.median(latencies) * 1e6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default=",".join(WAYS), help="comma-separated: memfd, tcp, nixl")
    parser.add_argument("--mib", type=int, default=128, help="bytes of one transfer, in MiB")
    parser.add_argument("--rounds", type=int, default=9)
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
                    f"{row['ratio_vs_memcpy']:5.2f} of memcpy  {row['gib_per_s']:6.2f} GiB/s  "
                    f"one page {row['one_page_us_p50']} us",
                    flush=True,
                )
    default = [row for row in rows if row["way"] == "memfd" and row["page"] == SHAPES[0].name]
    print(
        json.dumps(
            {
                "benchmark": "transfer",
                "machine": platform.machine(),
                "threads": options.threads,
                "scattered_ratio_vs_memcpy": default[0]["ratio_vs_memcpy"] if default else None,
                "scattered_ratio_vs_memcpy_checksums": default[1]["ratio_vs_memcpy"] if default else None,
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
