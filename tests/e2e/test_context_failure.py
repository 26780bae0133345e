"""A context server that fails, or gives up, a prompt that a generation server already waits for: the wait ends at once.

All deadlines are minutes away, so that whatever ends a wait here was told.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from meshes.by_hand import Mesh
from meshes.process import request, until
from soaks import soak_only

from kvmesh.models.store import DEFAULT_MODEL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

AT_ONCE_S = 10.0
"""On a busy machine; the deadlines are at 600 s."""
PROMPT_TOKENS = 3000
ids = itertools.count(5000)


@pytest.fixture
def mesh(make_brief_mesh: Callable[..., Mesh]) -> Mesh:
    worker: dict[str, Any] = {
        "cache_transceiver_config": {"backend": "DEFAULT", "kv_transfer_timeout_ms": 600_000},
        "request_timeout_s": 600.0,
    }
    # Small steps make the prompt last.
    return make_brief_mesh({"context": {**worker, "max_num_tokens": 16}, "generation": dict(worker)})


class Legs:
    """Both legs of a request at once, by hand (generation first)."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.transfer_id = next(ids)
        [member] = [one for one in mesh["coordinator"].get("/members")["members"] if one["instance_id"] == "context"]
        shared = {"disagg_request_id": self.transfer_id, "schedule_style": 1}
        prompt = [(self.transfer_id * 7 + number) % 40_000 for number in range(PROMPT_TOKENS)]
        self.body = {"model": DEFAULT_MODEL, "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.ended_s: dict[str, float] = {}
        late = {
            **shared,
            "request_type": "generation_only",
            "ctx_request_id": self.transfer_id,
            "ctx_info_endpoint": member["ctx_info_endpoint"],
            "encoded_opaque_state": member["ctx_addresses"][0],
        }
        self.threads = [
            threading.Thread(target=self._ask, args=("generation", late)),
            threading.Thread(target=self._ask, args=("context", {**shared, "request_type": "context_only"})),
        ]
        for thread in self.threads:
            thread.start()
        until(lambda: mesh["context"].stats()["running"] == 1, "the prompt is being computed")
        until(lambda: mesh["generation"].stats()["in_transfer"] == 1, "and waited for")

    def _ask(self, name: str, params: dict[str, Any]) -> None:
        url = f"{self.mesh[name].url}/v1/completions"
        self.answers[name] = request(url, {**self.body, "disaggregated_params": params}, timeout_s=280.0)
        self.ended_s[name] = time.monotonic()

    def check_told(self, since_s: float, codes: set[str]) -> None:
        for thread in self.threads:
            thread.join()
        status, answer = self.answers["generation"]
        assert status == 503, answer
        assert json.loads(answer)["error"]["code"] in codes
        assert self.ended_s["generation"] - since_s < AT_ONCE_S


def test_the_context_request_is_given_up(mesh: Mesh) -> None:
    legs = Legs(mesh)
    since_s = time.monotonic()
    assert mesh["context"].post("/abort", {"disagg_request_id": legs.transfer_id}) == (200, {"aborted": True})
    legs.check_told(since_s, {"kv_transfer_cancelled"})
    mesh.wait_idle()


@pytest.mark.parametrize("victim", ["engine", pytest.param("front", marks=soak_only)])
def test_the_context_server_dies(mesh: Mesh, victim: str) -> None:
    legs = Legs(mesh)
    since_s = time.monotonic()
    os.kill(mesh["context"].engine().pid if victim == "engine" else mesh["context"].pid, signal.SIGKILL)
    legs.check_told(since_s, {"peer_dead", "peer_lost"})
    mesh["context"].wait_gone()
    assert mesh["context"].popen.returncode in (1, -signal.SIGKILL)
    mesh.processes["context"] = mesh.launch_worker("context", {"coordinator_url": mesh["coordinator"].url})
    mesh["context"].wait_serving()
    mesh.wait_idle()
