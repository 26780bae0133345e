"""Compose's settings of Prometheus in containers: names are resolved, scaled services followed, TLS is spoken."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from containers.engine import SCRIPTS, Docker
from containers.project import Project, free_ports
from meshes.process import request, until
from observability_files import needs_prometheus

WATCHED = ("secrets", "etcd", "coordinator", "indexer", "context", "prometheus")
FOLLOWED_S = 60.0

pytestmark = needs_prometheus


class Watched(Project):
    """Prometheus beside services that start quickly."""

    name = "kvmesh-prometheus-test"
    files = (*Project.files, SCRIPTS / "observability.yaml")

    def __init__(self, docker: Docker, env: dict[str, str]) -> None:
        super().__init__(docker, env)
        [port] = free_ports(1)
        self.env["KVMESH_PROMETHEUS_PORT"] = str(port)
        self.prometheus_url = f"http://127.0.0.1:{port}"

    def scraped(self) -> Counter[tuple[str, str]]:
        """Jobs with the scheme of their targets, how many of each answer."""
        status, body = request(f"{self.prometheus_url}/api/v1/targets")
        targets = json.loads(body)["data"]["activeTargets"] if status == 200 else []
        return Counter(
            (target["labels"]["job"], target["scrapeUrl"].partition(":")[0])
            for target in targets
            if target["health"] == "up"
        )

    def wait_scraped(self, scheme: str, context: int) -> None:
        wanted = {(job, scheme): 1 for job in ("etcd", "coordinator", "indexer")} | {("context", scheme): context}
        until(lambda: self.scraped() == wanted, f"targets {wanted}, not {self.scraped()}", FOLLOWED_S)


@pytest.fixture(params=["", "1"], ids=["plain", "encrypted"])
def watched(
    request: pytest.FixtureRequest, docker: Docker, build_env: dict[str, str], project: Project
) -> Iterator[tuple[Watched, str]]:
    binary = shutil.which("prometheus")
    assert binary is not None
    assert project.name != Watched.name, "which built the images"
    env = {"PROMETHEUS": str(Path(binary).resolve()), "COMPOSE_PROFILES": "observability"}
    if request.param:
        env |= {"KVMESH_ENCRYPTED": "1", "KVMESH_CLIENT_AUTH": "required"}
    mesh = Watched(docker, {**build_env, **env})
    try:
        mesh.compose("up", "--detach", "--no-build", "--scale", "context=3", *WATCHED)
        yield mesh, "https" if request.param else "http"
    finally:
        mesh.compose("down", "--volumes", "--remove-orphans", "--timeout", "5")


def test_scaled_services_are_followed(watched: tuple[Watched, str]) -> None:
    mesh, scheme = watched
    mesh.wait_scraped(scheme, context=3)
    mesh.compose("up", "--detach", "--no-build", "--no-recreate", "--scale", "context=1", "context")
    mesh.wait_scraped(scheme, context=1)
