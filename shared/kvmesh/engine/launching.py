"""The command that starts an engine process: Python alone, or under MPICH's mpiexec where transfers go over MPI.

MPI connects processes that belong to an MPI world, so each engine is one of its own. A launcher in between has the
kernel kill mpiexec when the front dies; mpiexec's proxy then ends, and so does the engine.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from kvmesh.config import WorkerSettings
from kvmesh.config.transfer_backend import ServerFacts, resolve_backend

__all__ = ["MPIEXEC_OPTIONS", "Launch", "find_mpiexec", "plan_launch"]

MPIEXEC_OPTIONS = ("-launcher", "fork", "-rmk", "user", "-localhost", "127.0.0.1", "-n", "1")
"""One process, here, whatever batch system this runs in and whatever this host is called."""

_KILLING_SIGNALS = frozenset(
    {signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTERM}
)


class Launch(NamedTuple):
    """How an engine process is started."""

    command: list[str]
    under_mpiexec: bool

    def exit_code(self, code: int) -> int:
        """The engine's exit status, or minus the signal that killed it, from that of the process that was started.

        mpiexec ends with the signal's number when its process was killed; an engine itself has no such status.
        """
        killed = self.under_mpiexec and code in _KILLING_SIGNALS
        return -code if killed else code


def plan_launch(
    settings: WorkerSettings, arguments: tuple[str, ...], environment: Mapping[str, str] = os.environ
) -> Launch:
    """What to run for an engine.

    Args:
        settings: the worker's.
        arguments: of ``kvmesh.engine.process``.
        environment: for the DEFAULT backend's selectors.

    Raises:
        FileNotFoundError: transfers go over MPI and MPICH's mpiexec is not installed beside this Python.
    """
    engine = [sys.executable, "-m", "kvmesh.engine.process", *arguments]
    transfers = settings.cache_transceiver_config
    if transfers.backend is None or resolve_backend(transfers, environment, ServerFacts())[0] != "MPI":
        return Launch(engine, under_mpiexec=False)
    launcher = [sys.executable, "-m", "kvmesh.engine.under_mpiexec", str(os.getpid())]
    return Launch([*launcher, str(find_mpiexec()), *MPIEXEC_OPTIONS, *engine], under_mpiexec=True)


def find_mpiexec() -> Path:
    """The mpiexec that the MPICH package has put beside this interpreter.

    Raises:
        FileNotFoundError: there is none; the message names the extra.
    """
    path = Path(sys.executable).parent / "mpiexec"
    if not path.exists():
        raise FileNotFoundError(
            f"cache_transceiver_config.backend MPI starts engines with MPICH's mpiexec, and {path} is not there: "
            "make venv EXTRAS=mpi"
        )
    return path
