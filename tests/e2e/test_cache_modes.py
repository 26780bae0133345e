"""Servers whose caches spill to the host and to disk: the tokens of roomy ones, also when the disk fails them."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from meshes.by_hand import Mesh
from meshes.streams import Stream, ask, body, certain

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STREAMS = 16
PAGE_BYTES = 1_474_560
SIZES = {"max_tokens": 256, "host_cache_size": 5 * PAGE_BYTES, "disk_cache_size": 40 * PAGE_BYTES}


def bodies() -> list[dict[str, Any]]:
    """Streams of mixed length, most of which begin like others."""
    choose = random.Random(3)
    beginnings = [[choose.randrange(1000, 45_000) for _ in range(100)] for _ in range(4)]
    return [
        body(
            choose.choice(beginnings)[: choose.randrange(30, 100)]
            + [choose.randrange(1000, 45_000) for _ in range(choose.randrange(1, 40))],
            choose.choice([2, 12, 40]),
        )
        for _ in range(STREAMS)
    ]


def together(mesh: Mesh, asked: list[dict[str, Any]]) -> list[Stream]:
    """All at once, and then nothing is in use."""
    with ThreadPoolExecutor(STREAMS) as threads:
        answers = list(threads.map(lambda body: ask(mesh, body), asked))
    mesh.wait_idle()
    return answers


def counters(mesh: Mesh, worker: str) -> dict[str, int]:
    """Of the cache."""
    found: dict[str, int] = mesh[worker].settled_stats()["cache"]["counters"]
    return found


def disabled(mesh: Mesh, worker: str) -> list[str]:
    """Reasons for which a worker has turned a tier off."""
    lines = mesh[worker].lines()
    return [line["reason"] for line in lines if line.get("event", "").startswith("cache tier disabled")]


def test_tiers_end_to_end(mesh: Mesh, make_brief_mesh: Callable[..., Mesh], tmp_path: Path) -> None:
    directories = {name: tmp_path / name for name in ("context", "generation")}
    for directory in directories.values():
        directory.mkdir()
    spilling = make_brief_mesh(
        {
            name: {"kv_cache_config": {**SIZES, "disk_cache_path": str(directory)}}
            for name, directory in directories.items()
        }
    )
    files = {name: next(directory.iterdir()) for name, directory in directories.items()}
    asked = bodies()
    solo = [ask(mesh, body) for body in asked]

    assert certain(solo, together(spilling, asked)) > 0.8
    for name, file in files.items():
        counted = counters(spilling, name)
        assert counted["offloaded_pages"] > 0
        assert counted["onboarded_pages"] > 0
        assert file.stat().st_size > 0
        assert disabled(spilling, name) == []

    # From here on the context server's disk takes nothing more, and the generation server's file is damaged.
    taken = files["context"].stat().st_size // 2
    psutil.Process(spilling["context"].engine().pid).rlimit(psutil.RLIMIT_FSIZE, (taken, taken))
    with files["generation"].open("r+b") as file:
        for page in range(files["generation"].stat().st_size // PAGE_BYTES):
            file.seek(page * PAGE_BYTES + 4096)
            file.write(b"\xff" * 64)
    certain(solo, together(spilling, asked))
    assert len(disabled(spilling, "context")) == 1
    assert "File too large" in disabled(spilling, "context")[0]
    assert disabled(spilling, "generation") == []
    assert counters(spilling, "generation")["damaged_pages"] > 0
    assert counters(spilling, "context")["damaged_pages"] == 0

    offloaded = counters(spilling, "context")["offloaded_pages"]
    certain(solo[:8], together(spilling, asked[:8]))
    assert counters(spilling, "context")["offloaded_pages"] > offloaded, "to the host, as before"
    assert len(disabled(spilling, "context")) == 1

    for worker in spilling.workers():
        worker.terminate()
        assert worker.wait_gone() == 0
    assert [list(directory.iterdir()) for directory in directories.values()] == [[], []]
