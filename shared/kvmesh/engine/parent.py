"""Processes that never outlive the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

__all__ = ["die_with_parent"]

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, also when the parent is killed.

    Args:
        parent_pid: of the parent, or of a farther ancestor whose death ends all those between the two.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if not _descends_from(parent_pid):  # It died between the fork and the call.
        os.kill(os.getpid(), signal.SIGKILL)


def _descends_from(ancestor_pid: int) -> bool:
    pid = os.getppid()
    while pid not in (ancestor_pid, 0, 1):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        pid = int(stat.rpartition(")")[2].split()[1])
    return pid == ancestor_pid
