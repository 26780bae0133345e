"""``kvmesh up`` as a person runs it, in the foreground or detached."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from kvmesh.cli.rundir import MeshState, ProcessState, RunDir, is_running
from meshes.process import START_S, STOP_S, clean_environment, request, shared_memory, until

__all__ = ["Up"]

KEPT = ("logs", "lock")
ANY_PORTS = ["--port", "0"]
for _port in ("coordinator.port", "indexer.port", "events_port", "replay_port"):
    ANY_PORTS += ["--set", f"{_port}=0"]


class Up:
    """``kvmesh up`` as a person runs it, with a run directory of its own."""

    def __init__(self, *flags: str, **env: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kvm-", dir="/tmp"))
        self.temp = self.directory / "t"
        self.temp.mkdir()
        self.run_dir = RunDir(self.directory / "run")
        self.flags = flags
        self.env = {**clean_environment(), "TMPDIR": str(self.temp), "KVMESH_RUN_DIR": str(self.run_dir.path), **env}
        self.output = self.directory / "output"
        self.popen: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.shared_memory = shared_memory()

    def detach(self, *flags: str) -> str:
        """Start it in the background; what was printed."""
        output = self.command("up", "--detach", *ANY_PORTS, *flags)
        self.url = self.state().url
        return output

    def command(self, *argv: str, timeout_s: float = START_S) -> str:
        """Run ``kvmesh ...`` to its end; what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "kvmesh.cli.main", *argv],
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr + self.logs()
        return done.stdout

    def start(self) -> Up:
        """Start it in the foreground and wait until it is ready."""
        argv = [sys.executable, "-m", "kvmesh.cli.main", "up", *ANY_PORTS, *self.flags]
        with self.output.open("wb") as output:
            self.popen = subprocess.Popen(
                argv, env=self.env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

        def ready() -> bool:
            assert self.popen is not None
            assert self.popen.poll() is None, self.output.read_text() + self.logs()
            state = self.run_dir.read()
            return state is not None and state.phase == "ready" and "stops it" in self.output.read_text()

        until(ready, "the mesh is ready", START_S)
        self.url = self.state().url
        return self

    def state(self) -> MeshState:
        state = self.run_dir.read()
        assert state is not None, "no mesh runs"
        return state

    def child(self, name: str) -> ProcessState | None:
        """A child that runs now."""
        return next((child for child in self.state().children if child.name == name and is_running(child)), None)

    def members(self) -> dict[str, Any]:
        """Members by instance id; empty while the coordinator is away."""
        status, body = request(f"{self.state().coordinator_url}/members")
        return {member["instance_id"]: member for member in json.loads(body)["members"]} if status == 200 else {}

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 60.0) -> tuple[int, Any]:
        """Status and decoded body of a whole answer from the router."""
        status, data = request(self.url + path, body, timeout_s)
        return status, json.loads(data) if status else data

    def logs(self) -> str:
        """The ends of all logs, for a failure's message."""
        files = sorted(self.run_dir.logs.glob("*.log")) if self.run_dir.logs.exists() else []
        return "".join(f"\n--- {file.name}\n{file.read_text(errors='replace')[-2000:]}" for file in files)

    def family(self) -> list[psutil.Process]:
        """The supervisor and everything below it."""
        state = self.run_dir.read()
        if state is None or not is_running(state.supervisor):
            return []
        supervisor = psutil.Process(state.supervisor.pid)
        return [supervisor, *supervisor.children(recursive=True)]

    def stop(self, number: int = signal.SIGINT) -> None:
        """Ctrl-C; what is left over is an error."""
        if self.popen is None:
            return
        family = self.family()
        if self.popen.poll() is None:
            self.popen.send_signal(number)
        try:
            self.popen.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        self.check_gone(family)
        assert self.popen.returncode == 0, self.output.read_text() + self.logs()
        self.abandon()

    def abandon(self) -> None:
        """There is nothing to stop any more."""
        self.popen = None
        shutil.rmtree(self.directory)

    def check_gone(self, family: list[psutil.Process]) -> None:
        """Neither processes nor files nor shared memory are left; logs, and the empty lock, may be."""
        _, alive = psutil.wait_procs(family, timeout=STOP_S)
        problems = [f"left running: {process}" for process in alive]
        for process in alive:
            process.kill()
        problems += [f"left behind: {path}" for path in self.temp.iterdir()]
        problems += [f"left behind: {path}" for path in self.run_dir.path.iterdir() if path.name not in KEPT]
        problems += [f"left behind: {path}" for path in shared_memory() - self.shared_memory]
        assert not problems, "\n".join(problems) + self.logs()
