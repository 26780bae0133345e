from __future__ import annotations

import os
import subprocess
import sys

import pytest

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
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["logs"]
    with run_dir.claimed():
        pass


def test_the_directory_is_private(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    with run_dir.claimed():
        assert (tmp_path / "run").stat().st_mode & 0o077 == 0


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
