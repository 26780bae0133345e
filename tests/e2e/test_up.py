"""``kvmesh up`` as people use it: from one command to the first answer, and nothing left behind."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable

import pytest
from meshes.up import Up

from kvmesh.models.store import DEFAULT_MODEL

pytestmark = pytest.mark.slow

QUESTION = {"model": DEFAULT_MODEL, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}


def test_foreground_and_ctrl_c(make_up: Callable[..., Up]) -> None:
    up = make_up().start()
    output = up.output.read_text()
    assert f"KVMesh is ready at {up.url}" in output
    assert "What is the capital of France?" in output
    assert "Paris" in output
    assert "TTFT" in output
    assert "TPOT" in output
    [curl] = [line.strip() for line in output.splitlines() if line.strip().startswith("curl ")]
    body = json.loads(curl.partition(" -d '")[2].removesuffix("'"))
    assert body["model"] == DEFAULT_MODEL
    assert {child.name for child in up.state().children} == {
        "coordinator",
        "indexer",
        "context-0",
        "generation-0",
        "router",
    }

    status, answer = up.post("/v1/chat/completions", QUESTION)
    assert status == 200
    assert answer["usage"]["completion_tokens"] <= 8

    shown = up.command("status")
    assert "context-0" in shown
    assert "generation-0" in shown
    assert "COMPLETED" in shown.upper()
    asked = up.command("chat", "--temperature", "0", "--max-tokens", "16", "What is the capital of France?")
    assert "Paris" in asked

    up.stop(signal.SIGINT)  # checks that nothing is left


def test_detached_and_down(make_up: Callable[..., Up]) -> None:
    up = make_up()
    output = up.detach("--aggregated", "1")
    assert "KVMesh is ready at" in output
    assert "kvmesh down stops it" in output
    family = up.family()
    assert len(family) >= 6, "a supervisor, four services and an engine"
    assert up.post("/v1/chat/completions", QUESTION)[0] == 200
    assert "aggregated-0" in up.command("status")
    assert f"stopped {up.url}" in up.command("down")
    up.check_gone(family)
    assert "no mesh runs" in up.command("down")
    up.abandon()


def test_killed_supervisor_leaves_nothing_running(make_up: Callable[..., Up]) -> None:
    """Its children end with it; ``kvmesh down`` removes the rest."""
    up = make_up().start()
    family = up.family()
    family[0].kill()
    up.popen.wait()
    up.command("down")
    up.check_gone(family)
    up.abandon()
