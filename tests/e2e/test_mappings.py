"""What a server has mapped and opened of a peer's memory is let go of when the peer is gone, however that is heard.

Looked up where the kernel shows it: /proc/PID/maps and /proc/PID/fd of the survivor's engine.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from meshes.by_hand import Mesh
from meshes.process import request, until
from soaks import soak_only

from kvmesh.models.store import DEFAULT_MODEL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LEASE_S = 3.0


@pytest.fixture
def mesh(make_brief_mesh: Callable[..., Mesh]) -> Mesh:
    return make_brief_mesh({"context": {}, "generation": {}}, coordinator={"lease_s": LEASE_S})


def ask(mesh: Mesh) -> int:
    body = {"model": DEFAULT_MODEL, "prompt": "Whose memory is this? " * 20, "max_tokens": 2, "ignore_eos": True}
    return mesh["router"].post("/v1/completions", body)[0]


def pools_of(engine: psutil.Process) -> set[int]:
    """Inodes of the memory that an engine shares: its memfds."""
    found = set()
    for fd in Path(f"/proc/{engine.pid}/fd").iterdir():
        try:
            if str(fd.readlink()).startswith("/memfd:"):
                found.add(fd.stat().st_ino)
        except OSError:
            continue  # closed meanwhile
    return found


def mapped_by(engine: psutil.Process) -> set[int]:
    """Inodes of the memfds that are mapped."""
    lines = Path(f"/proc/{engine.pid}/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines if "/memfd:" in line}


def links(mesh: Mesh, name: str) -> float:
    return mesh[name].metrics()["kvmesh_engine_transfer_links"]


def opened_by(engine: psutil.Process) -> Counter[str]:
    """Open files by kind: what is shared by its name, sockets and the like without their numbers."""
    found: Counter[str] = Counter()
    for fd in Path(f"/proc/{engine.pid}/fd").iterdir():
        try:
            found[str(fd.readlink()).split(":[")[0]] += 1
        except OSError:
            continue  # closed meanwhile
    return found


def settle(mesh: Mesh) -> tuple[psutil.Process, set[int], Counter[str]]:
    """Pair the two; gives the survivor, the memory of the other that it has mapped, and what it had open before."""
    survivor, owner = mesh["generation"].engine(), mesh["context"].engine()
    before = opened_by(survivor)
    assert ask(mesh) == 200
    mesh.wait_idle()
    foreign = mapped_by(survivor) & pools_of(owner)
    assert foreign, "the generation server reads the context server's memory in place"
    assert links(mesh, "generation") == 1
    return survivor, foreign, before


def check_let_go(mesh: Mesh, survivor: psutil.Process, foreign: set[int], before: Counter[str]) -> None:
    until(lambda: not mapped_by(survivor) & foreign, "the mapping is gone")
    until(lambda: not opened_by(survivor) - before, lambda: f"nothing more is open: {opened_by(survivor) - before}")
    until(lambda: links(mesh, "generation") == 0, "the link is gone")
    assert mesh["generation"].settled_stats()["pages_quarantined"] == 0


@pytest.mark.parametrize("victim", ["engine", pytest.param("front", marks=soak_only)])
def test_killed(mesh: Mesh, victim: str) -> None:
    survivor, foreign, before = settle(mesh)
    os.kill(mesh["context"].engine().pid if victim == "engine" else mesh["context"].pid, signal.SIGKILL)
    mesh["context"].wait_gone()
    check_let_go(mesh, survivor, foreign, before)
    mesh.launch_worker("context", {"coordinator_url": mesh["coordinator"].url}).wait_serving()
    until(lambda: ask(mesh) == 200, "its next life is paired with")
    mesh.wait_idle()


def test_frozen_and_never_heard_of_again(mesh: Mesh) -> None:
    """Nothing closes and nothing ends: only the lease runs out."""
    survivor, foreign, before = settle(mesh)
    family = mesh["context"].family()
    try:
        for process in family:
            process.suspend()
        check_let_go(mesh, survivor, foreign, before)
        members: dict[str, Any] = mesh["coordinator"].get("/members")
        assert "context" not in {one["instance_id"] for one in members["members"]}
    finally:
        for process in family:
            process.resume()
    # It hears that it was taken for dead, and ends so that its successor begins as a later life.
    assert mesh["context"].wait_gone() == 1
    epochs = [line["reason"] for line in mesh["context"].lines() if line["event"] == "this worker cannot go on"]
    assert "took this worker for dead" in epochs[0]
    mesh.launch_worker("context", {"coordinator_url": mesh["coordinator"].url}).wait_serving()
    until(lambda: ask(mesh) == 200, "its next life is paired with")


def test_said_goodbye(mesh: Mesh) -> None:
    survivor, foreign, before = settle(mesh)
    mesh["context"].terminate()
    assert mesh["context"].wait_gone() == 0
    check_let_go(mesh, survivor, foreign, before)
    status, _ = request(f"{mesh['generation'].url}/health")
    assert status == 200
