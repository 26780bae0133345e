"""The built-in plane on one host: the receiver maps the owner's pools (memfd) read-only and copies the pages it wants.

A pool is opened through ``/proc/PID/fd/N``, which the kernel allows to processes of the same user, and is recognised by
device and inode: the number may mean another file in another process id namespace. A mapping outlives its owner, so a
copy in progress survives the owner's death.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvmesh.kernels import ops
from kvmesh.net.doorbell import BellRope, BellSign, Doorbell
from kvmesh.net.faults import fault_point
from kvmesh.telemetry import get_logger
from kvmesh.transceiver.liveness import ProcessIdentity
from kvmesh.transceiver.planes.base import MoveJob, Part, PlaneError, Sums
from kvmesh.transceiver.planes.grant_words import GRANT_BYTES, GrantBoard, check_grant
from kvmesh.transceiver.planes.loan_words import SLOT_BYTES, LoanBoard, LoanWords
from kvmesh.transceiver.planes.loans import Receipt
from kvmesh.transceiver.planes.pieces import check_remote, piece_slices
from kvmesh.transceiver.types import PoolMemory

__all__ = ["MappedPools", "MemfdDescriptor", "SharedPool", "describe_pools", "map_pool"]

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
    grants: SharedPool | None = None
    """The words of :mod:`kvmesh.transceiver.planes.grant_words`; None where nothing is granted."""
    loans: SharedPool | None = None
    """Those of :mod:`kvmesh.transceiver.planes.loan_words`; None where nothing is lent."""
    bell: BellSign | None = None
    """Tells the owner that a loan was taken."""


def describe_pools(
    pools: Sequence[PoolMemory],
    grants: GrantBoard | None = None,
    loans: LoanBoard | None = None,
    bell: Doorbell | None = None,
) -> MemfdDescriptor | None:
    """This process's pools for its peers; None when one of them is not backed by a file descriptor.

    Args:
        pools: what peers may map.
        grants: the grants of these pools, if readers need any.
        loans: what is lent of these pools.
        bell: rung by who has taken a loan.
    """
    shared: list[SharedPool] = []
    for pool in pools:
        if pool.fd is None:
            return None
        shared.append(_describe(pool.fd, pool.fd_offset_bytes, pool.num_pages, pool.page_bytes))
    return MemfdDescriptor(
        ProcessIdentity.current(),
        shared,
        grants=None if grants is None else _describe(grants.fd, 0, grants.num_pages, grants.page_bytes),
        loans=None if loans is None else _describe(loans.fd, 0, loans.num_pages, loans.page_bytes),
        bell=None if bell is None else bell.sign,
    )


def _describe(fd: int, offset_bytes: int, num_pages: int, page_bytes: int) -> SharedPool:
    status = os.fstat(fd)
    return SharedPool(fd, status.st_dev, status.st_ino, offset_bytes, num_pages, page_bytes)


class MappedPools:
    """The read-only mappings of one peer's pools, and that of what it lends.

    Args:
        descriptor: the peer's description of them.
        pools: this process's pools.

    Raises:
        PlaneError: the peer is elsewhere, or its memory cannot be opened.
    """

    def __init__(self, descriptor: MemfdDescriptor, pools: Sequence[PoolMemory]) -> None:
        if not descriptor.process.observable:
            raise PlaneError("the peer runs on another host or in another process id namespace")
        if descriptor.grants is None:
            raise PlaneError("the peer's memory is not granted to readers")
        self._grants = map_pool(descriptor.process.pid, descriptor.grants).data.cast("Q")
        self._pools = pools
        self._remote = descriptor.pools
        self._maps: list[NDArray[np.uint8]] = [map_pool(descriptor.process.pid, pool) for pool in descriptor.pools]
        self._addresses = [mapping.ctypes.data for mapping in self._maps]
        self._lender = _lender(descriptor)

    def stands(self, access: bytes) -> bool:
        """See :meth:`Loans.stands`."""
        return self._lender is not None and self._lender.words.stands(access)

    def take(self, access: bytes, receipt: Receipt) -> bool:
        """See :meth:`Loans.take`."""
        if self._lender is None or not self._lender.words.take(access, receipt):
            return False
        self._lender.bell.pull()
        return True

    def read_lent(self, parts: Sequence[Part], *, summed: bool) -> list[Sums]:
        """See :meth:`Loans.read`."""
        check_remote(parts, self._remote)
        sums: list[Sums] = []
        for part in parts:
            fault_point("transceiver.during_transfer")
            local = self._pools[part.local_pool]
            arguments = (
                local.address,
                part.local,
                self._addresses[part.remote_pool],
                part.remote,
                part.nbytes,
                local.page_bytes,
                self._remote[part.remote_pool].page_bytes,
            )
            if summed:
                sums.append(ops.copy_pages_checksummed(*arguments))
            else:
                ops.copy_pages(*arguments)
        fault_point("transceiver.during_transfer")
        return sums

    def pull(self, job: MoveJob) -> int:
        """Copy the pieces of ``job`` into this process's pools; see :meth:`DataPlane.move`.

        An owner that has taken the pages back meanwhile, because it took this process for dead, makes it fail.
        """
        check_remote(job.parts, self._remote)
        for index, pieces in piece_slices(job.parts, SLICE_BYTES):
            job.control.checkpoint()
            part = job.parts[index]
            local, remote = self._pools[part.local_pool], self._remote[part.remote_pool]
            arguments = (
                local.address + part.local_offset,
                part.local[pieces],
                self._addresses[part.remote_pool] + part.remote_offset,
                part.remote[pieces],
                part.nbytes,
                local.page_bytes,
                remote.page_bytes,
            )
            if job.sums is None:
                ops.copy_pages(*arguments)
            else:
                # One pass, which reads each byte once: the owner's memory can change, the sum is of what was written.
                job.sums.put(index, pieces, ops.copy_pages_checksummed(*arguments))
        job.control.checkpoint()
        check_grant(self._grants, job.access[-GRANT_BYTES:])
        return job.num_bytes


class _Lender(NamedTuple):
    """What a peer lends, and how it is told."""

    words: LoanWords
    bell: BellRope


def _lender(descriptor: MemfdDescriptor) -> _Lender | None:
    """None where nothing is lent, or could be told: then pages are asked for."""
    if descriptor.loans is None or descriptor.bell is None:
        return None
    log = get_logger("transceiver.builtin")
    if descriptor.loans.page_bytes != SLOT_BYTES:
        log.info("nothing can be read on loan", reason=f"words in slots of {descriptor.loans.page_bytes} bytes")
        return None
    pid = descriptor.process.pid
    try:
        words = map_pool(pid, descriptor.loans, writable=True).data.cast("Q")
        return _Lender(LoanWords(words), BellRope(pid, descriptor.bell))
    except (OSError, PlaneError) as error:
        log.info("nothing can be read on loan", reason=str(error))
        return None


def map_pool(pid: int, pool: SharedPool, *, writable: bool = False) -> NDArray[np.uint8]:
    """Map memory of another process of the same user on this host; it goes with the last view of it.

    Raises:
        PlaneError: it cannot be opened, or is not what is described.
    """
    path = f"/proc/{pid}/fd/{pool.fd}"
    try:
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    except OSError as error:
        raise PlaneError(f"cannot open the peer's memory {path}: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        nbytes = pool.num_pages * pool.page_bytes
        if min(pool.num_pages, pool.page_bytes) < 1 or pool.offset_bytes < 0 or pool.offset_bytes % mmap.PAGESIZE:
            raise PlaneError(
                f"{pool.num_pages} pages of {pool.page_bytes} bytes from byte {pool.offset_bytes} of {path} are no pool"
            )
        if (status.st_dev, status.st_ino) != (pool.device, pool.inode):
            raise PlaneError(f"{path} is not the peer's memory: it runs in another process id namespace")
        if status.st_size < pool.offset_bytes + nbytes:
            raise PlaneError(f"{path} has {status.st_size} bytes, {pool.offset_bytes + nbytes} are described")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, protection, offset=pool.offset_bytes)
    except OSError as error:
        raise PlaneError(f"cannot map the peer's memory {path}: {error.strerror}") from error
    finally:
        os.close(fd)
    return np.frombuffer(mapping, dtype=np.uint8)
