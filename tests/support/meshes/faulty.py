"""A mesh of two servers in which a test can hurt any service at a named point of a transfer, and mend it again."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil

from meshes.by_hand import Mesh
from meshes.hosts import Network, listening_ports
from meshes.process import Process, request, until

__all__ = ["PLANES", "SERVICES", "FaultyMesh"]

SERVICES: Final = ("coordinator", "context", "generation", "router")
WINDOWS: Final = [8192, 4096, 2048, 1024]
"""Longer than any prompt here, and different, so that there are four layer groups."""
POINTS: Final = ("transceiver.before_send", "transceiver.during_transfer", "transceiver.before_ack")
REACHED_S: Final = 30.0

BUFFER_TOKENS: Final = 128
"""Of the CPP runtime's staging buffers: a quarter of the prompt whose transfer is hurt."""


def _plane(backend: str, way: str = "auto", **transceiver: Any) -> dict[str, Any]:
    return {"transfer_plane": way, "cache_transceiver_config": {"backend": backend, **transceiver}}


def _staged(backend: str) -> dict[str, Any]:
    return _plane(backend, transceiver_runtime="CPP", max_tokens_in_buffer=BUFFER_TOKENS)


PLANES: Final[dict[str, dict[str, Any]]] = {
    "memfd": _plane("DEFAULT", "memfd"),
    "tcp": _plane("DEFAULT", "tcp"),
    "nixl": _plane("NIXL"),
    "cpp": _staged("DEFAULT"),
    "cpp ucx": _staged("UCX"),
    "cpp mooncake": _staged("MOONCAKE"),
    "cpp mpi": _staged("MPI"),
}
"""Settings of both servers by data plane."""


class FaultyMesh(Mesh):
    """One context and one generation server, a coordinator and a router, all of which can be hurt.

    Args:
        plane: one of :data:`PLANES`.
        timeout_ms: ``kv_transfer_timeout_ms``.
        request_timeout_s: of router and servers.
        lease_s: of members.
        network: hosts of the services by name; None: all on loopback.
    """

    def __init__(
        self, plane: str, *, timeout_ms: int, request_timeout_s: float, lease_s: float, network: Network | None = None
    ) -> None:
        super().__init__(**({"UCX_TLS": "tcp,self"} if network is not None and plane == "nixl" else {}))
        self.plane = plane
        self.network = network
        settings = PLANES[plane]
        transceiver = {**settings["cache_transceiver_config"], "kv_transfer_timeout_ms": timeout_ms}
        common = {"request_timeout_s": request_timeout_s, "drain_s": request_timeout_s}
        self._coordinator = {"port": 0, "lease_s": lease_s}
        self._router = {"port": 0, **common}
        self._worker = {
            **common,
            "transfer_plane": settings["transfer_plane"],
            "cache_transceiver_config": transceiver,
            "kv_cache_config": {"max_attention_window": WINDOWS, "host_cache_size": 0, "kv_events_config": None},
        }

    def begin(self) -> FaultyMesh:
        """Start everything."""
        self._launch("coordinator")
        with self.at():
            self._coordinator["port"] = int(self["coordinator"].wait_serving().rpartition(":")[2])
            for name in SERVICES[1:]:
                self._launch(name)
            for name in SERVICES[1:]:
                self[name].wait_serving()
            self.wait_ready()
        return self

    def restart(self, name: str) -> None:
        """Start a service that has ended, as a supervisor would, and wait until it serves."""
        assert self[name].wait_gone() is not None, f"{name} did not end"
        self._launch(name)
        with self.at():
            self[name].wait_serving()

    def spawn(self, name: str, argv: list[str], env: dict[str, str]) -> Process:
        """On the service's host."""
        command = argv if self.network is None else self.network.command(name, argv)
        return _Hosted(name, command, env, self.logs)

    @contextmanager
    def at(self, name: str | None = None) -> Iterator[None]:
        """New sockets of this thread are on the host of a service, or where all of them can be reached."""
        with contextlib.nullcontext() if self.network is None else self.network.entered(name):
            yield

    def hold(self, name: str, point: str, hit: int) -> None:
        """Hold up the thread of a server that reaches a point for the ``hit``-th time from now on."""
        new = self._holds(name) / "new"
        new.write_text(str(hit))
        new.rename(self._holds(name) / f"{point}.armed")

    def wait_held(self, name: str, point: str) -> None:
        """Until a thread stands there."""
        until((self._holds(name) / f"{point}.reached").exists, f"{name} reaches {point}", REACHED_S)

    def hits(self, name: str, point: str) -> int:
        """How often the point was reached since :meth:`hold`."""
        return int((self._holds(name) / f"{point}.hits").read_text())

    def release(self, name: str) -> None:
        """Let go on whatever a server holds up, and hold up nothing any more."""
        for path in self._holds(name).iterdir():
            path.unlink()

    def signal(self, name: str, number: int) -> None:
        """Signal all processes of a service at once; SIGTERM goes to the first only, as a supervisor's does."""
        family = self[name].family()
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in family[:1] if number == signal.SIGTERM else reversed(family):
                process.send_signal(number)

    def cut(self, name: str) -> None:
        """Take the plug of a service's host out."""
        assert self.network is not None
        self.network.cut(name)

    def block_data(self, name: str) -> None:
        """Let vanish what a server's host sends over data ports, of either server; control goes on."""
        assert self.network is not None
        ports = set()
        for server in ("context", "generation"):
            ports |= listening_ports(self[server].engine().pid)
        with self.at():
            infos = [self[server].get("/server_info") for server in ("context", "generation")]
        control = {int(info["disaggregated_params"]["ctx_info_endpoint"][0].rpartition(":")[2]) for info in infos}
        assert ports - control, "no data ports"
        self.network.block(name, ports - control)

    def mend(self, name: str) -> None:
        """Undo :meth:`cut` and :meth:`block_data`."""
        if self.network is not None:
            self.network.mend(name)
            self.network.unblock(name)

    def members(self) -> dict[str, int]:
        """Epochs of the members that the coordinator knows, by instance id."""
        status, body = request(f"{self['coordinator'].url}/members", timeout_s=5.0)
        return {one["instance_id"]: one["epoch"] for one in json.loads(body)["members"]} if status == 200 else {}

    def stop(self) -> None:
        """See :meth:`Mesh.stop`."""
        for name in SERVICES:
            self.mend(name)
        if self.network is not None and self.network.apart:
            # A new engine clears up after a killed one of its host; here each is process 1 of its own.
            for path in self.temp.glob("kvmesh-engine-1-*"):
                shutil.rmtree(path)
        with self.at():
            super().stop()

    def _launch(self, name: str) -> None:
        host = "127.0.0.1" if self.network is None else self.network.addresses[name]
        settings: dict[str, Any] = {"host": host}
        if name == "coordinator":
            self.launch(name, name, {**settings, **self._coordinator})
            return
        settings["coordinator_url"] = self["coordinator"].url
        if name == "router":
            self.launch(name, name, {**settings, **self._router})
            return
        self._holds(name).mkdir(exist_ok=True)
        faults = ",".join(f"{point}=hold:{self._holds(name)}" for point in POINTS)
        self.launch_worker(name, {**settings, "transfer_bind_host": host, **self._worker}, KVMESH_FAULTS=faults)

    def _holds(self, name: str) -> Path:
        return self.directory / f"holds-{name}"


class _Hosted(Process):
    """A service that may run below the commands that put it on its host."""

    def family(self) -> list[psutil.Process]:
        """The service's own process and its descendants."""
        family = super().family()
        with contextlib.suppress(psutil.NoSuchProcess):
            while family and "kvmesh.cli.main" not in family[0].cmdline()[:4]:
                family.pop(0)
        return family

    def terminate(self) -> None:
        """SIGTERM to the service itself."""
        for process in self.family()[:1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)
