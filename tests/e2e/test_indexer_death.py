"""The indexer is killed under load: requests go on by load alone, and its next life knows all that the workers hold."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from meshes.by_hand import Mesh
from meshes.process import Process, until

from kvmesh.models.store import DEFAULT_MODEL

pytestmark = pytest.mark.slow

SHARED = "You answer questions about ships, harbours and the sea, in short and friendly sentences. " * 8
DEGRADED_WITHIN_S = 1.0


class Outcome(NamedTuple):
    ended_s: float
    status: int
    took_s: float
    match_state: str
    matched_tokens: int
    match_ms: float


class Load:
    """Two clients that ask, one question after the other, prompts with a common beginning."""

    def __init__(self, router: Process) -> None:
        self._router = router
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(2)]
        self.outcomes: list[Outcome] = []
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)

    def since(self, began_s: float) -> list[Outcome]:
        return [one for one in self.outcomes if one.ended_s >= began_s]

    def matching(self, began_s: float) -> bool:
        """Whether a request since then was matched."""
        return any(one.match_state == "answered" and one.matched_tokens for one in self.since(began_s))

    def _ask(self, number: int) -> None:
        asked = 0
        while not self._stopping.is_set():
            asked += 1
            prompt = f"{SHARED}Question {number} {asked}: what is a lighthouse?"
            began_s = time.monotonic()
            status, answer = self._router.post(
                "/v1/completions", {"model": DEFAULT_MODEL, "prompt": prompt, "max_tokens": 2}
            )
            ended_s = time.monotonic()
            state, tokens, match_ms = "", 0, 0.0
            if status == 200:
                explanation = self._router.get(f"/explain/{answer['id']}")
                [sequence] = explanation["sequences"]
                state, match_ms = sequence["match_state"], explanation.get("match_ms", 0.0)
                tokens = max(sequence.get("matched_tokens", {}).values(), default=0)
            self.outcomes.append(Outcome(ended_s, status, ended_s - began_s, state, tokens, match_ms))


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    mesh = Mesh()
    try:
        match = f"ipc://{mesh.directory}/match"
        mesh.start({"worker-a": {}, "worker-b": {}}, router={"indexer_match_endpoint": match}, indexer=False)
        start_indexer(mesh)
        yield mesh
    finally:
        mesh.stop()


def start_indexer(mesh: Mesh) -> Process:
    settings = {
        "port": 0,
        "match_endpoint": f"ipc://{mesh.directory}/match",
        "coordinator_url": mesh["coordinator"].url,
        "snapshot_path": f"{mesh.directory}/index",
        "snapshot_interval_s": 0.5,
    }
    return mesh.launch("indexer", "indexer", settings)


def blocks(indexer: Process) -> dict[str, int]:
    return {worker["instance_id"]: worker["blocks"] for worker in indexer.get("/workers") if worker["connected"]}


def test_killed_under_load_and_whole_again(mesh: Mesh) -> None:
    indexer = mesh["indexer"]
    indexer.wait_serving()
    load = Load(mesh["router"])
    try:
        until(lambda: len(load.outcomes) >= 10 and load.matching(0.0), "prompts are matched", 60.0)
        known = sum(blocks(indexer).values())
        written = indexer.metrics()["kvmesh_indexer_snapshots_total"]
        # One that was begun with what is known now.
        until(lambda: indexer.metrics()["kvmesh_indexer_snapshots_total"] >= written + 2, "snapshots are written", 60.0)
        killed_s = time.monotonic()
        indexer.popen.kill()
        indexer.popen.wait()
        until(lambda: len(load.since(killed_s + DEGRADED_WITHIN_S)) >= 8, "requests go on", 60.0)
        down = load.since(killed_s)

        started_s = time.monotonic()
        again = start_indexer(mesh)
        again.wait_serving()
        serving_s = time.monotonic()
        until(lambda: len(blocks(again)) == 2 and sum(blocks(again).values()) >= known, "it knows everything again")
        whole_s = time.monotonic()
        until(lambda: load.matching(serving_s), "prompts are matched again", 60.0)
        matched_s = time.monotonic()
        restored = again.metrics()["kvmesh_indexer_snapshot_restored_blocks"]
    finally:
        load.stop()
    assert [one for one in load.outcomes if one.status != 200] == []
    late = [one for one in down if one.ended_s - one.took_s > killed_s + DEGRADED_WITHIN_S]
    assert late
    assert {one.match_state for one in late} <= {"resting", "unreachable"}, "nobody waits for it a second later"
    assert restored > 0
    report = {
        "requests": len(load.outcomes),
        "failed": 0,
        "slowest_match_ms_after_the_kill": round(max(one.match_ms for one in down), 1),
        "blocks_before_the_kill": known,
        "restored_from_the_snapshot": int(restored),
        "process_start_s": round(serving_s - started_s, 2),
        "whole_after_serving_s": round(whole_s - serving_s, 2),
        "matched_after_serving_s": round(matched_s - serving_s, 2),
    }
    print(json.dumps(report))
