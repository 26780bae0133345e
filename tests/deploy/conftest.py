"""One engine, one build of the images and one mesh for all deployment tests; only ``make deploy-test`` starts them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from containers.asking import Ask, asking
from containers.building import build_environment
from containers.engine import REPOSITORY, Docker, UnavailableError, docker_engine
from containers.project import Project

BUILD_S = 1500.0
SAFE_MARGIN = 1e-3
"""Below it, rounding alone may swap the two best tokens."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = REPOSITORY / "tests" / "deploy"
    for item in (item for item in items if item.path.parent == here):
        item.add_marker(pytest.mark.timeout(1800))
        if not os.environ.get("KVMESH_DEPLOY"):
            item.add_marker(pytest.mark.skip(reason="`make deploy-test` runs it"))


@pytest.fixture(scope="session")
def told() -> Iterator[Callable[[str, float], None]]:
    """Keeps a figure for the table at the end."""
    figures: dict[str, float] = {}
    yield figures.__setitem__
    print("\n".join(["", *(f"{what:45} {seconds:7.1f} s" for what, seconds in figures.items())]))


@pytest.fixture(scope="session")
def docker() -> Iterator[Docker]:
    try:
        with docker_engine() as engine:
            yield engine
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def build_env() -> Iterator[dict[str, str]]:
    with build_environment() as env:
        yield env


@pytest.fixture(scope="session")
def project(docker: Docker, build_env: dict[str, str], told: Callable[[str, float], None]) -> Iterator[Project]:
    """The project with its images built, and nothing that runs."""
    Project(docker, build_env).compose("down", "--volumes", "--remove-orphans", "--timeout", "5")
    project = Project(docker, build_env)
    begin_s = time.monotonic()
    project.compose("build", timeout_s=BUILD_S)
    told("images built", time.monotonic() - begin_s)
    yield project
    project.compose("down", "--volumes", "--remove-orphans", "--timeout", "5")


@pytest.fixture(scope="session")
def mesh(project: Project, told: Callable[[str, float], None]) -> Project:
    """``docker compose up --wait``."""
    begin_s = time.monotonic()
    project.up()
    told("up, model fetched, until all are well", time.monotonic() - begin_s)
    return project


@pytest.fixture(scope="session")
def golden() -> list[dict[str, Any]]:
    """Prompts with their greedy continuation, cut where it becomes a coin toss (``certain``)."""
    items: list[dict[str, Any]] = json.loads((REPOSITORY / "tests/data/golden/smollm2.json").read_text())["items"]
    for item in items:
        unsure = next((i for i, margin in enumerate(item["top2_margin"]) if margin < SAFE_MARGIN), 64)
        item["certain"] = item["greedy_ids"][:unsure]
    return items


@pytest.fixture
def ask(mesh: Project) -> Iterator[Ask]:
    """Asks by the official client."""
    with asking(mesh) as ask:
        yield ask
