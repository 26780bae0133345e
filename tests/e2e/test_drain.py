"""SIGTERM: what runs is finished, what is new goes elsewhere, and the process leaves right after."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from meshes.by_hand import Mesh
from meshes.process import Process, request, until

from kvmesh.models.store import DEFAULT_MODEL

pytestmark = pytest.mark.slow

LENGTH = 150
LEAVES_WITHIN_S = 10.0


@pytest.fixture(scope="module")
def drained(make_mesh: Callable[..., Mesh]) -> Any:
    patient = {"drain_s": 60.0}  # however busy this machine is
    workers = {name: dict(patient) for name in ("context", "generation", "generation-2")}
    return make_mesh(workers, router=dict(patient))


class Reader(threading.Thread):
    """Reads one long stream."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.events: list[str] = []
        body = {"model": DEFAULT_MODEL, "prompt": "Once", "max_tokens": LENGTH, "ignore_eos": True, "stream": True}
        self._asked = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )

    def run(self) -> None:
        with urllib.request.urlopen(self._asked, timeout=60) as response:
            for line in response:
                if data := line.decode().strip():
                    self.events.append(data.removeprefix("data: "))


@pytest.mark.parametrize("leaving", [("generation",), ("context", "router")])
def test_streams_are_finished(drained: Mesh, leaving: tuple[str, ...]) -> None:
    url = drained["router"].url
    readers = [Reader(url), Reader(url)]
    for reader in readers:
        reader.start()
    until(lambda: all(len(reader.events) > 3 for reader in readers), "both streams run")
    processes = [drained[name] for name in leaving]
    for process in processes:
        process.terminate()
    if leaving == ("generation",):
        # The other one takes what is new.
        status, answer = drained["router"].post(
            "/v1/completions", {"model": DEFAULT_MODEL, "prompt": "Hi", "max_tokens": 2}
        )
        assert status == 200, answer
    for reader in readers:
        reader.join()
        assert reader.events[-1] == "[DONE]"
        choices = [json.loads(event)["choices"][0] for event in reader.events[:-1]]
        assert choices[-1]["finish_reason"] == "length"
    finished_s = time.monotonic()
    assert [process.wait_gone() for process in processes] == [0] * len(processes)
    assert time.monotonic() - finished_s < LEAVES_WITHIN_S


TRANSFER = {"backend": "DEFAULT", "kv_transfer_timeout_ms": 60_000}


def context_leg(mesh: Mesh, transfer_id: int, name: str = "context") -> dict[str, Any]:
    """Prefill a prompt at a context server; its answer's parameters for the second leg."""
    body = {
        "model": DEFAULT_MODEL,
        "prompt": "Once upon a time there was a server that had to leave, but somebody still had to come. " * 4,
        "max_tokens": 4,
        "disaggregated_params": {"request_type": "context_only", "disagg_request_id": transfer_id},
    }
    status, answer = mesh[name].post("/v1/completions", body)
    assert status == 200, answer
    [choice] = answer["choices"]
    return {"prompt": choice["prompt_token_ids"], **choice["disaggregated_params"]}


def generation_leg(mesh: Mesh, handed: dict[str, Any]) -> tuple[int, Any]:
    params = {**handed, "request_type": "generation_only"}
    body = {"model": DEFAULT_MODEL, "prompt": params.pop("prompt"), "max_tokens": 4, "disaggregated_params": params}
    return mesh["generation"].post("/v1/completions", body)


def detail(process: Process) -> str:
    status, body = request(f"{process.url}/health")
    assert status in (200, 503), body
    return str(json.loads(body)["detail"])


def waits_for(process: Process) -> list[dict[str, Any]]:
    """What its log says of whom it waits for."""
    return [line for line in process.lines() if "waits_for" in line]


def test_a_context_server_waits_until_its_prompts_are_read_and_says_for_whom(
    make_brief_mesh: Callable[..., Mesh],
) -> None:
    worker = {"cache_transceiver_config": TRANSFER, "drain_s": 25.0}
    mesh = make_brief_mesh({"context": dict(worker), "generation": dict(worker)})
    context = mesh["context"]
    handed = [context_leg(mesh, transfer_id) for transfer_id in (71, 72)]
    until(lambda: context.metrics()["kvmesh_worker_legs_unread"] == 2, "its front knows of both")
    context.terminate()
    until(lambda: "waits until 2 prompts" in detail(context), "it says for whom it waits")
    assert "2 by nobody yet; oldest 71" in detail(context)
    [first, *_] = waits_for(context)
    assert first["transfers"] == 2
    assert [(one["transfer_id"], one["reader"]) for one in first["waits_for"]] == [(71, None), (72, None)]
    assert first["waits_for"][0]["tokens"] == len(handed[0]["prompt"])
    # Nothing new is taken, and the router knows that at once.
    status, answer = mesh["router"].post("/v1/completions", {"model": DEFAULT_MODEL, "prompt": "Hi", "max_tokens": 4})
    assert status == 503, answer
    shown = subprocess.run(
        [sys.executable, "-m", "kvmesh.cli.main", "status", "--coordinator", mesh["coordinator"].url],
        capture_output=True, text=True, timeout=60, env={**mesh.env, "COLUMNS": "200"}, check=False,
    ).stdout  # fmt: skip
    assert "draining; waits until 2 prompts" in shown
    # Readers still come.
    status, answer = generation_leg(mesh, handed[0])
    assert status == 200, answer
    assert context.post("/abort", {"disagg_request_id": 72}) == (200, {"aborted": True})
    assert context.wait_gone() == 0
    assert "drained: every prompt was read" in [line["event"] for line in context.lines()]


def test_the_wait_for_readers_is_bounded(make_brief_mesh: Callable[..., Mesh]) -> None:
    worker = {"cache_transceiver_config": TRANSFER}
    mesh = make_brief_mesh({"context": {**worker, "drain_s": 1.5}, "generation": dict(worker)})
    context = mesh["context"]
    handed = context_leg(mesh, 81)
    until(lambda: context.metrics()["kvmesh_worker_legs_unread"] == 1, "its front knows of it")
    began_s = time.monotonic()
    context.terminate()
    assert context.wait_gone() == 0
    assert 1.5 <= time.monotonic() - began_s < 1.5 + LEAVES_WITHIN_S
    [line] = [line for line in context.lines() if line["event"] == "leaving with prompts unread"]
    assert [one["transfer_id"] for one in line["waits_for"]] == [81]
    # Whoever comes too late hears so at once.
    status, answer = generation_leg(mesh, handed)
    assert (status, answer["error"]["type"]) == (503, "service_unavailable_error")
    mesh["generation"].settled_stats()
    assert mesh["generation"].stats()["pages_quarantined"] == 0
