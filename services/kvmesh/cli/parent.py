"""A child of ``kvmesh up`` ends when its supervisor does, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal

__all__ = ["SUPERVISOR_PID_VARIABLE", "end_with_parent"]

SUPERVISOR_PID_VARIABLE = "KVMESH_SUPERVISOR_PID"
"""Set by the supervisor in its children's environment."""

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel send this process SIGTERM when its supervisor dies; nothing when there is none.

    The child asks for this itself: between fork and exec, in a process that has threads, hardly anything is safe.
    """
    supervisor = os.environ.get(SUPERVISOR_PID_VARIABLE)
    if supervisor is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != int(supervisor):  # it died before the request was made
        raise SystemExit(0)
