"""Random moves, resizes and damage: a page arrives as it left, or is reported as lost; never anything else."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from remote_device import FakeRemoteDevice
from storages import PAGE_BYTES, two_pools

from kvmesh.cache.device import CpuDevice, Device
from kvmesh.cache.errors import TierFailedError
from kvmesh.cache.storage import Storage

SLOTS = 6
MOST = 9
LOST = None
"""What a cold slot holds that never was written, or was damaged."""

pools = st.integers(0, 1)
levels = st.integers(0, 2)
seeds = st.integers(0, 1 << 30)


class Moves(RuleBasedStateMachine):
    """The model keeps, for every slot, the bytes that must come back from it."""

    device: Device

    def make_device(self) -> Device:
        return CpuDevice(1 << 20)

    def device_pages(self, pool: int) -> np.ndarray:
        return self.storage.pools[pool].array.reshape(-1, PAGE_BYTES[pool])

    @initialize(tiers=st.sampled_from([("gpu", "host", "disk"), ("gpu", "disk", "host")]))
    def start(self, tiers: tuple[str, ...]) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name)
        self.device = self.make_device()
        reserve = [MOST, MOST] if self.device.is_host_memory else None
        self.storage = Storage(
            two_pools(), [[SLOTS, SLOTS]] * 3, tiers, self.device, disk_path=self.path, device_reserve=reserve
        )
        self.disk = tiers.index("disk")
        self.model: list[list[list[bytes | None]]] = [[[LOST] * SLOTS for _ in PAGE_BYTES] for level in range(3)]
        for pool in (0, 1):
            self.write(pool, range(SLOTS), np.random.default_rng(pool))
        self.files = [pool.path for pool in self.storage._cold[self.disk - 1]]  # type: ignore[union-attr]
        self.gone = [False, False]

    @rule(pool=pools, seed=seeds)
    def compute(self, pool: int, seed: int) -> None:
        """The device writes some of its pages."""
        rng = np.random.default_rng(seed)
        count = len(self.model[0][pool])
        self.write(pool, rng.permutation(count)[: rng.integers(1, count + 1)].tolist(), rng)

    def write(self, pool: int, slots: Iterable[int], rng: np.random.Generator) -> None:
        pages = self.device_pages(pool)
        for slot in slots:
            pages[slot] = rng.integers(0, 256, PAGE_BYTES[pool], dtype=np.uint8)
            self.model[0][pool][slot] = pages[slot].tobytes()

    @rule(pool=pools, origin=levels, goal=levels, seed=seeds)
    def move(self, pool: int, origin: int, goal: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        src, dst = self.draw_slots(rng, pool, origin, goal)
        expected = [self.model[origin][pool][slot] for slot in src]
        try:
            arrived = self.storage.move(pool, origin, src, goal, dst)
        except TierFailedError as error:
            failed = error.level
        else:
            failed = -1
        if goal == self.disk and self.gone[pool] and len(src):
            assert failed == self.disk
            return
        assert failed == -1
        assert arrived.tolist() == [page is not LOST for page in expected]
        for slot, page in zip(dst.tolist(), expected, strict=True):
            self.model[goal][pool][slot] = page
        if goal == 0:
            self.write(pool, dst[~arrived].tolist(), rng)  # lost pages are computed again

    def draw_slots(self, rng: np.random.Generator, pool: int, origin: int, goal: int) -> tuple[np.ndarray, np.ndarray]:
        here, there = len(self.model[origin][pool]), len(self.model[goal][pool])
        if origin == goal:
            both = rng.permutation(here).astype(np.int32)
            count = int(rng.integers(0, here // 2 + 1))
            return both[:count], both[count : 2 * count]
        count = int(rng.integers(0, min(here, there) + 1))
        src, dst = rng.permutation(here)[:count], rng.permutation(there)[:count]
        if rng.integers(2):  # neighbours
            src, dst = np.sort(src), np.sort(dst)
        return src.astype(np.int32), dst.astype(np.int32)

    @rule(pool=pools, level=levels, count=st.integers(1, MOST))
    def resize(self, pool: int, level: int, count: int) -> None:
        if level == 0 and not self.device.is_host_memory:
            return
        self.storage.resize(level, pool, count)
        slots = self.model[level][pool]
        self.model[level][pool] = slots[:count] + [LOST] * (count - len(slots))
        if level == 0:
            self.write(pool, range(len(slots), count), np.random.default_rng(count))

    @rule(pool=pools, seed=seeds)
    def damage(self, pool: int, seed: int) -> None:
        """Flip one bit of a page on disk."""
        rng = np.random.default_rng(seed)
        slots = self.model[self.disk][pool]
        good = [slot for slot, page in enumerate(slots) if page is not LOST]
        if good and not self.gone[pool]:
            slot = int(rng.choice(good))
            offset = slot * PAGE_BYTES[pool] + int(rng.integers(PAGE_BYTES[pool]))
            with self.files[pool].open("r+b") as file:
                file.seek(offset)
                byte = file.read(1)[0] ^ (1 << int(rng.integers(8)))
                file.seek(offset)
                file.write(bytes([byte]))
            slots[slot] = LOST

    @rule(pool=pools, seed=seeds)
    def truncate(self, pool: int, seed: int) -> None:
        if self.gone[pool]:
            return
        rng = np.random.default_rng(seed)
        slots = self.model[self.disk][pool]
        kept = int(rng.integers(len(slots)))
        # Never at a page's last bytes: a page that ends in zeros would be intact again once a hole has replaced them.
        size = kept * PAGE_BYTES[pool] + int(rng.choice([0, 1, PAGE_BYTES[pool] // 2]))
        if self.files[pool].stat().st_size > size:
            os.truncate(self.files[pool], size)
            slots[kept:] = [LOST] * (len(slots) - kept)

    @precondition(lambda self: not all(self.gone))
    @rule(pool=pools)
    def delete(self, pool: int) -> None:
        if not self.gone[pool]:
            self.files[pool].unlink()
            self.gone[pool] = True
            self.model[self.disk][pool] = [LOST] * len(self.model[self.disk][pool])

    @invariant()
    def the_device_has_what_was_moved_to_it(self) -> None:
        if hasattr(self, "model"):
            for pool in (0, 1):
                assert [page.tobytes() for page in self.device_pages(pool)] == self.model[0][pool]

    def teardown(self) -> None:
        if hasattr(self, "storage"):
            free = self.device.free_bytes
            held = sum(buffer.nbytes for buffer in self.storage.pools)
            self.storage.close()
            assert self.device.free_bytes == free + held
            assert list(self.path.iterdir()) == []
            self.directory.cleanup()


class RemoteMoves(Moves):
    """The same with a device whose memory cannot be addressed, and which copies as late as it can."""

    def make_device(self) -> FakeRemoteDevice:
        return FakeRemoteDevice()

    def device_pages(self, pool: int) -> np.ndarray:
        return self.device.pages(self.storage.pools[pool], PAGE_BYTES[pool])  # type: ignore[attr-defined,no-any-return]


OPTIONS = settings(max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TestMoves = Moves.TestCase
TestMoves.settings = OPTIONS
TestRemoteMoves = RemoteMoves.TestCase
TestRemoteMoves.settings = OPTIONS
