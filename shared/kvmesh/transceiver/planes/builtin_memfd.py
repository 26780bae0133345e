"""The built-in plane on one host: the receiver maps the owner's pools (memfd) read-only and copies the pages it wants.

A pool is opened through ``/proc/PID/fd/N``, which the kernel allows to processes of the same user, and is recognised by
device and inode: the number may mean another file in another process id namespace. A mapping outlives its owner, so a
copy in progress survives the owner's death.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvmesh.kernels import ops
from kvmesh.transceiver.liveness import ProcessIdentity
from kvmesh.transceiver.planes.base import MoveJob, PlaneError
from kvmesh.transceiver.runs import slices
from kvmesh.transceiver.types import PoolMemory

__all__ = ["MappedPools", "MemfdDescriptor", "SharedPool", "describe_pools"]

SLICE_BYTES: Final = 32 << 20
"""A stop is noticed between slices: a few milliseconds of copying, long against the cost of a call."""


class SharedPool(msgspec.Struct, frozen=True, array_like=True):
    """Where one pool can be opened."""

    fd: int
    device: int
    inode: int
    offset_bytes: int
    num_pages: int
    page_bytes: int


class MemfdDescriptor(msgspec.Struct, frozen=True, array_like=True):
    """What a receiver on the same host needs to map an owner's pools."""

    process: ProcessIdentity
    pools: list[SharedPool]


def describe_pools(pools: Sequence[PoolMemory]) -> MemfdDescriptor | None:
    """This process's pools for its peers; None when one of them is not backed by a file descriptor."""
    shared: list[SharedPool] = []
    for pool in pools:
        if pool.fd is None:
            return None
        status = os.fstat(pool.fd)
        shared.append(
            SharedPool(pool.fd, status.st_dev, status.st_ino, pool.fd_offset_bytes, pool.num_pages, pool.page_bytes)
        )
    return MemfdDescriptor(ProcessIdentity.current(), shared)


class MappedPools:
    """The read-only mappings of one peer's pools.

    Args:
        descriptor: the peer's description of them.
        pools: this process's pools, in the same order.

    Raises:
        PlaneError: the peer is elsewhere, or its memory cannot be opened or does not fit ours.
    """

    def __init__(self, descriptor: MemfdDescriptor, pools: Sequence[PoolMemory]) -> None:
        if not descriptor.process.observable:
            raise PlaneError("the peer runs on another host or in another process id namespace")
        theirs = [pool.page_bytes for pool in descriptor.pools]
        if theirs != (ours := [pool.page_bytes for pool in pools]):
            raise PlaneError(f"the peer's pools have pages of {theirs} bytes, this engine's {ours}")
        self._pools = pools
        self._counts = [pool.num_pages for pool in descriptor.pools]
        self._maps: list[NDArray[np.uint8]] = [_map(descriptor.process.pid, pool) for pool in descriptor.pools]
        self._addresses = [mapping.ctypes.data for mapping in self._maps]

    def pull(self, job: MoveJob, pool_of_group: Sequence[int]) -> int:
        """Copy the pages of ``job`` into this process's pools; see :meth:`DataPlane.move`."""
        moved = 0
        most = [max(1, SLICE_BYTES // self._pools[pool].page_bytes) for pool in pool_of_group]
        for group, pages in enumerate(job.remote):
            # As unsigned numbers negative ones are large.
            if len(pages) and int(pages.view(np.uint32).max()) >= self._counts[pool_of_group[group]]:
                raise PlaneError(f"the owner granted pages outside its pool of group {group}")
        for group, part in slices([len(pages) for pages in job.local], most):
            job.control.checkpoint()
            pool = self._pools[pool_of_group[group]]
            local, remote = job.local[group][part], job.remote[group][part]
            source = self._addresses[pool_of_group[group]]
            if job.sums is None:
                ops.copy_pages(pool.address, local, source, remote, pool.page_bytes)
            else:
                # One pass, which reads each byte once: the owner's memory can change, the sum is of what was written.
                sums = ops.copy_pages_checksummed(pool.address, local, source, remote, pool.page_bytes)
                job.sums.put(group, part, sums)
            moved += len(local) * pool.page_bytes
        job.control.checkpoint()
        return moved


def _map(pid: int, pool: SharedPool) -> NDArray[np.uint8]:
    path = f"/proc/{pid}/fd/{pool.fd}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise PlaneError(f"cannot open the peer's memory {path}: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        nbytes = pool.num_pages * pool.page_bytes
        if (status.st_dev, status.st_ino) != (pool.device, pool.inode):
            raise PlaneError(f"{path} is not the peer's memory: it runs in another process id namespace")
        if status.st_size < pool.offset_bytes + nbytes:
            raise PlaneError(f"{path} has {status.st_size} bytes, {pool.offset_bytes + nbytes} are described")
        mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=pool.offset_bytes)
    except OSError as error:
        raise PlaneError(f"cannot map the peer's memory {path}: {error.strerror}") from error
    finally:
        os.close(fd)
    return np.frombuffer(mapping, dtype=np.uint8)
