"""Becomes mpiexec, which then ends with the front: ``python -m kvmesh.engine.under_mpiexec PARENT_PID MPIEXEC ...``."""

from __future__ import annotations

import os
import sys

from kvmesh.engine.parent import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    # Ctrl-C in a terminal signals the foreground group: mpiexec would end the engine before it has drained.
    os.setpgid(0, 0)
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606 - no shell is wanted
