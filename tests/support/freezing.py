"""Freezing a process of a test, so that it surely does nothing more from then on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

__all__ = ["freeze", "is_frozen"]

PATIENCE_S = 60.0


def freeze(pid: int) -> None:
    """SIGSTOP; returns when the process has stopped.

    The signal alone is not enough: it is some thread of the process that takes it, when it is given a processor, and
    until then the others run on.
    """
    os.kill(pid, signal.SIGSTOP)
    end_s = time.monotonic() + PATIENCE_S
    while not is_frozen(pid):
        assert time.monotonic() < end_s, f"process {pid} does not stop"
        time.sleep(0.001)


def is_frozen(pid: int) -> bool:
    """Whether every thread of a process has stopped."""
    threads = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in threads)
