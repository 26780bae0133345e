"""One of the two engines of benchmarks/transfer.py, which starts it: a pool of pages and a transceiver over it.

Commands come as JSON, one a line, on stdin, and each is answered by a JSON line on stdout:

    {"do": "offer", "kind": "scattered"}                  context: {"handoff": "..."}
    {"do": "settle"}                                      context, after an offer: {"at_s": when its lease was released}
    {"do": "receive", "kind": "scattered", "handoff": ..} generation: {"s": wall seconds until the pages may be used,
                                                          "cpu_s": of the process, "from_s": when it began}
    {"do": "memcpy"}                                      seconds of a plain copy of as many bytes
    {"do": "kernel"}                                      processor seconds of the page-copying kernel alone
    {"do": "idle", "s": 5}                                {"core_percent": share of a core of the process meanwhile}

Times with a name of their own are of the clock that all processes of a host share.

    python benchmarks/processes/transfer_engine.py '{"role": "context", "backend": "DEFAULT", ...}'
"""

from __future__ import annotations

import json
import sys
import time
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

PROMPT_DIGEST = bytes(32)
"""Every transfer is of the same prompt."""


class Lease:
    """Pages that nobody else wants."""

    def __init__(self, pages: np.ndarray) -> None:
        self._pages = pages
        self.released_s = 0.0

    def page_ids(self, _group: int) -> np.ndarray:
        """The pages."""
        return self._pages

    def quarantine(self) -> None:
        """A peer may still write."""

    def levels(self, _group: int) -> np.ndarray:
        """All on the device."""
        return np.zeros(len(self._pages), dtype=np.uint8)

    def let_move(self) -> bool:
        """There is no colder tier."""
        return False

    def keep_place(self) -> bool:
        """They never leave."""
        return True

    @property
    def lost(self) -> bool:
        """Never."""
        return False

    def release(self) -> None:
        """Nothing to give back."""
        self.released_s = time.perf_counter()


class Engine:
    """A pool of twice the pages that move, and a transceiver over it."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.role: str = options["role"]
        shape = options["shape"]
        spec = [
            LayerCacheSpec(layer_index=i, num_kv_heads=shape["kv_heads"], head_dim=shape["head_dim"], dtype="float32")
            for i in range(shape["layers"])
        ]
        self.layout = PageLayout.build(CacheRequirements(tuple(spec)), shape["tokens_per_block"])
        self.page_bytes = self.layout.pools[0].page_bytes
        self.moving = options["nbytes"] // self.page_bytes
        self.num_pages = 2 * self.moving
        self._order = np.random.default_rng(0 if self.role == "context" else 1)
        self._rest = np.empty(0, dtype=np.int32)
        self._transfers = 0
        self._offered = Lease(self._rest)
        self._checksums: bool = options["checksums"]
        self.buffer = CpuDevice(self.num_pages * self.page_bytes).allocate(self.num_pages * self.page_bytes)
        pool = PoolMemory(
            address=self.buffer.address,
            nbytes=self.buffer.nbytes,
            num_pages=self.num_pages,
            page_bytes=self.page_bytes,
            fd=self.buffer.fd,
        )
        made = create_transceiver(
            CacheTransceiverConfig(**options["config"]),
            layout=self.layout,
            pools=[pool],
            instance_id=self.role,
            epoch=1,
            cluster_secret=b"benchmark",
            digest=self.layout.digest("benchmark"),
            summary=self.layout.summary(),
            plane=options["plane"],
            checksums=self._checksums,
        )
        assert made is not None
        self.transceiver: Transceiver = made
        moved = self.moving * self.page_bytes
        self._source, self._target = np.ones(moved, dtype=np.uint8), np.zeros(moved, dtype=np.uint8)
        self._pool_copy: np.ndarray | None = None
        if self.role == "context":
            self.buffer.array[:] = np.random.default_rng(0).integers(0, 256, self.buffer.nbytes, dtype=np.uint8)

    def offer(self, kind: str) -> dict[str, Any]:
        """Open a send session of pages of that kind."""
        self.transceiver.check_context_transfer_status(0)
        self._transfers += 1
        pages = self._pages(kind)
        tokens = len(pages) * self.layout.tokens_per_block
        self._offered = Lease(pages)
        handoff = self.transceiver.respond_and_send(
            self._transfers, "benchmark", self._offered, tokens, 0, PROMPT_DIGEST
        )
        return {"handoff": handoff.hex()}

    def settle(self) -> dict[str, Any]:
        """Wait, as an executor that has nothing else to do, until what was offered is read and its lease released."""
        while not self._offered.released_s:
            self.transceiver.check_context_transfer_status(1)
        return {"at_s": self._offered.released_s}

    def receive(self, kind: str, handoff: str) -> dict[str, Any]:
        """One transfer, from the request until its pages may be used."""
        self._transfers += 1
        offered = msgspec.msgpack.decode(bytes.fromhex(handoff), type=HandOff)
        lease = Lease(self._pages(kind))
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        self.transceiver.request_and_receive(self._transfers, "benchmark", offered, lease, [0], PROMPT_DIGEST)
        ended = self.transceiver.check_gen_transfer_status(1)
        taken = {
            "s": time.perf_counter() - start_s,
            "cpu_s": time.process_time() - start_cpu_s,
            "from_s": start_s,
        }
        if ended.completed != [self._transfers]:
            raise RuntimeError(f"the transfer did not complete: {ended}")
        return taken

    def memcpy(self) -> dict[str, Any]:
        """A plain copy of as many bytes as a transfer moves."""
        start_s = time.perf_counter()
        np.copyto(self._target, self._source)
        return {"s": time.perf_counter() - start_s}

    def kernel(self) -> dict[str, Any]:
        """The kernel of the shared-memory plane, on scattered pages between two pools of this process."""
        if self._pool_copy is None:
            self._pool_copy = CpuDevice(self.buffer.nbytes).allocate(self.buffer.nbytes).array
            self._pool_copy[:] = 1
        copy = ops.copy_pages_checksummed if self._checksums else ops.copy_pages
        to, of = (self._order.permutation(self.num_pages)[: self.moving].astype(np.int32) for _ in range(2))
        start_s = time.thread_time()
        copy(self.buffer.address, to, self._pool_copy.ctypes.data, of, self.page_bytes)
        return {"s": time.thread_time() - start_s}

    def _pages(self, kind: str) -> np.ndarray:
        """One page, or half of the pool: ``contiguous``, or ``scattered``, then every second time the other half."""
        if kind == "one":
            return self._order.integers(0, self.num_pages, 1, dtype=np.int32)
        if kind == "contiguous":
            return np.arange(self.moving, dtype=np.int32)
        if not len(self._rest):
            self._rest = self._order.permutation(self.num_pages).astype(np.int32)
        drawn, self._rest = self._rest[: self.moving], self._rest[self.moving :]
        return drawn


def core_percent(seconds: float) -> dict[str, Any]:
    """Share of one core that this process takes while it is left alone."""
    begin_s = time.process_time()
    time.sleep(seconds)
    return {"core_percent": 100 * (time.process_time() - begin_s) / seconds}


def main() -> None:
    options = json.loads(sys.argv[1])
    # Nothing but answers may go to stdout, whatever a library prints.
    answers, sys.stdout = sys.stdout, sys.stderr
    configure_logging(options["role"], "warning")
    ops.set_num_threads(options["threads"])
    engine = Engine(options)
    print(json.dumps({"page_bytes": engine.page_bytes, "pages": engine.moving}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        match command.pop("do"):
            case "offer":
                answer = engine.offer(**command)
            case "settle":
                answer = engine.settle()
            case "receive":
                answer = engine.receive(**command)
            case "memcpy":
                answer = engine.memcpy()
            case "kernel":
                answer = engine.kernel()
            case "idle":
                answer = core_percent(command["s"])
        print(json.dumps(answer), file=answers, flush=True)
    engine.transceiver.shutdown()


if __name__ == "__main__":
    main()
