"""A coordinator that keeps its state in etcd: either is killed in mid-traffic, and nothing is lost or waited for."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from etcd_server import EtcdServer, etcd_binary, why_no_etcd
from meshes.by_hand import Mesh
from meshes.process import request, until

from kvmesh.models.store import DEFAULT_MODEL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(etcd_binary() is None, reason=why_no_etcd()),
]

CLIENTS = 2
NOT_FETCHED = 3
TRANSFER = {"backend": "DEFAULT", "kv_transfer_timeout_ms": 120_000}


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    server = EtcdServer()
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture(scope="module")
def settings(etcd: EtcdServer) -> dict[str, Any]:
    """A coordinator that is found again at its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return {"port": port, "lease_s": 5.0, "etcd_lease_s": 2.0, "etcd_endpoints": [etcd.url]}


@pytest.fixture(scope="module")
def mesh(make_mesh: Callable[..., Mesh], settings: dict[str, Any]) -> Mesh:
    worker = {"cache_transceiver_config": TRANSFER}
    return make_mesh({"context": dict(worker), "generation": dict(worker)}, coordinator=settings)


class Traffic:
    """Clients that ask without end; every answer must be a good one."""

    def __init__(self, url: str) -> None:
        self.answers = 0
        self.bad: list[tuple[int, Any]] = []
        self._url = url
        self._leaving = threading.Event()

    def ask(self) -> None:
        for number in itertools.count():
            if self._leaving.is_set():
                return
            body = {"model": DEFAULT_MODEL, "prompt": f"Tell me about the number {number}", "max_tokens": 8}
            status, answer = request(f"{self._url}/v1/completions", body)
            if status == 200:
                self.answers += 1
            else:
                self.bad.append((status, answer))

    def more(self, count: int = 2 * CLIENTS) -> None:
        """Wait until so many further requests were answered."""
        wanted = self.answers + count
        until(lambda: self.answers >= wanted or self.bad, "requests are answered")
        assert self.bad == []

    @contextmanager
    def flowing(self) -> Iterator[None]:
        threads = [threading.Thread(target=self.ask) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._leaving.set()
            for thread in threads:
                thread.join()
        assert self.bad == []


def kill_coordinator(mesh: Mesh) -> None:
    os.kill(mesh["coordinator"].pid, signal.SIGKILL)
    mesh["coordinator"].popen.wait()


def leave_unfetched(mesh: Mesh, first_id: int) -> None:
    """Prompts whose pages nobody fetches: open transfers."""
    for transfer_id in range(first_id, first_id + NOT_FETCHED):
        body = {
            "model": DEFAULT_MODEL,
            "prompt": f"This is prompt number {transfer_id} " * 20,
            "max_tokens": 2,
            "disaggregated_params": {"request_type": "context_only", "disagg_request_id": transfer_id},
        }
        status, answer = mesh["context"].post("/v1/completions", body)
        assert status == 200, answer


def members(mesh: Mesh) -> dict[str, int]:
    return {one["instance_id"]: one["epoch"] for one in mesh["coordinator"].get("/members")["members"]}


def unfetched(mesh: Mesh) -> dict[int, int]:
    """Tokens of the transfers that nobody fetches, by id."""
    status, body = request(f"{mesh['coordinator'].url}/transfers?state=registered&limit=1000")
    assert status == 200, body
    return {
        one["transfer_id"]: one["sides"][0]["num_tokens"]
        for one in json.loads(body)["transfers"]
        if one["transfer_id"] < 10_000
    }


def coordinator_metric(mesh: Mesh, name: str) -> float:
    return mesh["coordinator"].metrics()[f"kvmesh_coordinator_{name}"]


def test_the_coordinator_is_killed_in_mid_traffic(mesh: Mesh, settings: dict[str, Any]) -> None:
    traffic = Traffic(mesh["router"].url)
    leave_unfetched(mesh, 1)
    until(lambda: len(unfetched(mesh)) == NOT_FETCHED, "the ledger has heard of them")
    known, open_transfers = members(mesh), unfetched(mesh)
    assert min(open_transfers.values()) > 0
    pinned = mesh["context"].settled_stats()["pages_pinned"]
    with traffic.flowing():
        traffic.more()
        kill_coordinator(mesh)
        traffic.more()
        mesh.launch("coordinator", "coordinator", settings).wait_serving()
        assert members(mesh) == known, "at once, without a heartbeat"
        assert unfetched(mesh) == open_transfers
        traffic.more()
        # Everybody beats on under the epoch that they have, and nobody died of it.
        until(lambda: coordinator_metric(mesh, "members_dead_total") == 0 and members(mesh) == known, "all are there")
    assert mesh["context"].settled_stats()["pages_pinned"] == pinned, "no pinned page is lost, or freed too early"
    assert members(mesh) == known


def test_etcd_is_killed_and_comes_back(mesh: Mesh, etcd: EtcdServer, settings: dict[str, Any]) -> None:
    traffic = Traffic(mesh["router"].url)
    known = members(mesh)
    with traffic.flowing():
        traffic.more()
        etcd.kill()
        until(lambda: coordinator_metric(mesh, "etcd_connected") == 0, "the coordinator notices")
        assert "going on from memory" in mesh["coordinator"].get("/health")["detail"]
        leave_unfetched(mesh, 101)
        until(lambda: len(unfetched(mesh)) == 2 * NOT_FETCHED, "the ledger goes on")
        traffic.more()
        etcd.start()
        until(lambda: coordinator_metric(mesh, "etcd_connected") == 1, "etcd is used again")
        traffic.more()
        open_transfers = unfetched(mesh)
        kill_coordinator(mesh)
        mesh.launch("coordinator", "coordinator", settings).wait_serving()
        assert members(mesh) == known
        assert unfetched(mesh) == open_transfers, "also what was begun without etcd"
        traffic.more()
    events = [line["event"] for line in mesh["coordinator"].lines()]
    assert "leads; what was stored is restored" in events


def test_nothing_is_left_over(mesh: Mesh) -> None:
    for transfer_id in [*range(1, 1 + NOT_FETCHED), *range(101, 101 + NOT_FETCHED)]:
        status, answer = mesh["context"].post("/abort", {"disagg_request_id": transfer_id})
        assert (status, answer) == (200, {"aborted": True})
    mesh.wait_idle()
    until(lambda: coordinator_metric(mesh, "ledger_open") == 0, "every transfer is finished in the ledger")
    until(lambda: coordinator_metric(mesh, "etcd_pending") == 0, "and etcd has forgotten it")
