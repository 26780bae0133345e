"""``kvmesh up`` and ``down`` as processes, with children that need no model."""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from kvmesh.cli.console import print_ready
from kvmesh.cli.rundir import MeshState, ProcessState, RunDir, start_ticks

PROGRAM = Path(__file__).with_name("mesh_program.py")
PORTS = ("--port=0", "--set=coordinator.port=0", "--set=indexer.port=0", "--set=lease_s=1", "--set=drain_s=1")


class Command:
    """Runs the command with a run directory and a temp directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.run_dir = RunDir(directory / "run")
        self.temp = directory / "tmp"
        self.temp.mkdir()
        self.env = {**os.environ, "KVMESH_RUN_DIR": str(self.run_dir.path), "TMPDIR": str(self.temp), "COLUMNS": "200"}
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *argv: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *argv],
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(PROGRAM), *argv],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def ready(self) -> MeshState:
        wait(lambda: (state := self.run_dir.read()) is not None and state.phase == "ready")
        state = self.run_dir.read()
        assert state is not None
        return state

    def assert_nothing_left(self, state: MeshState) -> None:
        assert {path.name for path in self.run_dir.path.iterdir()} == {"logs", "lock"}
        assert list(self.temp.iterdir()) == []
        wait(lambda: not any(start_ticks(child.pid) for child in state.children))


def wait(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    command = Command(tmp_path)
    yield command
    state = command.run_dir.read()
    for process in command.started:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=30)
    for child in state.children if state is not None else []:
        if start_ticks(child.pid) == child.start_ticks != 0:
            os.kill(child.pid, signal.SIGKILL)


def test_up_answers_says_so_and_leaves_nothing(command):
    up = command.start("up", *PORTS)
    state = command.ready()
    assert {child.name for child in state.children} == {"coordinator", "indexer", "context-0", "generation-0", "router"}
    second = command.run("up", *PORTS)
    assert second.returncode == 2
    assert "a mesh runs already at" in second.stderr
    status = command.run("status")
    assert "context-0" in status.stdout
    wait(lambda: "a warning" in command.run_dir.log_of("context-0").read_text())
    time.sleep(0.6)  # one poll of the logs: what is tested is that it shows
    up.send_signal(signal.SIGINT)
    output, _ = up.communicate(timeout=30)
    assert up.returncode == 0, output
    assert f"KVMesh is ready at {state.url}" in output
    assert "A Paris." in output
    assert re.search(r"first token after \d+ ms \(TTFT\), then \d+\.\d ms a token \(TPOT\)", output)
    assert f"curl -N {state.url}/v1/chat/completions" in output
    assert "context-0 warning a warning to show" in output
    for name in ("coordinator", "indexer", "context-0", "generation-0", "router"):
        assert re.search(rf"^  up {name} ", output, re.MULTILINE)
    secret = re.search(r"secret=(\S+)", output)
    assert secret is not None
    command.assert_nothing_left(state)


def test_a_killed_child_comes_back_and_rejoins(command):
    up = command.start("up", *PORTS)
    before = command.ready()
    pids = {child.name: child.pid for child in before.children}
    for name in ("context-0", "coordinator"):
        os.kill(pids[name], signal.SIGKILL)

    def all_back() -> bool:
        state = command.run_dir.read()
        now = {child.name: child for child in state.children}
        return all(name in now and now[name].pid != pids[name] for name in ("context-0", "coordinator"))

    wait(all_back)
    wait(lambda: "generation-0" in (text := command.run("status").stdout) and "context-0" in text)
    after = command.run_dir.read()
    assert {child.name: child.restarts for child in after.children}["context-0"] == 1
    up.send_signal(signal.SIGTERM)
    output, _ = up.communicate(timeout=30)
    assert "context-0 died (SIGKILL); starting it again in 0.5 s" in output
    command.assert_nothing_left(after)


def test_detached_and_down(command):
    up = command.run("up", "--detach", *PORTS)
    assert up.returncode == 0, up.stdout
    assert "KVMesh is ready at" in up.stdout
    assert "kvmesh down stops it" in up.stdout
    assert "context-0 warning a warning to show" in up.stdout, "as the foreground shows it"
    state = command.ready()
    assert command.run_dir.path.stat().st_mode & 0o777 == 0o700
    assert (command.run_dir.path / "state.json").stat().st_mode & 0o777 == 0o600
    down = command.run("down")
    assert down.stdout == f"stopped {state.url}\n"
    assert start_ticks(state.supervisor.pid) == 0
    command.assert_nothing_left(state)
    assert "no mesh runs" in command.run("down").stdout


def test_down_cleans_up_after_a_killed_supervisor(command):
    up = command.start("up", *PORTS)
    state = command.ready()
    up.kill()
    up.wait()
    assert command.run("down").returncode == 0
    command.assert_nothing_left(state)


def test_a_model_that_cannot_be_loaded_ends_the_start_with_its_log(command):
    up = command.run("up", "--model=broken", *PORTS)
    assert up.returncode == 2
    assert "generation-0 does not start (exit status 2)" in up.stdout
    assert "this model cannot be loaded" in up.stdout
    assert {path.name for path in command.run_dir.path.iterdir()} == {"logs", "lock"}
    detached = command.run("up", "--detach", "--model=broken", *PORTS)
    assert detached.returncode == 2
    assert "this model cannot be loaded" in detached.stdout


def test_a_mesh_that_is_not_ready_in_time_says_what_it_waited_for(command):
    up = command.run("up", "--set=ready_timeout_s=0.01", *PORTS)
    assert up.returncode == 1
    assert "not ready within 0.01 s: " in up.stdout
    assert "context-0, coordinator, generation-0, indexer did not come up" in up.stdout


def test_a_mesh_that_never_serves_says_why_in_the_routers_words(command):
    up = command.run("up", "--model=unready", "--set=ready_timeout_s=6", *PORTS)
    assert up.returncode == 1
    assert "not ready within 6 s: all have come up, but " in up.stdout
    assert "answered 503: no pair is usable" in up.stdout


def test_servers_too_small_for_the_first_question_are_told_apart_from_defects(command):
    up = command.run("up", "--model=small", *PORTS)
    assert up.returncode == 1
    assert "the first question does not fit into the servers: It holds 10 tokens. Raise what limits" in up.stdout
    assert "kv_cache_config.max_tokens" in up.stdout


def test_halves_that_never_pair_start_nothing(command):
    up = command.run("up", "--set=context.kv_cache_config.tokens_per_block=64", *PORTS)
    assert up.returncode == 2
    assert "context.kv_cache_config.tokens_per_block is 64 and generation" in up.stderr
    assert not command.run_dir.path.exists(), "nothing was begun"


def test_key_files_are_read_before_anything_starts(command, tmp_path):
    (tmp_path / "public").write_text('curve\n    public-key = "x"\n')
    for setting, says in (
        ("api_keys_file=/nope.keys", "api_keys_file /nope.keys cannot be read: No such file or directory"),
        ("router.api_keys_file=/nope.keys", "api_keys_file /nope.keys cannot be read"),
        ("events.key_file=/nope.keys", "events.key_file /nope.keys cannot be read"),
        (f"curve.key_file={tmp_path / 'public'}", "holds no secret key; name the file that ends in .key_secret"),
    ):
        up = command.run("up", f"--set={setting}", *PORTS)
        assert (up.returncode, up.stderr.count("\n")) == (2, 1), up.stderr
        assert says in up.stderr
        assert "starting" not in up.stdout
    assert not command.run_dir.path.exists(), "nothing was begun"


def test_a_mesh_that_was_killed_is_not_taken_for_another(command):
    """At the default ports there may be one of another run directory."""
    command.run_dir.prepare()
    command.run_dir.write(
        MeshState(
            phase="ready",
            supervisor=ProcessState(name="supervisor", pid=os.getpid(), start_ticks=1),
            url="http://127.0.0.1:18601",
            coordinator_url="http://127.0.0.1:18602",
            indexer_url="http://127.0.0.1:18603",
            model="m",
            temp_dir="",
        )
    )
    for name in ("status", "transfers"):
        told = command.run(name)
        assert told.returncode == 2
        assert "the mesh at http://127.0.0.1:18601 has died" in told.stderr
        assert "kvmesh down" in told.stderr


def test_a_misspelt_setting_of_the_workers_names_the_nearest(command):
    up = command.run("up", "--set=kv_cache_confg.max_tokens=4", *PORTS)
    assert up.returncode == 2
    assert "did you mean 'kv_cache_config'?" in up.stderr


def test_the_command_to_copy_has_the_key_where_one_is_asked_for(tmp_path):
    state = MeshState(
        phase="ready",
        supervisor=ProcessState(name="supervisor", pid=1, start_ticks=1),
        url="http://127.0.0.1:8000",
        coordinator_url="",
        indexer_url="",
        model="m",
        temp_dir="",
    )
    for with_key in (False, True):
        console = Console(file=io.StringIO())
        print_ready(console, state, RunDir(tmp_path), detached=False, with_key=with_key)
        assert (
            '-H "Authorization: Bearer $KVMESH_API_KEY" http://127.0.0.1:8000' in console.file.getvalue()
        ) is with_key


def test_a_taken_port_is_named(command):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        up = command.run("up", f"--port={listener.getsockname()[1]}")
    assert up.returncode == 2
    assert "is taken; choose another with --port" in up.stderr


@pytest.mark.parametrize(
    ("loser", "said"),
    [
        ("coordinator", r"taken meanwhile: \d+; starting again at other ports"),
        ("context-0", r"context-0 died \(exit status 2\); starting it again in 0.5 s"),
    ],
)
def test_a_port_lost_before_its_use_is_replaced(command, loser, said):
    command.env["LOSE"] = loser
    up = command.start("up", *PORTS)
    state = command.ready()
    up.send_signal(signal.SIGINT)
    output, _ = up.communicate(timeout=30)
    assert up.returncode == 0, output
    assert len(re.findall(said, output)) == 1
    command.assert_nothing_left(state)


@pytest.mark.parametrize("argv", [("up",), ("up", "--detach"), ("status",), ("down",)], ids=" ".join)
def test_a_run_directory_that_is_none_is_one_sentence(command, argv):
    file = command.temp / "file"
    file.touch()
    command.env["KVMESH_RUN_DIR"] = str(file)
    done = command.run(*argv)
    assert done.returncode == 2
    assert done.stderr.startswith(f"kvmesh {argv[0]}: the run directory {file} cannot be used")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--set=context.kv_cache_config.dtype=fp8",), "not supported yet: context.kv_cache_config.dtype='fp8'"),
        (
            ("--set=generation.cache_transceiver_config.backend=null",),
            "generation.cache_transceiver_config.backend is null",
        ),
        (("--detach", "--set=context.kv_cache_config.dtype=fp8"), "Leave these at their defaults"),
    ],
)
def test_settings_that_cannot_work_start_nothing(command, flags, says):
    up = command.run("up", *flags)
    assert up.returncode == 2
    assert says in up.stderr
    assert len(up.stderr.splitlines()) == 1
    assert not command.run_dir.path.exists(), "nothing was begun"


@pytest.mark.parametrize("flags", [("--context=0",), ("--set=contxt.port=1",), ("--config=/absent.yaml",)])
def test_bad_settings_are_one_sentence(command, flags):
    up = command.run("up", *flags)
    assert up.returncode == 2
    assert up.stderr.startswith("kvmesh up: ")
    assert len(up.stderr.splitlines()) == 1
