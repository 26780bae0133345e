"""A Docker engine with Compose v2: the one of this machine, or one started by hand for the length of the tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["CACHE", "REPOSITORY", "SCRIPTS", "Docker", "UnavailableError", "docker_engine", "run"]

REPOSITORY = Path(__file__).parents[3]
SCRIPTS = REPOSITORY / "tests" / "deploy"
CACHE = Path(os.environ.get("KVMESH_DEPLOY_CACHE", "~/.cache/kvmesh-deploy")).expanduser()
"""What takes long to get and stays good: Compose, the stand-in of the base image, the engine's images."""

PACKAGES = {"dockerd": "docker.io", "iptables": "iptables", "mmdebstrap": "mmdebstrap"}
BASES = ("python:3.11-slim-bookworm", "debian:bookworm-slim")
SHORT_S = 60.0


class UnavailableError(Exception):
    """This machine cannot run containers; the message says why."""


def run(*command: str, env: dict[str, str] | None = None, timeout_s: float = SHORT_S, check: bool = True) -> str:
    """The output of a command, both streams; an AssertionError with its end when it fails."""
    result = subprocess.run(
        command,
        env=None if env is None else {**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert result.returncode == 0 or not check, f"{' '.join(command)}\n{result.stdout[-4000:]}"
    return result.stdout


class Docker:
    """Runs ``docker`` against one engine.

    Attributes:
        env: what finds the engine and its plugins.
    """

    def __init__(self, env: dict[str, str]) -> None:
        self.env = env

    def __call__(self, *arguments: str, timeout_s: float = SHORT_S, check: bool = True) -> str:
        return run("docker", *arguments, env=self.env, timeout_s=timeout_s, check=check)

    def inspect(self, *names: str) -> list[dict[str, Any]]:
        """What the engine knows of containers or images."""
        found: list[dict[str, Any]] = json.loads(self("inspect", *names))
        return found

    def has(self, image: str) -> bool:
        """Whether the engine has an image."""
        return bool(self("images", "--quiet", image).split())


@contextmanager
def docker_engine() -> Iterator[Docker]:
    """An engine with Compose v2 and the base images.

    Raises:
        UnavailableError: there is none and none can be made.
    """
    if answers({}):
        yield _prepared(Docker({}))
        return
    if os.geteuid() != 0:
        raise UnavailableError("no Docker engine answers, and one can be started by root only")
    _install(PACKAGES)
    state = CACHE / "engine"
    host = run(str(SCRIPTS / "engine.sh"), "start", str(state)).split()[-1]
    try:
        yield _prepared(Docker({"DOCKER_HOST": host}))
    finally:
        run(str(SCRIPTS / "engine.sh"), "stop", str(state), timeout_s=120)


def answers(env: dict[str, str]) -> bool:
    """Whether an engine answers."""
    return shutil.which("docker") is not None and bool(
        run("docker", "version", "--format", "{{.Server.Version}}", env=env, check=False)
        .strip()
        .startswith(tuple("123456789"))
    )


def _install(packages: dict[str, str]) -> None:
    missing = sorted(package for program, package in packages.items() if shutil.which(program) is None)
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise UnavailableError(
            f"no Docker engine answers, and there is no apt-get to install {', '.join(missing)} with"
        )
    apt = ("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300")
    env = {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        run(*apt, "update", env=env, timeout_s=300)
        run(*apt, "install", "-y", "--no-install-recommends", *missing, env=env, timeout_s=600)
    except AssertionError as error:
        raise UnavailableError(f"cannot install {', '.join(missing)}: {error}") from error


def _prepared(docker: Docker) -> Docker:
    if not docker("compose", "version", check=False).startswith("Docker Compose version"):
        config = CACHE / "docker-config"
        try:
            run(str(SCRIPTS / "compose-plugin.sh"), str(config), timeout_s=300)
        except AssertionError as error:
            raise UnavailableError(f"there is no Compose v2, and it cannot be fetched: {error}") from error
        docker.env["DOCKER_CONFIG"] = str(config)
    for base in BASES:
        if not docker.has(base) and not _pulled(docker, base):
            _stand_in(docker, base)
    return docker


def _pulled(docker: Docker, image: str) -> bool:
    docker("pull", "--quiet", image, timeout_s=300, check=False)
    return docker.has(image)


def _stand_in(docker: Docker, image: str) -> None:
    """No registry: an image with the same name from the distribution's packages."""
    archive = CACHE / "base.tar"
    if not archive.exists():
        _install({"mmdebstrap": "mmdebstrap"})
        CACHE.mkdir(parents=True, exist_ok=True)
        run(str(SCRIPTS / "base-image.sh"), str(archive), timeout_s=900)
    path = "PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
    changes = [f"ENV {path}", "ENV LANG=C.UTF-8", 'CMD ["python3"]']
    options = [option for change in changes for option in ("--change", change)]
    docker("import", *options, str(archive), image, timeout_s=300)
