from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvmesh.cli.errors import UserError
from kvmesh.cli.rundir import MeshState, ProcessState, RunDir, RunDirBusyError, is_running, start_ticks


def state(**fields: object) -> MeshState:
    me = ProcessState(name="supervisor", pid=os.getpid(), start_ticks=start_ticks(os.getpid()))
    return MeshState(
        **{
            "phase": "ready",
            "supervisor": me,
            "url": "http://u",
            "coordinator_url": "http://c",
            "indexer_url": "http://i",
            "model": "m",
            "temp_dir": "",
            **fields,
        }
    )


def test_state_survives_and_rubbish_is_none(tmp_path):
    run_dir = RunDir(tmp_path)
    assert run_dir.read() is None
    run_dir.write(state())
    assert run_dir.read() == state()
    (tmp_path / "state.json").write_text("{")
    assert run_dir.read() is None


def test_one_mesh_a_directory_and_only_logs_stay(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    with run_dir.claimed():
        run_dir.write(state())
        run_dir.log_of("router").write_text("hello")
        with pytest.raises(RunDirBusyError), RunDir(tmp_path / "run").claimed():
            pass
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"logs", "lock"}
    with run_dir.claimed():
        pass


def test_the_directory_is_private(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run" / "state.tmp").touch(mode=0o644)
    with run_dir.claimed():
        run_dir.write(state())
        for path in (run_dir.path, *run_dir.path.iterdir()):
            assert path.stat().st_mode & 0o077 == 0, path


def test_preparing_alone_makes_it_private_too(tmp_path):
    run_dir = RunDir(tmp_path / "a" / "run")
    run_dir.prepare()
    assert run_dir.path.stat().st_mode & 0o777 == 0o700


def test_the_lock_stays_the_same_file(tmp_path):
    """Whoever opened it before the last mesh ended must still exclude the next one."""
    run_dir = RunDir(tmp_path)
    with run_dir.claimed():
        late = os.open(tmp_path / "lock", os.O_RDWR)
    try:
        fcntl.flock(late, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(RunDirBusyError), run_dir.claimed():
            pass
    finally:
        os.close(late)


def test_clearing_spares_a_mesh_that_runs_here_by_now(tmp_path):
    run_dir = RunDir(tmp_path)
    with run_dir.claimed():
        run_dir.write(state())
        run_dir.clear()
        assert run_dir.read() == state()
    run_dir.write(state())
    run_dir.clear()
    assert run_dir.read() is None


def test_a_directory_that_cannot_be_used_is_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", Path("/proc/nope")):
        with pytest.raises(UserError, match=f"{path} cannot be used"), RunDir(path).claimed():
            pass
        with pytest.raises(UserError, match="KVMESH_RUN_DIR"):
            RunDir(path).prepare()
    with pytest.raises(UserError):
        RunDir(tmp_path / "file").read()
    assert RunDir(Path("/proc/nope")).read() is None
    with pytest.raises(UserError):
        RunDir.from_environment({"KVMESH_RUN_DIR": "~no-such-user/x"})


def test_the_environment_names_the_directory(tmp_path):
    assert RunDir.from_environment({"KVMESH_RUN_DIR": str(tmp_path)}).path == tmp_path
    assert RunDir.from_environment({}).path.name == ".kvmesh"


def test_a_process_is_told_apart_from_a_later_one_with_its_pid():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = ProcessState(name="x", pid=child.pid, start_ticks=start_ticks(child.pid))
    assert is_running(process)
    assert not is_running(ProcessState(name="x", pid=child.pid, start_ticks=process.start_ticks + 1))
    child.communicate(b"\n")
    assert not is_running(process)
    assert start_ticks(child.pid) == 0
