"""A router that is gone between the legs: nobody will be sent for the pages, and they do not wait for their timeout."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from meshes.by_hand import Mesh
from meshes.process import request, until

from kvmesh.models.store import DEFAULT_MODEL

pytestmark = pytest.mark.slow

PROMPT = "It was a dark and stormy night, and the router had just asked for the first leg of a request. " * 4


@pytest.fixture(scope="module")
def mesh(make_mesh: Callable[..., Mesh]) -> Mesh:
    worker = {"cache_transceiver_config": {"backend": "DEFAULT", "kv_transfer_timeout_ms": 600_000}}
    return make_mesh({"context": dict(worker), "generation": dict(worker)}, coordinator={"lease_s": 2.0})


def join(mesh: Mesh, router: str) -> int:
    """Make a router a member; its epoch."""
    member = {"instance_id": router, "role": "router", "url": "http://127.0.0.1:1"}
    status, body = request(f"{mesh['coordinator'].url}/members", {"member": member})
    assert status == 200, body
    return int(json.loads(body)["epoch"])


def context_leg(mesh: Mesh, transfer_id: int, router: str) -> dict[str, Any]:
    body = {
        "model": DEFAULT_MODEL,
        "prompt": PROMPT,
        "max_tokens": 4,
        "disaggregated_params": {"request_type": "context_only", "disagg_request_id": transfer_id},
    }
    status, answer = mesh["context"].post("/v1/completions", body, headers={"X-KVMesh-Router": router})
    assert status == 200, answer
    [choice] = answer["choices"]
    return {"prompt": choice["prompt_token_ids"], **choice["disaggregated_params"]}


def orphaned(mesh: Mesh) -> float:
    return mesh["context"].metrics()["kvmesh_worker_legs_orphaned_total"]


def test_a_router_whose_lease_runs_out(mesh: Mesh) -> None:
    before = orphaned(mesh)
    join(mesh, "router-silent")
    handed = context_leg(mesh, 1, "router-silent")
    context_leg(mesh, 2, "router-alive")
    until(lambda: mesh["context"].stats()["pages_pinned"] > 0, "pages are pinned")
    until(lambda: orphaned(mesh) == before + 1, "its prompt is given up", 20.0)
    until(lambda: mesh["context"].metrics()["kvmesh_worker_legs_unread"] == 1, "the other router's stays")
    # Whoever comes for it nevertheless is told so.
    params = {**handed, "request_type": "generation_only"}
    body = {"model": DEFAULT_MODEL, "prompt": params.pop("prompt"), "max_tokens": 4, "disaggregated_params": params}
    status, answer = mesh["generation"].post("/v1/completions", body)
    assert (status, answer["error"]["code"]) == (404, "transfer_unknown")
    assert mesh["context"].post("/abort", {"disagg_request_id": 2}) == (200, {"aborted": True})
    mesh.wait_idle()


def test_a_router_that_says_goodbye(mesh: Mesh) -> None:
    before = orphaned(mesh)
    epoch = join(mesh, "router-leaving")
    context_leg(mesh, 3, "router-leaving")
    goodbye = urllib.request.Request(f"{mesh['coordinator'].url}/members/router-leaving?epoch={epoch}", method="DELETE")
    with urllib.request.urlopen(goodbye, timeout=10) as answer:
        assert answer.status == 200
    until(lambda: orphaned(mesh) == before + 1, "its prompt is given up")
    mesh.wait_idle()


def test_routers_name_themselves(mesh: Mesh) -> None:
    """KVMesh's own router: what it asks for is bound to its membership."""
    body = {"model": DEFAULT_MODEL, "prompt": PROMPT, "max_tokens": 2}
    status, answer = mesh["router"].post("/v1/completions", body)
    assert status == 200, answer
    mesh.wait_idle()
    [router] = [one for one in mesh["coordinator"].get("/members")["members"] if one["role"] == "router"]
    before = orphaned(mesh)
    # A leg in the name of that very router, which then dies.
    context_leg(mesh, 4, router["instance_id"])
    mesh["router"].popen.kill()
    mesh["router"].popen.wait()
    until(lambda: orphaned(mesh) == before + 1, "its prompt is given up", 20.0)
    mesh.wait_idle()
