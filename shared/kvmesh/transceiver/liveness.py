"""Seeing a peer on the same host die, at once and without a coordinator: a pidfd becomes readable when it exits."""

from __future__ import annotations

import os
import select
from pathlib import Path

import msgspec

__all__ = ["ProcessGoneError", "ProcessIdentity", "has_ended", "open_process"]

_PROC = Path("/proc")
_START_TIME_FIELD = 19
"""Index of ``starttime`` in ``/proc/PID/stat`` after the closing parenthesis of the command name."""


class ProcessGoneError(Exception):
    """The process lived on this host and has ended."""


class ProcessIdentity(msgspec.Struct, frozen=True, array_like=True):
    """One process on one boot of one host; safe against reused process ids."""

    boot_id: str
    pid_namespace: str
    pid: int
    start_ticks: int

    @classmethod
    def current(cls) -> ProcessIdentity:
        """This process."""
        pid = os.getpid()
        return cls(_boot_id(), _pid_namespace(), pid, _start_ticks(pid))

    @property
    def observable(self) -> bool:
        """Whether it shares this host and this process id namespace."""
        return (self.boot_id, self.pid_namespace) == (_boot_id(), _pid_namespace())


def open_process(identity: ProcessIdentity) -> int | None:
    """A pidfd of ``identity`` that becomes readable when it ends; the caller closes it. None when it lives elsewhere.

    Raises:
        ProcessGoneError: it ended already.
    """
    if not identity.observable:
        return None
    try:
        fd = os.pidfd_open(identity.pid)
    except (ProcessLookupError, OverflowError, ValueError) as error:
        # No process has, or had, a number that is none.
        raise ProcessGoneError(f"process {identity.pid} has ended") from error
    except OSError as error:
        if identity.pid > 0:
            raise
        raise ProcessGoneError(f"process {identity.pid} has ended") from error
    # Read after the pidfd is open: from here on the id cannot come to mean another process unnoticed.
    if _start_ticks(identity.pid) != identity.start_ticks:
        os.close(fd)
        raise ProcessGoneError(f"process {identity.pid} has ended")
    return fd


def has_ended(pidfd: int) -> bool:
    """Whether the process has ended, even where its parent has not taken note yet."""
    poller = select.poll()  # select() cannot look at descriptors from 1024 on.
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def _boot_id() -> str:
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> str:
    return str((_PROC / "self/ns/pid").readlink())


def _start_ticks(pid: int) -> int:
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    return int(stat.rpartition(")")[2].split()[_START_TIME_FIELD])
