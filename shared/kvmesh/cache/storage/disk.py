"""The disk tier: one file per pool, locked by its owner, read and written page by page.

Nothing here trusts a file: it may be damaged, truncated or deleted at any time. It outlives no process: what a killed
owner left behind is recognised by its free lock and removed by the next one that starts (:func:`sweep`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvmesh.cache.storage.memory import PageMemory, Slots

__all__ = ["FILE_PREFIX", "PageFile", "sweep"]

FILE_PREFIX: Final = "kvmesh-cache-"
"""How every file of this module is named, in front of the owner's process id and something random."""

_IOV_MAX: Final = 1024
"""Pieces of memory that one system call takes."""
_ATTEMPTS: Final = 16
"""To make a file; each failure needs a sweeper in the same instant."""


class PageFile:
    """A pool of pages in a file: page ``i`` is at ``i * page_bytes``. Pages never written read as missing.

    Args:
        directory: an existing directory.
        page_bytes: bytes of a page.

    Raises:
        OSError: the file cannot be made or locked.
    """

    def __init__(self, directory: Path, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self.path, self._fd = _create(directory)
        self._closed = False

    def load(self, slots: Slots, memory: PageMemory, rows: Slots) -> NDArray[np.bool_]:
        """Read pages into ``rows`` of ``memory``; returns which of them were there, bool ``[n]``.

        A deleted file holds nothing: whoever deletes it wants it gone.
        """
        read = np.zeros(len(slots), dtype=np.bool_)
        if os.fstat(self._fd).st_nlink:
            memory.await_readers()
            for part in _neighbours(slots):
                read[part] = self._load_run(int(slots[part[0]]), memory, rows[part])
        return read

    def store(self, slots: Slots, memory: PageMemory, rows: Slots) -> None:
        """Write ``rows`` of ``memory``.

        Raises:
            OSError: the file system refuses some of them; any of them may have been written.
        """
        if not os.fstat(self._fd).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "the file was deleted", str(self.path))
        for part in _neighbours(slots):
            views = _views(memory, rows[part])
            written = _transfer(os.pwritev, self._fd, views, int(slots[part[0]]) * self._page_bytes)
            if written < len(part) * self._page_bytes:
                raise OSError(errno.EIO, f"a write stopped after {written} bytes", str(self.path))

    def resize(self, num_pages: int) -> None:
        """Give the space of pages from ``num_pages`` on back.

        Raises:
            OSError: the file system refuses.
        """
        nbytes = num_pages * self._page_bytes
        if os.fstat(self._fd).st_size > nbytes:
            os.ftruncate(self._fd, nbytes)

    def close(self) -> None:
        """Remove the file. Closing twice is harmless."""
        if not self._closed:
            self._closed = True
            _remove(self.path, self._fd)
            os.close(self._fd)

    def _load_run(self, first_slot: int, memory: PageMemory, rows: Slots) -> NDArray[np.bool_]:
        """Read as many pages as there are ``rows``; where the disk reports an error, one by one."""
        try:
            nbytes = _transfer(os.preadv, self._fd, _views(memory, rows), first_slot * self._page_bytes)
        except OSError:
            if len(rows) == 1:
                return np.zeros(1, dtype=np.bool_)
            single = [self._load_run(first_slot + i, memory, rows[i : i + 1]) for i in range(len(rows))]
            return np.concatenate(single)
        return np.arange(len(rows)) < nbytes // self._page_bytes


def sweep(directory: Path) -> list[Path]:
    """Remove the files whose owners are dead, and return them; files that are locked or not ours stay.

    Raises:
        OSError: the directory cannot be read.
    """
    removed = []
    for path in sorted(Path(entry.path) for entry in os.scandir(directory) if entry.name.startswith(FILE_PREFIX)):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # gone meanwhile, or another user's
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode) and _lock(fd) and _remove(path, fd):
                removed.append(path)
        finally:
            os.close(fd)
    return removed


def _create(directory: Path) -> tuple[Path, int]:
    """A new locked file. A sweeper may see it before it is locked, and then removes it."""
    for _ in range(_ATTEMPTS):
        path = directory / f"{FILE_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        # Prompts can be recovered from KV pages: for its owner's eyes only.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if _lock(fd) and os.fstat(fd).st_nlink:
                return path, fd
        except OSError:
            _remove(path, fd)
            os.close(fd)
            raise
        _remove(path, fd)
        os.close(fd)
    raise OSError(errno.EAGAIN, f"others removed {_ATTEMPTS} new files in a row", str(directory))


def _lock(fd: int) -> bool:
    """Whether the lock was free; it is held until the last copy of the descriptor is closed."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(path: Path, fd: int) -> bool:
    """Unlink ``path`` if it still is the open file ``fd``; whether it was."""
    try:
        if not os.path.samestat(path.lstat(), os.fstat(fd)):
            return False
        path.unlink()
    except OSError:
        return False
    return True


def _neighbours(slots: Slots) -> Iterator[NDArray[np.intp]]:
    """Indices into ``slots``, in parts whose slots follow each other."""
    order = np.argsort(slots, kind="stable")
    return iter(np.split(order, np.flatnonzero(np.diff(slots[order]) != 1) + 1)) if len(slots) else iter(())


def _views(memory: PageMemory, rows: Slots) -> list[memoryview]:
    """The memory of ``rows`` in order, neighbouring rows in one piece."""
    begins = np.concatenate(([0], np.flatnonzero(np.diff(rows) != 1) + 1))
    counts = np.diff(np.append(begins, len(rows)))
    whole, size = memoryview(memory.array), memory.page_bytes  # type: ignore[arg-type]
    return [
        whole[row * size : (row + count) * size]
        for row, count in zip(rows[begins].tolist(), counts.tolist(), strict=True)
    ]


def _transfer(call: Callable[[int, list[memoryview], int], int], fd: int, views: list[memoryview], offset: int) -> int:
    """Read into or write from ``views``, until they are done or the call makes no progress; returns bytes."""
    done = 0
    while views:
        count = call(fd, views[:_IOV_MAX], offset + done)
        if count == 0:
            break
        done += count
        views = _beyond(views, count)
    return done


def _beyond(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of ``views`` after their first ``nbytes``."""
    for index, view in enumerate(views):
        if nbytes < view.nbytes:
            return [view[nbytes:], *views[index + 1 :]]
        nbytes -= view.nbytes
    return []
