"""A mesh whose services are started one by one, as a person would by hand, so that a test knows each process."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import yaml

from kvmesh.cli.parent import SUPERVISOR_PID_VARIABLE
from meshes.process import STOP_S, Process, clean_environment, request, shared_memory, until

__all__ = ["Mesh", "is_idle"]

SECRET = "end-to-end"
INTEGRITY_FAILURE = "cache integrity check failed"
"""A line in an engine's log."""
EVENTS = {
    "enable_kv_cache_events": True,
    "endpoint": "tcp://127.0.0.1:*",
    "replay_endpoint": "tcp://127.0.0.1:*",
}


class Mesh:
    """Services started by hand, found by name.

    Attributes:
        temp: the ``TMPDIR`` of all of them; empty again once they have ended.
        logs: one log file a service.
        context: of requests to its services, where they speak TLS.
    """

    context: ssl.SSLContext | None = None

    def __init__(self, **env: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kvm-", dir="/tmp"))
        self.temp = self.directory / "t"
        self.logs = self.directory / "logs"
        self.temp.mkdir()
        self.logs.mkdir()
        self.env = {
            **clean_environment(),
            "KVMESH_CLUSTER_SECRET": SECRET,
            "TMPDIR": str(self.temp),
            **env,
        }
        self.processes: dict[str, Process] = {}
        self.shared_memory = shared_memory()

    def __getitem__(self, name: str) -> Process:
        return self.processes[name]

    def launch(self, name: str, command: str, settings: dict[str, Any], **env: str) -> Process:
        """Start one service without waiting for it."""
        config = self.directory / f"{name}.yaml"
        config.write_text(yaml.safe_dump({"log_format": "json", **settings}))
        argv = [sys.executable, "-m", "kvmesh.cli.main", command, "--config", str(config)]
        process = self.processes[name] = self.spawn(name, argv, {**self.env, **env})
        process.context = self.context
        return process

    def spawn(self, name: str, argv: list[str], env: dict[str, str]) -> Process:
        """Start a service's process; where, is for a mesh of several hosts to say.

        It ends with this process, also where that is killed in the middle of a test.
        """
        return Process(name, argv, {**env, SUPERVISOR_PID_VARIABLE: str(os.getpid())}, self.logs)

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

    def launch_worker(self, name: str, settings: dict[str, Any], **env: str) -> Process:
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
            **env,
        )

    def wait_ready(self) -> None:
        router = self["router"]
        until(lambda: request(f"{router.url}/ready", context=router.context)[0] == 200, "the router is ready")

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
                # An engine checks its cache once more when it ends.
                if INTEGRITY_FAILURE in process.log.read_text():
                    problems.append(f"{process.name}: {INTEGRITY_FAILURE}:\n{process.log.read_text()[-3000:]}")
        _, alive = psutil.wait_procs(pids, timeout=STOP_S)
        for one in alive:
            problems.append(f"left running: {one}")
            one.kill()
        problems += [f"left behind: {path}" for path in self.temp.iterdir()]
        problems += [f"left behind: {path}" for path in shared_memory() - self.shared_memory]
        if not problems:
            shutil.rmtree(self.directory)
        assert not problems, "\n".join(problems)


def is_idle(stats: dict[str, Any]) -> bool:
    """Nothing runs and no page is lent out."""
    busy = ("running", "waiting", "in_transfer", "pages_held", "pages_pinned", "pages_locked", "pages_quarantined")
    return not any(stats[key] for key in busy) and (
        stats["pages_free"] + stats["pages_evictable"] == stats["pages_total"]
    )
