"""One service as a process: its log, its HTTP face, its death; and how to wait for what another process does."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil

__all__ = ["SHARED_MEMORY", "START_S", "STOP_S", "Process", "clean_environment", "request", "shared_memory", "until"]

START_S = 120.0
STOP_S = 30.0
POLL_S = 0.05
SETTLED_S = 0.4
SHARED_MEMORY = Path("/dev/shm")
SAMPLE = re.compile(r"^(kvmesh_\w+)(\{.*\})? (\S+)$", re.MULTILINE)

T = TypeVar("T")


def clean_environment() -> dict[str, str]:
    """This process's environment without settings of KVMesh, but with the place of its models."""
    return {
        key: value for key, value in os.environ.items() if not key.startswith("KVMESH_") or key == "KVMESH_MODEL_DIR"
    }


def shared_memory() -> set[Path]:
    """What is in ``/dev/shm`` now."""
    return set(SHARED_MEMORY.iterdir()) if SHARED_MEMORY.exists() else set()


def until(condition: Callable[[], T | None], what: str | Callable[[], str], timeout_s: float = 60.0) -> T:
    """The first true value of ``condition``; another process has no event to wait for."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {timeout_s:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(POLL_S)
    return value


def request(
    url: str,
    body: dict[str, Any] | bytes | None = None,
    timeout_s: float = 60.0,
    headers: dict[str, str] | None = None,
    context: ssl.SSLContext | None = None,
) -> tuple[int, bytes]:
    """Status and body; status 0 when there is no connection or it broke."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(asked, timeout=timeout_s, context=context) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError) as error:
        return 0, str(error).encode()


class Process:
    """One service of a mesh.

    Attributes:
        context: of requests to one that speaks TLS.
    """

    context: ssl.SSLContext | None = None

    def __init__(self, name: str, argv: list[str], env: dict[str, str], directory: Path) -> None:
        self.name = name
        self.log = directory / f"{name}.log"
        self.since = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.url = ""

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
        """The engine process of a worker that has one."""
        [engine] = self.engines()
        return engine

    def engines(self) -> list[psutil.Process]:
        """The engine processes of a worker, by attention data-parallel rank."""
        found = [one for one in self.family()[1:] if "kvmesh.engine.process" in " ".join(one.cmdline())]
        return sorted(found, key=lambda one: one.cmdline()[-2])

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
        status, body = request(self.url + path, context=self.context)
        assert status == 200, f"{self.name}{path}: {status} {body!r}"
        return json.loads(body)

    def post(
        self, path: str, body: dict[str, Any], timeout_s: float = 60.0, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status and decoded body; an event stream is the list of its ``data`` lines."""
        status, data = request(self.url + path, body, timeout_s, headers, self.context)
        if status == 200 and body.get("stream"):
            return status, [line.removeprefix("data: ") for line in data.decode().splitlines() if line]
        return status, json.loads(data)

    def stats(self) -> dict[str, Any]:
        """The engine's own statistics of a worker."""
        stats: dict[str, Any] = self.get("/stats")
        return stats

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
        text = request(f"{self.url}/metrics", context=self.context)[1].decode()
        return {name + labels: float(value) for name, labels, value in SAMPLE.findall(text)}

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
