"""``kvmesh down``: stop the mesh that ``kvmesh up`` started, and clean up after one that was killed."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import time

from kvmesh.cli.rundir import ProcessState, RunDir, is_running

__all__ = ["add_arguments", "run"]

POLL_S = 0.05


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:  # noqa: ARG001 - one command
    """How long to wait."""
    parser.add_argument("--timeout-s", type=float, default=60.0, help="kill what has not ended by then (default: 60)")


def run(args: argparse.Namespace) -> int:
    """Ask the supervisor to stop everything; what is left after that is killed."""
    run_dir = RunDir.from_environment()
    state = run_dir.read()
    if state is None:
        print(f"no mesh runs in {run_dir.path}")
        return 0
    _signal(state.supervisor, signal.SIGTERM)
    _wait([state.supervisor], args.timeout_s)
    killed = [process for process in (state.supervisor, *state.children) if is_running(process)]
    for process in killed:
        # Children lead process groups of their own; the supervisor may share its group with the user's shell.
        _signal(process, signal.SIGKILL, group=process is not state.supervisor)
    _wait(killed, 5.0)
    shutil.rmtree(state.temp_dir, ignore_errors=True)
    run_dir.clear()
    print(f"stopped {state.url}" + (f" (killed {', '.join(process.name for process in killed)})" if killed else ""))
    return 0


def _wait(processes: list[ProcessState], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while any(map(is_running, processes)) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)


def _signal(process: ProcessState, number: signal.Signals, *, group: bool = False) -> None:
    if is_running(process):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number) if group else os.kill(process.pid, number)
