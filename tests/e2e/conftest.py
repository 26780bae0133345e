"""Meshes that tests share; what one leaves behind (processes, files, shared memory) fails the test that ends it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from meshes.by_hand import Mesh
from meshes.up import Up

from kvmesh.models.store import DEFAULT_MODEL, resolve_model

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "smollm2.json"
SAFE_MARGIN = 1e-3  # below it, rounding alone may swap the two best tokens


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


@contextmanager
def meshes() -> Iterator[Callable[..., Mesh]]:
    """Starts meshes that end with the block: ``make_mesh(workers, coordinator=..., env={...})``."""
    started: list[Mesh] = []

    def make(workers: dict[str, dict[str, Any]], *, env: dict[str, str] | None = None, **options: Any) -> Mesh:
        mesh = Mesh(**(env or {}))
        started.append(mesh)
        return mesh.start(workers, **options)

    yield make
    errors = []
    for mesh in started:
        try:
            mesh.stop()
        except AssertionError as error:
            errors.append(str(error))
    assert not errors, "\n".join(errors)


@pytest.fixture(scope="module")
def make_mesh() -> Iterator[Callable[..., Mesh]]:
    """Meshes that tests of a module share: they take memory, and some processor time, until the module is over."""
    with meshes() as make:
        yield make


@pytest.fixture
def make_brief_mesh() -> Iterator[Callable[..., Mesh]]:
    """Meshes of one test, which end with it."""
    with meshes() as make:
        yield make


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
