"""Memory that a peer on the same host can map through the file descriptor that is behind it (``/proc/PID/fd``)."""

from __future__ import annotations

import mmap
import os

__all__ = ["map_shared"]


def map_shared(name: str, nbytes: int, *, reserved: bool = False) -> tuple[int, mmap.mmap]:
    """Zeroed memory without a file: it vanishes with the last process that maps it or has it open.

    Args:
        name: tells people in ``/proc`` what it is.
        nbytes: its size, at least 1.
        reserved: take the memory from the system now, instead of page by page when it is touched.

    Returns:
        The descriptor of the memfd, which child processes do not inherit, and the mapping.

    Raises:
        OSError: the system refuses it.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        if reserved:
            os.posix_fallocate(fd, 0, nbytes)
        return fd, mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except BaseException:
        os.close(fd)
        raise
