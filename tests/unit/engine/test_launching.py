"""How engine processes are started, and that none outlives its front."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from meshes.process import shared_memory, until

from kvmesh.config import WorkerSettings
from kvmesh.config.cache_transceiver import CacheTransceiverConfig
from kvmesh.engine import launching
from kvmesh.engine.launching import MPIEXEC_OPTIONS, Launch, find_mpiexec, plan_launch

needs_mpi = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs make venv EXTRAS=mpi")

FRONT = """
import os, subprocess, sys, time
command = [sys.executable, "-m", "kvmesh.engine.under_mpiexec", str(os.getpid()), *sys.argv[1:-1]]
child = [sys.executable, "-c", sys.argv[-1], str(os.getpid())]
process = subprocess.Popen([*command, *child], stdin=subprocess.PIPE)
process.stdin.write(b"settings" * 5000)
process.stdin.close()
process.wait()
print("ended", process.returncode, flush=True)
time.sleep(60)
"""
ENGINE = """
import os, sys, time
from kvmesh.engine.parent import die_with_parent
die_with_parent(int(sys.argv[1]))
assert len(sys.stdin.buffer.read()) == 40000
print("engine", os.getpid(), flush=True)
{then}
"""


def settings(**transfers: str) -> WorkerSettings:
    return WorkerSettings(cache_transceiver_config=CacheTransceiverConfig(**transfers))  # type: ignore[arg-type]


def test_an_engine_is_python_alone_unless_transfers_go_over_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [sys.executable, "-m", "kvmesh.engine.process", "endpoint"]
    monkeypatch.setattr(launching, "find_mpiexec", lambda: Path("/there/mpiexec"))
    for config, environment in [
        (settings(), {"TRTLLM_USE_MPI_KVCACHE": "1"}),
        (settings(backend="UCX"), {"TRTLLM_USE_MPI_KVCACHE": "1"}),
        (settings(backend="DEFAULT"), {}),
    ]:
        assert plan_launch(config, ("endpoint",), environment) == Launch(alone, under_mpiexec=False)
    for config, environment in [
        (settings(backend="MPI"), {}),
        (settings(backend="DEFAULT"), {"TRTLLM_USE_MPI_KVCACHE": "1"}),
    ]:
        launch = plan_launch(config, ("endpoint",), environment)
        assert launch.under_mpiexec
        assert launch.command[-len(alone) :] == alone
        assert launch.command[3:5] == [str(os.getpid()), "/there/mpiexec"]


def test_a_missing_mpiexec_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(FileNotFoundError, match=r"make venv EXTRAS=mpi"):
        find_mpiexec()


def test_the_exit_code_of_a_killed_engine_is_minus_its_signal() -> None:
    under, alone = Launch([], under_mpiexec=True), Launch([], under_mpiexec=False)
    assert [under.exit_code(code) for code in (0, 1, 70, 9, 11, -9)] == [0, 1, 70, -9, -11, -9]
    assert alone.exit_code(9) == 9


@needs_mpi
@pytest.mark.parametrize("victim", ["front", "mpiexec", "proxy", "engine"])
def test_nothing_outlives_a_kill_of_anybody(victim: str) -> None:
    """Settings arrive on stdin, and the engine ends with whoever is killed above it."""
    front = _front("time.sleep(60)")
    assert front.stdout is not None
    engine = psutil.Process(int(front.stdout.readline().split()[1]))
    proxy = engine.parent()
    assert proxy is not None
    mpiexec = proxy.parent()
    assert mpiexec is not None
    try:
        {"front": front, "mpiexec": mpiexec, "proxy": proxy, "engine": engine}[victim].send_signal(signal.SIGKILL)
        until(lambda: not any(_runs(one) for one in (engine, proxy, mpiexec)), "all have ended")
        if victim == "engine":
            assert "ended 9\n" in iter(front.stdout.readline, "")  # After mpiexec's own words on the matter.
    finally:
        front.kill()
        front.wait(10)
        front.stdout.close()


@needs_mpi
@pytest.mark.parametrize("code", [0, 70])
def test_the_exit_status_is_the_engines(code: int) -> None:
    front = _front(f"os._exit({code})")
    assert front.stdout is not None
    try:
        front.stdout.readline()
        assert front.stdout.readline().split() == ["ended", str(code)]
    finally:
        front.kill()
        front.wait(10)
        front.stdout.close()


@needs_mpi
def test_a_killed_process_leaves_no_shared_memory() -> None:
    before = shared_memory()
    front = _front(
        "from kvmesh.transceiver.channels.mpi_library import load_mpi; load_mpi('127.0.0.1');"
        "print('up', flush=True); os.kill(os.getpid(), 9)"
    )
    assert front.stdout is not None
    try:
        lines = [front.stdout.readline().split()[0] for _ in range(2)]
        assert lines == ["engine", "up"]
        assert "ended 9\n" in iter(front.stdout.readline, "")
        assert shared_memory() - before == set()
    finally:
        front.kill()
        front.wait(10)
        front.stdout.close()


def _front(then: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", FRONT, str(find_mpiexec()), *MPIEXEC_OPTIONS, ENGINE.format(then=then)],
        stdout=subprocess.PIPE,
        text=True,
    )


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
