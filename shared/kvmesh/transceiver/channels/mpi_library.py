"""Loading MPICH in a process that its mpiexec has started, and connecting two such processes.

One process is one MPI world, so peers meet with Open_port, Accept and Connect.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, Final

from kvmesh.transceiver.planes.base import PlaneError
from kvmesh.transceiver.ucx_environment import INFINIBAND, prepare_ucx

__all__ = ["TAG_MASK", "MpiError", "connect_bounded", "load_mpi", "prepare_mpi"]

TAG_MASK: Final = (1 << 29) - 1
"""MPICH's largest tag over UCX."""
HANG_S: Final = 5.0
"""Past its own time limit, a call to MPICH is taken to hang."""

_SEGMENT: Final = "/dev/shm/mpich_shm_"  # noqa: S108 - where MPICH puts it


class MpiError(Exception):
    """What MPICH said of a call that failed."""


def prepare_mpi(environment: MutableMapping[str, str], *, bind_host: str, infiniband: bool) -> None:
    """Set what MPICH reads when it is loaded; what is set already stays.

    Its other network module, libfabric, hangs in a send to a dead peer.
    """
    environment.setdefault("MPIR_CVAR_CH4_NETMOD", "ucx")
    prepare_ucx(environment, bind_host=bind_host, infiniband=infiniband)


def load_mpi(bind_host: str) -> Any:
    """Initialise MPI and return ``mpi4py.MPI``. To be called once, by the thread that makes all later calls.

    Raises:
        PlaneError: it is not installed, this process was not started by mpiexec, or MPICH does not work here.
    """
    if "PMI_FD" not in os.environ and "PMI_PORT" not in os.environ:
        raise PlaneError(
            "MPI works only in a process that was started by `mpiexec -n 1`, as a worker starts its engine"
        )
    prepare_mpi(os.environ, bind_host=bind_host, infiniband=INFINIBAND.exists())
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        # The process ends without MPI_Finalize, which would wait for peers that are dead.
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise PlaneError(
            f"cache_transceiver_config.backend MPI needs mpi4py and MPICH: make venv EXTRAS=mpi ({str(error).strip()})"
        ) from error
    try:
        if MPI.Is_initialized():
            raise PlaneError("MPI has been used in this process already")
        provided = MPI.Init_thread(MPI.THREAD_SERIALIZED)
        for communicator in (MPI.COMM_WORLD, MPI.COMM_SELF):
            communicator.Set_errhandler(MPI.ERRORS_RETURN)
        largest_tag = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 0)
    except MPI.Exception as error:
        raise PlaneError(f"MPI cannot be used here: {error}") from error
    finally:
        _remove_segments()
    if "MPICH" not in MPI.Get_library_version():
        raise PlaneError("the MPI backend is built for MPICH: make venv EXTRAS=mpi without another MPI")
    if provided < MPI.THREAD_SERIALIZED or largest_tag < TAG_MASK:
        raise PlaneError("this MPICH has no serialised threads, or its tags are too small")
    return MPI


def connect_bounded(mpi: Any, connect: Callable[[Any], Any], seconds: int) -> Any:
    """``connect(info)``, an Accept or a Connect, with MPICH's own time limit, on a thread of its own.

    When such a call times out, MPICH leaves pointers into its stack with the network, which may yet be written
    through. So a thread whose call has failed is parked for good instead of lending its stack to anything else.

    Returns:
        The intercommunicator.

    Raises:
        MpiError: it failed or timed out.
        TimeoutError: it hangs; MPI must not be used any more.
    """
    ended = threading.Event()
    outcome: list[Any] = []

    def run() -> None:
        info = mpi.Info.Create()
        info.Set("timeout", str(seconds))
        try:
            communicator = connect(info)
            communicator.Set_errhandler(mpi.ERRORS_RETURN)
            outcome.append(communicator)
        except mpi.Exception as error:
            outcome.append(MpiError(" ".join(str(error).split())))
            ended.set()
            threading.Event().wait()
        ended.set()

    threading.Thread(target=run, name="kvmesh-mpi-connect", daemon=True).start()
    if not ended.wait(seconds + HANG_S):
        raise TimeoutError
    if isinstance(outcome[0], MpiError):
        raise outcome[0]
    return outcome[0]


def _remove_segments() -> None:
    """Unlink the shared memory that MPICH has made for ranks on this host: this process is the only one of its world.

    Nobody would remove it when the process is killed, or ends without MPI_Finalize.
    """
    mine = {
        path
        for line in Path("/proc/self/maps").read_text().splitlines()
        if (path := line.rpartition(" ")[2]).startswith(_SEGMENT)
    }
    for path in mine:
        Path(path).unlink(missing_ok=True)
