"""One engine's transfers in a process of its own, driven through a pipe; see conftest.py."""

from __future__ import annotations

import base64
import hashlib
import os
import sys
import threading
import time
from multiprocessing.connection import Client, Connection
from typing import Any

import msgspec
import numpy as np

from kvmesh.cache.device import CpuDevice
from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, PageLayout
from kvmesh.config.cache_transceiver import CacheTransceiverConfig
from kvmesh.kernels import ops
from kvmesh.net import faults
from kvmesh.protocol.disagg import HandOff
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.transfer import Aux
from kvmesh.telemetry import configure_logging
from kvmesh.transceiver import PoolMemory, create_transceiver
from kvmesh.transceiver.slices import BlockSpan

PROMPT_DIGEST = bytes(32)
"""Every transfer is of the same prompt."""


class Lease:
    """Pages of the device, and of the host tier, whose numbers follow those."""

    def __init__(self, pages: list[int], device_pages: int) -> None:
        numbers = np.array(pages, dtype=np.int32)
        self._levels = (numbers >= device_pages).astype(np.uint8)
        self._pages = numbers - device_pages * self._levels.astype(np.int32)
        self.lost = False
        self.released = False

    def page_ids(self, _group: int) -> np.ndarray:
        return self._pages

    def levels(self, _group: int) -> np.ndarray:
        return self._levels

    def let_move(self) -> bool:
        return bool(self._levels.any())

    def keep_place(self) -> bool:
        return True

    def quarantine(self) -> None:
        assert not self.released

    def release(self) -> None:
        assert not self.released
        self.released = True


class Gate:
    """Holds up whoever reaches a fault point."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        self.opened.wait(60)


class EngineProcess:
    def __init__(
        self,
        *,
        name: str,
        num_pages: int,
        page_kib: int,
        transceiver: dict[str, Any],
        plane: str,
        checksums: bool,
        host_pages: int = 0,
        layers: int = 2,
        connect_timeout_s: float = 60.0,
    ) -> None:
        heads = page_kib * 1024 // (2 * layers * 16 * 64 * 4)
        spec = [LayerCacheSpec(layer_index=i, num_kv_heads=heads, head_dim=64, dtype="float32") for i in range(layers)]
        self.layout = PageLayout.build(CacheRequirements(tuple(spec)), 16)
        (pool,) = self.layout.pools
        assert pool.page_bytes == page_kib * 1024
        self.device = CpuDevice(num_pages * pool.page_bytes)
        self.buffer = self.device.allocate(num_pages * pool.page_bytes)
        self.pages = self.buffer.array.reshape(num_pages, pool.page_bytes)
        self.num_pages = num_pages
        pools = [_memory(self.buffer, num_pages, pool.page_bytes)]
        self.host = CpuDevice(max(1, host_pages) * pool.page_bytes)
        self.host_buffer = self.host.allocate(max(1, host_pages) * pool.page_bytes)
        self.host_array = self.host_buffer.array.reshape(max(1, host_pages), pool.page_bytes)
        if host_pages:
            pools.append(_memory(self.host_buffer, host_pages, pool.page_bytes))
        made = create_transceiver(
            CacheTransceiverConfig(**transceiver),
            layout=self.layout,
            pools=pools,
            instance_id=name,
            epoch=1,
            cluster_secret=b"a secret of these tests",
            digest=self.layout.digest("a model"),
            summary=self.layout.summary(),
            plane=plane,  # type: ignore[arg-type]
            checksums=checksums,
            connect_timeout_s=connect_timeout_s,
        )
        assert made is not None
        self.transceiver = made
        self.leases: dict[int, Lease] = {}
        self.slices: dict[tuple[int, int], Lease] = {}
        self.gates: dict[str, Gate] = {}

    def fill(self, seed: int) -> None:
        chance = np.random.default_rng(seed)
        for pages in (self.pages, self.host_array):
            pages[:] = chance.integers(0, 256, pages.shape, dtype=np.uint8)

    def digest(self, pages: list[int]) -> str:
        return hashlib.sha256(b"".join(self._page(page) for page in pages)).hexdigest()

    def _page(self, page: int) -> bytes:
        in_host = page >= self.num_pages
        return bytes(self.host_array[page - self.num_pages] if in_host else self.pages[page])

    def offer(self, transfer: int, pages: list[int]) -> str:
        self.leases[transfer] = Lease(pages, self.num_pages)
        handoff = self.transceiver.respond_and_send(
            transfer, f"request-{transfer}", self.leases[transfer], 16 * len(pages) - 5, 7, PROMPT_DIGEST
        )
        self.transceiver.let_waiting_pages_move()
        return base64.b64encode(handoff).decode()

    def ask(self, transfer: int, handoff: str, pages: list[int], first: int = 0) -> None:
        self.leases[transfer] = Lease(pages, self.num_pages)
        decoded = msgspec.msgpack.decode(base64.b64decode(handoff), type=HandOff)
        self.transceiver.request_and_receive(
            transfer, f"request-{transfer}", decoded, self.leases[transfer], [first], PROMPT_DIGEST
        )

    def address(self) -> str:
        return base64.b64encode(self.transceiver.address).decode()

    def promise(self, transfer: int, blocks: int) -> None:
        self.transceiver.expect_receiver(transfer, f"request-{transfer}", 16 * blocks - 5, PROMPT_DIGEST)

    def claim(self, transfer: int, address: str, pages: list[int], first: int = 0) -> None:
        self.leases[transfer] = Lease(pages, self.num_pages)
        self.transceiver.claim_and_receive(
            transfer,
            f"request-{transfer}",
            base64.b64decode(address),
            self.leases[transfer],
            [first],
            16 * len(pages) - 5,
            PROMPT_DIGEST,
        )

    def claimed(self) -> list[int]:
        return self.transceiver.take_claimed()

    def send_slice(self, transfer: int, pages: list[int], first: int, *, is_last: bool) -> bool:
        lease = self.slices[transfer, first] = Lease(pages, self.num_pages)
        aux = Aux(first_tokens=[1], seed=7, prompt_tokens=16 * len(pages) - 5) if is_last else None
        return self.transceiver.send_slice(transfer, lease, [BlockSpan(first, len(pages))], aux)

    def aux(self, transfer: int) -> list[int]:
        aux = self.transceiver.take_aux(transfer)
        assert aux is not None
        return aux.first_tokens

    def poll(self, side: str, at_least: int = 0) -> dict[str, Any]:
        look = (
            self.transceiver.check_context_transfer_status
            if side == "context"
            else self.transceiver.check_gen_transfer_status
        )
        ended = look(at_least)._asdict()
        del ended["notes"]
        return ended

    def step(self, side: str) -> dict[str, Any]:
        """What an executor does in each iteration."""
        return {"overdue": self.transceiver.sweep_timeouts(), **self.poll(side)}

    def cancel(self, transfer: int) -> bool:
        return self.transceiver.cancel_request(transfer)

    def dead(self, instance: str, epoch: int = 1) -> None:
        self.transceiver.on_peer_dead(instance, epoch)

    def held(self) -> list[int]:
        slices = [transfer for (transfer, _first), lease in self.slices.items() if not lease.released]
        return [transfer for transfer, lease in self.leases.items() if not lease.released] + slices

    def stats(self) -> dict[str, Any]:
        return self.transceiver.stats()._asdict()

    def ledger(self) -> list[list[Any]]:
        return [[event.transfer_id, event.state] for event in self.transceiver.drain_ledger()]

    def close_gate(self, point: str) -> None:
        self.gates[point] = Gate()
        faults.arm(point, self.gates[point])

    def reached(self, point: str) -> bool:
        return self.gates[point].reached.wait(20)

    def open_gate(self, point: str) -> None:
        faults.disarm(point)
        self.gates.pop(point).opened.set()

    def idle_cpu(self, seconds: float) -> float:
        start_s = time.process_time()
        threading.Event().wait(seconds)
        return (time.process_time() - start_s) / seconds

    def shutdown(self) -> None:
        for point in list(self.gates):
            self.open_gate(point)
        self.transceiver.shutdown()
        self.device.free(self.buffer)
        self.host.free(self.host_buffer)


def _memory(buffer: Any, num_pages: int, page_bytes: int) -> PoolMemory:
    return PoolMemory(
        address=buffer.address, nbytes=buffer.nbytes, num_pages=num_pages, page_bytes=page_bytes, fd=buffer.fd
    )


def main(pipe: Connection, settings: dict[str, Any]) -> None:
    configure_logging("test", "warning")
    ops.set_num_threads(1)
    engine = EngineProcess(**settings)
    pipe.send({"result": engine.transceiver.backend_name})
    while True:
        name, arguments = pipe.recv()
        try:
            pipe.send({"result": getattr(engine, name)(**arguments)})
        except ApiError as error:
            pipe.send({"error": (error.status, error.code, error.message)})
        if name == "shutdown":
            return


if __name__ == "__main__":
    if "PIPE" in globals():
        # Given by the process that starts this one.
        main(globals()["PIPE"], globals()["SETTINGS"])
    else:
        with Client(sys.argv[1]) as connection:
            main(connection, connection.recv())
        sys.stdout.flush()
        sys.stderr.flush()
        # As an engine ends: threads of transfer libraries crash in the interpreter's teardown.
        os._exit(0)
