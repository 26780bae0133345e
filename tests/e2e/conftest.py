"""Whole meshes for the tests: real processes of every service, the built-in model, sockets on ephemeral ports.

A :class:`Mesh` starts services one by one, as a person would by hand, so that a test knows each process; the tests of
``kvmesh up`` start that instead. What a mesh leaves behind (processes, temporary files, shared memory) fails the test
that ends it.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import openai
import psutil
import pytest
import yaml

from kvmesh.cli.rundir import MeshState, ProcessState, RunDir, is_running
from kvmesh.models.store import DEFAULT_MODEL, resolve_model

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "smollm2.json"
SECRET = "end-to-end"
START_S = 120.0
STOP_S = 30.0
POLL_S = 0.05
SETTLED_S = 0.4
SAFE_MARGIN = 1e-3  # below it, rounding alone may swap the two best tokens (decision 13)
SHARED_MEMORY = Path("/dev/shm")
GAUGE_LINE = re.compile(r"^(kvmesh_\w+)(\{.*\})? (\S+)$", re.MULTILINE)

T = TypeVar("T")


def until(condition: Callable[[], T], what: str, timeout_s: float = 30.0) -> T:
    """The first true value of ``condition``; another process has no event to wait for."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(POLL_S)
    return value


def request(
    url: str,
    body: dict[str, Any] | bytes | None = None,
    timeout_s: float = 60.0,
    headers: dict[str, str] | None = None,
) -> tuple[int, bytes]:
    """Status and body; status 0 when there is no connection or it broke."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(asked, timeout=timeout_s) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError) as error:
        return 0, str(error).encode()


class Process:
    """One service of a mesh."""

    def __init__(self, name: str, argv: list[str], env: dict[str, str], directory: Path) -> None:
        self.name = name
        self.log = directory / f"{name}.log"
        self.since = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.url = ""
        self.stopped: list[int] = []

    @property
    def pid(self) -> int:
        return self.popen.pid

    def family(self) -> list[psutil.Process]:
        """The process and its descendants."""
        try:
            process = psutil.Process(self.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def engine(self) -> psutil.Process:
        """The engine process of a worker."""
        [engine] = [one for one in self.family()[1:] if "kvmesh.engine.process" in " ".join(one.cmdline())]
        return engine

    def lines(self) -> list[dict[str, Any]]:
        """What this life has logged."""
        text = self.log.read_bytes()[self.since :].decode(errors="replace")
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def wait_serving(self) -> str:
        def serving() -> str | None:
            assert self.popen.poll() is None, f"{self.name} ended:\n{self.log.read_text()[-3000:]}"
            return next((line["url"] for line in self.lines() if line.get("event") == "serving"), None)

        self.url = until(serving, f"{self.name} serves", START_S)
        return self.url

    def get(self, path: str) -> Any:
        status, body = request(self.url + path)
        assert status == 200, f"{self.name}{path}: {status} {body!r}"
        return json.loads(body)

    def post(
        self, path: str, body: dict[str, Any], timeout_s: float = 60.0, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status and decoded body; an event stream is the list of its ``data`` lines."""
        status, data = request(self.url + path, body, timeout_s, headers)
        if status == 200 and body.get("stream"):
            return status, [line.removeprefix("data: ") for line in data.decode().splitlines() if line]
        return status, json.loads(data)

    def stats(self) -> dict[str, Any]:
        """The engine's own statistics of a worker."""
        return self.get("/iteration_stats")

    def settled_stats(self) -> dict[str, Any]:
        """Statistics that have stopped changing: the engine sends them four times a second at most."""
        seen = {**self.stats(), "iteration": 0}
        since_s = time.monotonic()

        def settled() -> bool:
            nonlocal seen, since_s
            now = {**self.stats(), "iteration": 0}
            if now != seen:
                seen, since_s = now, time.monotonic()
            return time.monotonic() - since_s > SETTLED_S

        until(settled, f"{self.name} is at rest")
        return seen

    def metrics(self) -> dict[str, float]:
        """Prometheus samples by name with labels."""
        text = request(f"{self.url}/metrics")[1].decode()
        return {name + labels: float(value) for name, labels, value in GAUGE_LINE.findall(text)}

    def healthy(self) -> bool:
        return request(f"{self.url}/health", timeout_s=15.0)[0] == 200

    def kill(self) -> None:
        """SIGKILL the front; its engine notices by itself."""
        self.popen.kill()
        self.popen.wait(STOP_S)

    def terminate(self) -> None:
        if self.popen.poll() is None:
            self.popen.terminate()

    def wait_gone(self) -> int | None:
        """Exit status, or None when it had to be killed."""
        try:
            return self.popen.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            self.popen.wait(STOP_S)
            return None


class Mesh:
    """Services started by hand, found by name.

    Attributes:
        temp: the ``TMPDIR`` of all of them; empty again once they have ended.
        logs: one log file a service.
    """

    def __init__(self, **env: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kvm-", dir="/tmp"))
        self.temp = self.directory / "t"
        self.logs = self.directory / "logs"
        self.temp.mkdir()
        self.logs.mkdir()
        self.env = {
            **{key: value for key, value in os.environ.items() if not key.startswith("KVMESH_")},
            **{key: os.environ[key] for key in ("KVMESH_MODEL_DIR",) if key in os.environ},
            "KVMESH_CLUSTER_SECRET": SECRET,
            "TMPDIR": str(self.temp),
            **env,
        }
        self.processes: dict[str, Process] = {}
        self.shared_memory = set(SHARED_MEMORY.iterdir()) if SHARED_MEMORY.exists() else set()

    def __getitem__(self, name: str) -> Process:
        return self.processes[name]

    def launch(self, name: str, command: str, settings: dict[str, Any], **env: str) -> Process:
        """Start one service without waiting for it."""
        config = self.directory / f"{name}.yaml"
        config.write_text(yaml.safe_dump({"log_format": "json", **settings}))
        argv = [sys.executable, "-m", "kvmesh.cli.main", command, "--config", str(config)]
        process = self.processes[name] = Process(name, argv, {**self.env, **env}, self.logs)
        return process

    def start(
        self,
        workers: dict[str, dict[str, Any]],
        *,
        coordinator: dict[str, Any] | None = None,
        router: dict[str, Any] | None = None,
        indexer: bool = True,
    ) -> Mesh:
        """Start a coordinator, an indexer, workers by name (``context``, ``generation``, ``worker`` and a suffix) and a
        router; returns when the router is ready.
        """
        center = self.launch("coordinator", "coordinator", {"port": 0, **(coordinator or {})})
        common = {"coordinator_url": center.wait_serving()}
        routing: dict[str, Any] = {"port": 0, **common, **(router or {})}
        if indexer:
            match = f"ipc://{self.directory}/match"
            self.launch("indexer", "indexer", {"port": 0, "match_endpoint": match, **common})
            routing["indexer_match_endpoint"] = match
        for name, settings in workers.items():
            self.launch_worker(name, {**common, **settings})
        self.launch("router", "router", routing)
        for process in list(self.processes.values()):
            process.wait_serving()
        self.wait_ready()
        return self

    def launch_worker(self, name: str, settings: dict[str, Any]) -> Process:
        cache = {"kv_events_config": EVENTS, **settings.pop("kv_cache_config", {})}
        return self.launch(
            name,
            name.partition("-")[0],
            {
                "instance_id": name,
                "num_threads": 1,
                "device_memory_bytes": 256 << 20,
                "kv_cache_config": cache,
                "cache_transceiver_config": {"backend": "DEFAULT"},
                **settings,
            },
        )

    def wait_ready(self) -> None:
        until(lambda: request(f"{self['router'].url}/ready")[0] == 200, "the router is ready")

    def openai(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self['router'].url}/v1", api_key="none", max_retries=0, **options)

    def workers(self) -> list[Process]:
        return [process for name, process in self.processes.items() if name.startswith(("context", "gen", "worker"))]

    def wait_idle(self, timeout_s: float = 30.0) -> None:
        """Every page is free or reusable again, nothing runs, and every integrity check was good."""

        def idle() -> bool:
            return all(is_idle(worker.stats()) for worker in self.workers())

        until(idle, f"idle: {[worker.stats() for worker in self.workers()]}", timeout_s)
        for worker in self.workers():
            assert worker.stats()["integrity_failures_total"] == 0

    def stop(self) -> None:
        """End everything in order; what is left over is an error."""
        problems = []
        pids = [one for process in self.processes.values() for one in process.family()]
        for ranked in (("router",), ("context", "generation", "worker"), ("indexer",), ("coordinator",)):
            ending = [process for name, process in self.processes.items() if name.startswith(ranked)]
            for process in ending:
                process.terminate()
            for process in ending:
                status = process.wait_gone()
                if status not in (0, -signal.SIGKILL):
                    how = "did not end" if status is None else f"ended with {status}"
                    problems.append(f"{process.name} {how}:\n{process.log.read_text()[-3000:]}")
        _, alive = psutil.wait_procs(pids, timeout=STOP_S)
        for process in alive:
            problems.append(f"left running: {process}")
            process.kill()
        problems += [f"left behind: {path}" for path in self.temp.iterdir()]
        if SHARED_MEMORY.exists():
            problems += [f"left behind: {path}" for path in set(SHARED_MEMORY.iterdir()) - self.shared_memory]
        if not problems:
            shutil.rmtree(self.directory)
        assert not problems, "\n".join(problems)


class Up:
    """``kvmesh up`` as a person runs it, with a run directory of its own."""

    def __init__(self, *flags: str, **env: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kvm-", dir="/tmp"))
        self.temp = self.directory / "t"
        self.temp.mkdir()
        self.run_dir = RunDir(self.directory / "run")
        self.flags = flags
        kept = {key: value for key, value in os.environ.items() if not key.startswith("KVMESH_")}
        if "KVMESH_MODEL_DIR" in os.environ:
            kept["KVMESH_MODEL_DIR"] = os.environ["KVMESH_MODEL_DIR"]
        self.env = {**kept, "TMPDIR": str(self.temp), "KVMESH_RUN_DIR": str(self.run_dir.path), **env}
        self.output = self.directory / "output"
        self.popen: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.shared_memory = set(SHARED_MEMORY.iterdir()) if SHARED_MEMORY.exists() else set()

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
        argv = [sys.executable, "-m", "kvmesh.cli.main", "up", "--port", "0", *self.flags]
        with self.output.open("wb") as output:
            self.popen = subprocess.Popen(
                argv, env=self.env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

        def ready() -> bool:
            assert self.popen is not None
            assert self.popen.poll() is None, self.output.read_text() + self.logs()
            state = self.run_dir.read()
            return state is not None and state.phase == "ready"

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
        """Neither processes nor files nor shared memory are left; logs may be."""
        _, alive = psutil.wait_procs(family, timeout=STOP_S)
        problems = [f"left running: {process}" for process in alive]
        for process in alive:
            process.kill()
        problems += [f"left behind: {path}" for path in self.temp.iterdir()]
        problems += [f"left behind: {path}" for path in self.run_dir.path.iterdir() if path != self.run_dir.logs]
        if SHARED_MEMORY.exists():
            problems += [f"left behind: {path}" for path in set(SHARED_MEMORY.iterdir()) - self.shared_memory]
        assert not problems, "\n".join(problems) + self.logs()


EVENTS = {
    "enable_kv_cache_events": True,
    "endpoint": "tcp://127.0.0.1:*",
    "replay_endpoint": "tcp://127.0.0.1:*",
}


def is_idle(stats: dict[str, Any]) -> bool:
    """Nothing runs and no page is lent out."""
    busy = ("running", "waiting", "in_transfer", "pages_held", "pages_locked", "pages_quarantined")
    return not any(stats[key] for key in busy) and (
        stats["pages_free"] + stats["pages_evictable"] == stats["pages_total"]
    )


@pytest.fixture(scope="session", autouse=True)
def _model() -> None:
    """The built-in model is there before anything is timed."""
    resolve_model(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def golden() -> list[dict[str, Any]]:
    """Prompts with their greedy continuation, cut where it becomes a coin toss (``certain``)."""
    items = json.loads(GOLDEN.read_text())["items"]
    for item in items:
        unsure = next((i for i, margin in enumerate(item["top2_margin"]) if margin < SAFE_MARGIN), 64)
        item["certain"] = item["greedy_ids"][:unsure]
    return items


@pytest.fixture(scope="session")
def post_raw() -> Callable[[str, bytes], tuple[int, bytes]]:
    """``post_raw(url, body)``: status and body, whatever they are."""
    return request


@pytest.fixture(scope="session")
def poll() -> Callable[..., Any]:
    """``poll(condition, what, timeout_s)``: see :func:`until`."""
    return until


@pytest.fixture(scope="module")
def make_mesh() -> Iterator[Callable[..., Mesh]]:
    """Starts meshes that end with the module: ``make_mesh(workers, coordinator=..., env={...})``."""
    meshes: list[Mesh] = []

    def make(workers: dict[str, dict[str, Any]], *, env: dict[str, str] | None = None, **options: Any) -> Mesh:
        mesh = Mesh(**(env or {}))
        meshes.append(mesh)
        return mesh.start(workers, **options)

    yield make
    errors = []
    for mesh in meshes:
        try:
            mesh.stop()
        except AssertionError as error:
            errors.append(str(error))
    assert not errors, "\n".join(errors)


@pytest.fixture(scope="module")
def make_up() -> Iterator[Callable[..., Up]]:
    """Prepares ``kvmesh up`` runs that are over by the end of the module; ``make_up(*flags)`` does not start it."""
    ups: list[Up] = []

    def make(*flags: str, **env: str) -> Up:
        ups.append(Up(*flags, **env))
        return ups[-1]

    yield make
    for up in ups:
        up.stop()


@pytest.fixture(scope="session")
def mesh() -> Iterator[Mesh]:
    """One context and one generation server with default settings, shared by all tests that leave it idle."""
    mesh = Mesh()
    try:
        yield mesh.start({"context": {}, "generation": {}})
    finally:
        mesh.stop()


@pytest.fixture
async def client(mesh: Mesh) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client at the shared mesh's router."""
    url = f"{mesh['router'].url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120.0) as client:
        yield client
