"""The mesh of ``compose/compose.yaml`` as a project of its own, and what can be seen of it from outside."""

from __future__ import annotations

import json
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from containers.engine import REPOSITORY, SCRIPTS, Docker

__all__ = ["Project", "free_ports"]

FILES = (REPOSITORY / "compose" / "compose.yaml", SCRIPTS / "build.yaml", SCRIPTS / "run.yaml")
UP_S = 420.0


class Project:
    """See the module.

    Args:
        docker: the engine.
        env: variables of the compose files, beside the ports.

    Attributes:
        tls: how to connect, once the mesh is encrypted.
        foreign_volumes: those that were there before.
    """

    name = "kvmesh-deploy-test"
    files: tuple[Path, ...] = FILES

    def __init__(self, docker: Docker, env: dict[str, str]) -> None:
        self.docker = docker
        router, coordinator, indexer, events, replay = free_ports(5)
        self.env = {
            "KVMESH_PORT": str(router),
            "KVMESH_COORDINATOR_PORT": str(coordinator),
            "KVMESH_INDEXER_PORT": str(indexer),
            "KVMESH_EVENTS_PORT": str(events),
            "KVMESH_REPLAY_PORT": str(replay),
            **env,
        }
        self.tls: ssl.SSLContext | None = None
        self.foreign_volumes = set(docker("volume", "ls", "--quiet").split())
        self.url = f"http://127.0.0.1:{router}"
        self.coordinator_url = f"http://127.0.0.1:{coordinator}"
        self.events_endpoint = f"tcp://127.0.0.1:{events}"

    def compose(self, *arguments: str, timeout_s: float = 120.0, check: bool = True, **env: str) -> str:
        """Run ``docker compose``."""
        files = [option for file in self.files for option in ("--file", str(file))]
        command = ("compose", "--ansi", "never", "--progress", "plain", "--project-name", self.name, *files, *arguments)
        return Docker({**self.docker.env, **self.env, **env})(*command, timeout_s=timeout_s, check=check)

    def up(self, *arguments: str, **env: str) -> str:
        """Start what is missing and wait until it is well."""
        wait = ("--wait", "--wait-timeout", str(int(UP_S)), "--no-build")
        try:
            return self.compose("up", "--detach", *wait, *arguments, timeout_s=UP_S + 60, **env)
        except AssertionError as error:
            logs = self.compose("logs", "--no-color", "--tail", "25", check=False)
            raise AssertionError(f"{error}\n{logs}") from None

    def containers(self, *services: str) -> list[str]:
        """Ids of the running containers of services; of all without a name."""
        return self.compose("ps", "--quiet", *services).split()

    def inspect(self, *services: str) -> list[dict[str, Any]]:
        """What the engine knows of their running containers."""
        ids = self.containers(*services)
        return self.docker.inspect(*ids) if ids else []

    def logs(self, *services: str) -> list[dict[str, Any]]:
        """Log lines of services that are JSON objects."""
        lines = self.compose("logs", "--no-color", "--no-log-prefix", *services).splitlines()
        return [json.loads(line[line.index("{") :]) for line in lines if "{" in line]

    def encrypt(self, directory: Path) -> None:
        """From now on speak TLS, with the certificate of the mesh, which goes into ``directory``."""
        [router] = self.containers("router")
        for name in ("ca.crt", "tls.crt", "tls.key"):
            (directory / name).write_text(self.docker("exec", router, "cat", f"/run/kvmesh/tls/{name}"))
        self.tls = ssl.create_default_context(cafile=str(directory / "ca.crt"))
        self.tls.load_cert_chain(directory / "tls.crt", directory / "tls.key")
        self.url, self.coordinator_url = (
            url.replace("http://", "https://") for url in (self.url, self.coordinator_url)
        )

    def get(self, path: str) -> Any:
        """The body of the coordinator's JSON answer, whatever its status."""
        try:
            with urllib.request.urlopen(f"{self.coordinator_url}{path}", timeout=10, context=self.tls) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return json.load(error)

    def members(self) -> dict[str, int]:
        """Members that live, by role."""
        counts: dict[str, int] = {}
        for member in self.get("/members")["members"]:
            counts[member["role"]] = counts.get(member["role"], 0) + 1
        return counts

    def left_over(self) -> dict[str, Sequence[str]]:
        """Containers, networks and volumes of the project that exist."""
        label = f"label=com.docker.compose.project={self.name}"
        return {
            kind: self.docker(*command, "--filter", label, "--quiet").split()
            for kind, command in {
                "containers": ("ps", "--all"),
                "networks": ("network", "ls"),
                "volumes": ("volume", "ls"),
            }.items()
        }


def free_ports(count: int) -> list[int]:
    """So many free ports of loopback."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
