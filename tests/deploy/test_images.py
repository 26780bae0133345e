"""What the images are: small, without tools and secrets, and able to run with nothing but what they need."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from containers.engine import Docker
from containers.project import Project

LIGHT, ENGINE, ETCD = "kvmesh:light", "kvmesh:engine", "kvmesh:etcd"
LIGHT_BYTES = 250e6
LOCKED = ("--rm", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--network", "none")


@pytest.fixture(autouse=True)
def _built(project: Project) -> None:
    """They exist."""


def shell(docker: Docker, image: str, script: str) -> str:
    return docker("run", *LOCKED, "--entrypoint", "sh", image, "-c", script)


def test_the_light_image_is_light(docker: Docker) -> None:
    sizes = {image: docker.inspect(image)[0]["Size"] for image in (LIGHT, ENGINE, ETCD)}
    print("\n" + "\n".join(f"{image:15} {size / 1e6:7.0f} MB" for image, size in sizes.items()))
    assert sizes[LIGHT] < LIGHT_BYTES


@pytest.mark.parametrize("image", [LIGHT, ENGINE, ETCD])
def test_nobody_is_root_and_no_tool_is_left(docker: Docker, image: str) -> None:
    assert "uid=10001" in shell(docker, image, "id")
    tools = "for tool in gcc g++ cc c++ make ld curl wget git jq; do command -v $tool; done; true"
    assert [line for line in shell(docker, image, tools).splitlines() if line.startswith("/")] == []


@pytest.mark.parametrize("image", [LIGHT, ENGINE])
def test_the_command_runs_with_nothing_allowed(docker: Docker, image: str) -> None:
    assert "kvmesh 0." in docker("run", *LOCKED, image, "--version")
    [facts] = docker.inspect(image)
    assert facts["Config"]["Entrypoint"] == ["kvmesh"]  # not by a shell, which would keep SIGTERM for itself
    assert facts["Config"]["Healthcheck"]["Test"] == ["CMD", "kvmesh", "health"]
    assert facts["Config"]["User"] == "10001:10001"


def test_only_the_engine_has_torch(docker: Docker) -> None:
    look = "python -c 'import importlib.util as u; print(u.find_spec(\"torch\") is not None)'"
    assert "False" in shell(docker, LIGHT, look)
    assert "True" in shell(docker, ENGINE, look)


@pytest.mark.parametrize("image", [LIGHT, ENGINE, ETCD])
def test_nothing_of_the_build_machine_is_in_them(docker: Docker, image: str, build_env: dict[str, str]) -> None:
    """Neither in the layers' commands, nor in the environment, nor as a file."""
    history = docker("history", "--no-trunc", "--format", "{{json .}}", image)
    environment = json.dumps(docker.inspect(image)[0]["Config"]["Env"])
    configuration = Path(build_env["DEPLOY_PIP_CONF"]).read_text()
    secrets = [line.partition("=")[2].strip() for line in configuration.splitlines() if "=" in line]
    for secret in [*secrets, "BEGIN CERTIFICATE", "BEGIN PRIVATE KEY"]:
        assert len(secret) < 6 or secret not in history + environment
    left = "ls /run/secrets /etc/pip.conf /root/.config/pip /root/.cache 2>/dev/null; true"
    assert [line for line in shell(docker, image, left).splitlines() if not line.startswith("WARNING")] == []
