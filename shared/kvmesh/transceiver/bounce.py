"""Bounce: whether a transfer goes through the bounce regions, and the two regions of an engine.

Pages of a transfer lie scattered, and a one-sided library writes every fragment for itself. With bounce the owner
gathers them into a run of its send region, one move takes the run to a run of the receiver's receive region, and the
receiver scatters it. A run stays taken until nothing can touch it any more: that of a receiver whose transfer was
cancelled until the owner is quiet or dead.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

import numpy as np

from kvmesh.protocol.transfer import Run
from kvmesh.transceiver.planes.base import MoveJob, PageSums, Part
from kvmesh.transceiver.staged.copying import PageCopier
from kvmesh.transceiver.staged.pieces import Segment
from kvmesh.transceiver.staged.region import RegionSize, StagingMemory
from kvmesh.transceiver.staged.rooms import Rooms
from kvmesh.transceiver.types import PoolMemory, StagingStats

__all__ = ["BounceGates", "BounceObstacle", "BounceRegions", "BounceRun", "count_fragments", "owner_obstacle"]

BounceObstacle = Literal["small", "contiguous", "no_room", "not_offered"]
"""Why pages moved one by one: too few to gain, in few pieces already, no run free in one of the regions, or a receiver
that has reserved none."""

_OPTION: Final = "cache_transceiver_config.kv_cache_bounce_size_mb"


class BounceGates(NamedTuple):
    """From which size on gathering and scattering pays."""

    min_pages: int = 8
    min_bytes: int = 256 << 10

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> BounceGates:
        """The defaults, or what ``TRTLLM_KV_CACHE_BOUNCE_MIN_BLOCKS`` and ``..._MIN_BYTES`` say.

        Raises:
            ValueError: one of them is not a positive integer.
        """
        values = []
        for variable, default in (("BLOCKS", cls().min_pages), ("BYTES", cls().min_bytes)):
            name = f"TRTLLM_KV_CACHE_BOUNCE_MIN_{variable}"
            text = environment.get(name, str(default))
            if not text.isdecimal() or int(text) < 1:
                raise ValueError(f"{name} must be a positive integer, not {text!r}")
            values.append(int(text))
        return cls(*values)

    def admit(self, num_pages: int, num_bytes: int) -> bool:
        """Whether so many pages, or pieces that do not follow each other, are worth it."""
        return num_pages >= self.min_pages and num_bytes >= self.min_bytes


def count_fragments(parts: Sequence[Part], pools: Sequence[PoolMemory]) -> int:
    """In how many pieces parts move one by one: whole pages that are neighbours at both ends go together.

    Args:
        parts: what moves.
        pools: this engine's.
    """
    fragments = 0
    for part in parts:
        whole = part.nbytes == pools[part.local_pool].page_bytes
        joined = (np.diff(part.local) == 1) & (np.diff(part.remote) == 1) if whole else ()
        fragments += len(part.local) - int(np.count_nonzero(joined))
    return fragments


def owner_obstacle(fragments: int, num_bytes: int, offered: Run | None, gates: BounceGates) -> BounceObstacle | None:
    """Why an owner moves what was asked for page by page; None when it should go through its send region.

    Args:
        fragments: pieces in which it would move otherwise.
        num_bytes: bytes that move.
        offered: what the receiver has reserved for them.
        gates: the thresholds.
    """
    if offered is None:
        return "not_offered"
    if num_bytes > offered.nbytes:
        return "no_room"
    if num_bytes < gates.min_bytes:
        return "small"
    return None if gates.admit(fragments, num_bytes) else "contiguous"


class BounceRun:
    """Consecutive bytes of a region that are taken, until :meth:`give`."""

    def __init__(self, rooms: Rooms, address: int, where: Run) -> None:
        self._rooms = rooms
        self.address = address
        self.where = where
        self.taken = True

    def give(self) -> None:
        """Give the bytes back: nothing touches them any more. Idempotent; under the lock of the session that has it."""
        if self.taken:
            self.taken = False
            self._rooms.give(self.where.offset)


class BounceRegions:
    """The send and the receive region of an engine, and how often they were of use. Thread-safe.

    To a data plane they are two more pools, of one page each.

    Args:
        size_bytes: of each.
        pools: this engine's others; the regions are numbered after them.
        gates: the thresholds.

    Raises:
        PlaneError: the system has not so much memory.
    """

    def __init__(self, size_bytes: int, pools: Sequence[PoolMemory], gates: BounceGates) -> None:
        self._pools = pools
        self._copier = PageCopier(pools)
        self._gates = gates
        self._memory = [StagingMemory(RegionSize(size_bytes, reserved=True), _OPTION) for _ in range(2)]
        self._rooms = [Rooms(size_bytes) for _ in range(2)]
        self._lock = threading.Lock()
        self.size_bytes = size_bytes
        self.bounced_total = 0
        self.fallbacks: Counter[BounceObstacle] = Counter()

    @property
    def pools(self) -> list[PoolMemory]:
        """The send region, the receive region."""
        regions = [memory.region for memory in self._memory]
        return [PoolMemory(address=at, nbytes=size, num_pages=1, page_bytes=size, fd=fd) for at, size, fd in regions]

    @property
    def send_used_bytes(self) -> int:
        """Bytes taken in the send region."""
        return self._rooms[0].used_bytes

    @property
    def receive_used_bytes(self) -> int:
        """Bytes taken in the receive region, with those of ended transfers whose owner may still write."""
        return self._rooms[1].used_bytes

    def told_fallbacks(self) -> dict[str, int]:
        """How often pages moved one by one, by the reason."""
        with self._lock:
            return {str(reason): count for reason, count in self.fallbacks.items()}

    def stats(self) -> StagingStats:
        """How full the regions are."""
        return StagingStats(self.size_bytes, self.send_used_bytes, self.receive_used_bytes)

    def reserve(self, num_pages: int, num_bytes: int) -> BounceRun | None:
        """Receiver: a run for what is about to be asked for; None (counted) when the pages are to come one by one."""
        return self._take(1, num_bytes, None if self._gates.admit(num_pages, num_bytes) else "small")

    def gather(self, job: MoveJob, offered: Run | None) -> BounceRun | None:
        """Owner: copy the pages of a job into a run of the send region; None (counted) when they go one by one.

        Args:
            job: of the owner.
            offered: what the receiver has reserved for it.
        """
        fragments = count_fragments(job.parts, self._pools)
        run = self._take(0, job.num_bytes, owner_obstacle(fragments, job.num_bytes, offered, self._gates))
        if run is not None:
            with self._lock:
                self.bounced_total += 1
            self._copier.gather(run.address, job.parts, _all_of(job.parts))
        return run

    def scatter(self, run: BounceRun, parts: Sequence[Part], sums: PageSums | None) -> None:
        """Receiver: copy a run into the pages of ``parts``, and tell ``sums`` the checksums of what was written."""
        self._copier.scatter(run.address, parts, _all_of(parts), sums)

    def close(self) -> None:
        """Let the memory go; idempotent."""
        for memory in self._memory:
            memory.close()

    def _take(self, side: int, num_bytes: int, obstacle: BounceObstacle | None) -> BounceRun | None:
        offset = None if obstacle is not None or num_bytes > self.size_bytes else self._rooms[side].try_take(num_bytes)
        if offset is None:
            with self._lock:
                self.fallbacks[obstacle or "no_room"] += 1
            return None
        address = self._memory[side].region.address + offset
        return BounceRun(self._rooms[side], address, Run(len(self._pools) + side, offset, num_bytes))


def run_job(job: MoveJob, local: Run, remote: Run) -> MoveJob:
    """What moves a run in place of the pages of ``job``."""
    whole = np.zeros(1, dtype=np.int32)
    part = Part(local.pool, whole, remote.pool, whole, job.num_bytes, local.offset, remote.offset)
    return dataclasses.replace(job, parts=[part], sums=None)


def _all_of(parts: Sequence[Part]) -> list[Segment]:
    return [Segment(number, 0, len(part.local)) for number, part in enumerate(parts)]
