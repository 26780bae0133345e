"""Golden output over every transfer backend, in a mesh of real processes."""

from __future__ import annotations

from typing import Any

import pytest
from channel_peers import why_not
from meshes.by_hand import Mesh

from kvmesh.models.store import DEFAULT_MODEL

pytestmark = pytest.mark.slow

TOKENS = 16
BUFFER_TOKENS = 256
"""Less than the longest prompt here: what goes through staging buffers goes in pieces."""
PYTHON = [
    ("DEFAULT", {"transfer_plane": "memfd"}),
    ("DEFAULT", {"transfer_plane": "tcp"}),
    ("NIXL", {}),
]
CPP = ["DEFAULT", "NIXL", "UCX", "MOONCAKE", "MPI"]
ROWS = [
    *(({"backend": backend}, settings) for backend, settings in PYTHON),
    *(
        ({"backend": backend, "transceiver_runtime": "CPP", "max_tokens_in_buffer": BUFFER_TOKENS}, {})
        for backend in CPP
    ),
]


def name_of(row: tuple[dict[str, Any], dict[str, Any]]) -> str:
    transceiver, settings = row
    return " ".join([transceiver["backend"], transceiver.get("transceiver_runtime", "PYTHON"), *settings.values()])


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_golden_output(golden: list[dict[str, Any]], row: tuple[dict[str, Any], dict[str, Any]]) -> None:
    transceiver, settings = row
    library = transceiver["backend"].lower()
    if library != "default" and (reason := why_not(library)) is not None:
        pytest.skip(reason)
    worker = {"cache_transceiver_config": transceiver, **settings}
    mesh = Mesh()
    try:
        mesh.start({"context": dict(worker), "generation": dict(worker)}, indexer=False)
        check(mesh, golden)
    finally:
        mesh.stop()


def check(mesh: Mesh, golden: list[dict[str, Any]]) -> None:
    asked = [max(golden, key=lambda item: len(item["prompt_ids"])), *golden[:2]]
    for item in asked:
        body = {"model": DEFAULT_MODEL, "prompt": item["prompt_ids"], "max_tokens": TOKENS, "temperature": 0}
        status, answer = mesh["router"].post("/v1/completions", {**body, "ignore_eos": True, "return_token_ids": True})
        assert status == 200, answer
        certain = item["certain"][:TOKENS]
        assert answer["choices"][0]["token_ids"][: len(certain)] == certain
    mesh.wait_idle()
    stats = mesh["generation"].stats()
    assert stats["transfers_completed_total"] == len(asked)
    assert stats["transfer_bytes_total"] > 0
