"""Greedy answers through a whole mesh are the reference's, token for token."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from channel_peers import why_not
from meshes.by_hand import Mesh
from soaks import soak_only

from kvmesh.models.store import DEFAULT_MODEL

pytestmark = pytest.mark.slow

Make = Callable[..., Any]
Items = list[dict[str, Any]]
GENERATED = 64
GENERATION_FIRST = {"schedule_style": "generation_first"}
BUFFER_TOKENS = 64
"""Less than the longest prompt: it goes in pieces."""
NIXL = {"cache_transceiver_config": {"backend": "NIXL"}}


def ask(mesh: Mesh, prompt: str | list[int], *, stream: bool) -> tuple[list[int], list[int]]:
    """Prompt and answer token ids of a greedy completion."""
    body = {
        "model": DEFAULT_MODEL,
        "prompt": prompt,
        "max_tokens": GENERATED,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
    }
    status, answer = mesh["router"].post("/v1/completions", body)
    assert status == 200, answer
    if not stream:
        [choice] = answer["choices"]
        assert choice["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == GENERATED
        return choice["prompt_token_ids"], choice["token_ids"]
    assert answer.pop() == "[DONE]"
    choices = [choice for event in answer for choice in json.loads(event)["choices"]]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    prompt_ids = [token for choice in choices for token in choice.get("prompt_token_ids") or []]
    return prompt_ids, [token for choice in choices for token in choice.get("token_ids") or []]


def check(mesh: Mesh, golden: Items, *, stream: bool) -> None:
    # As text in streams and as token ids in whole answers, which must be the same thing; all together, as they come.
    with ThreadPoolExecutor(len(golden)) as together:
        prompts = [item["prompt"] if stream else item["prompt_ids"] for item in golden]
        answers = list(together.map(lambda prompt: ask(mesh, prompt, stream=stream), prompts))
    for item, (prompt_ids, tokens) in zip(golden, answers, strict=True):
        assert prompt_ids == item["prompt_ids"]
        assert len(tokens) == GENERATED
        assert tokens[: len(item["certain"])] == item["certain"]
    mesh.wait_idle()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_default_backend(mesh: Mesh, golden: Items, stream: bool) -> None:
    """Prompts of a page are read on loan; longer ones, and the first of all, are asked for."""
    before = mesh["generation"].stats()
    check(mesh, golden, stream=stream)
    stats = mesh["generation"].settled_stats()
    assert stats["transfers_completed_total"] == before["transfers_completed_total"] + len(golden)
    assert 0 < stats["transfers_borrowed_total"] - before["transfers_borrowed_total"] < len(golden)


def test_tcp(make_brief_mesh: Make, golden: Items) -> None:
    """The built-in plane as it is between hosts."""
    mesh = make_brief_mesh({"context": {"transfer_plane": "tcp"}, "generation": {"transfer_plane": "tcp"}})
    check(mesh, golden, stream=False)
    stats = mesh["generation"].stats()
    assert stats["transfers_completed_total"] == len(golden)
    assert stats["transfer_bytes_total"] > 0


def test_nixl_backend(make_brief_mesh: Make, golden: Items) -> None:
    mesh = make_brief_mesh({"context": NIXL, "generation": NIXL})
    assert mesh["generation"].get("/server_info")["transfer_backend"] == "NIXL"
    check(mesh, golden, stream=False)
    check(mesh, golden, stream=True)


@pytest.mark.parametrize(
    ("backend", "fields"),
    [
        ("DEFAULT", {"max_tokens_in_buffer": BUFFER_TOKENS, "kv_transfer_timeout_ms": None}),
        pytest.param("NIXL", {}, marks=soak_only),
    ],
    ids=["BUILTIN", "NIXL"],
)
def test_staging_buffers(make_brief_mesh: Make, golden: Items, backend: str, fields: dict[str, Any]) -> None:
    """§2b: the CPP runtime; with a buffer of two pages, and without any deadline."""
    transfers = {"cache_transceiver_config": {"backend": backend, "transceiver_runtime": "CPP", **fields}}
    mesh = make_brief_mesh({"context": transfers, "generation": transfers})
    backend = "BUILTIN" if backend == "DEFAULT" else backend
    assert mesh["generation"].get("/server_info")["transfer_backend"] == f"CPP/{backend}"
    check(mesh, golden, stream=False)
    stats = mesh["generation"].stats()
    assert stats["transfers_completed_total"] == len(golden)
    assert stats["staging_bytes"] > 0 == stats["staging_receive_used_bytes"]


@pytest.mark.parametrize("backend", ["NIXL", pytest.param("DEFAULT", marks=soak_only)])
def test_bounce(make_brief_mesh: Make, monkeypatch: pytest.MonkeyPatch, golden: Items, backend: str) -> None:
    """§6.6: with gates that let everything through."""
    monkeypatch.setenv("TRTLLM_KV_CACHE_BOUNCE_MIN_BLOCKS", "1")
    monkeypatch.setenv("TRTLLM_KV_CACHE_BOUNCE_MIN_BYTES", "1")
    transfers = {"cache_transceiver_config": {"backend": backend, "kv_cache_bounce_size_mb": 64}}
    mesh = make_brief_mesh({"context": transfers, "generation": transfers})
    check(mesh, golden, stream=False)
    sent, received = mesh["context"].stats(), mesh["generation"].stats()
    assert received["transfers_completed_total"] == sent["bounce_transfers_total"] == len(golden)
    assert sent["staging_send_used_bytes"] == received["staging_receive_used_bytes"] == 0


@pytest.mark.parametrize("backend", ["UCX", "MOONCAKE", "MPI"])
def test_optional_backends(make_brief_mesh: Make, golden: Items, backend: str) -> None:
    """§2b: ``auto`` falls back to the CPP runtime, the only one that these have."""
    if (reason := why_not(backend.lower())) is not None:
        pytest.skip(reason)
    fields = {"backend": backend, "transceiver_runtime": "auto", "max_tokens_in_buffer": BUFFER_TOKENS}
    transfers = {"cache_transceiver_config": fields}
    mesh = make_brief_mesh({"context": transfers, "generation": transfers})
    assert mesh["generation"].get("/server_info")["transfer_backend"] == f"CPP/{backend}"
    check(mesh, golden, stream=False)
    assert mesh["generation"].stats()["transfers_completed_total"] == len(golden)


def test_generation_first(make_brief_mesh: Make, golden: Items) -> None:
    mesh = make_brief_mesh({"context": {}, "generation": {}}, router=GENERATION_FIRST)
    check(mesh, golden, stream=False)
    check(mesh, golden, stream=True)
    assert mesh["router"].metrics()["kvmesh_router_sequences_generation_first_total"] > 0


def test_pipelined(make_brief_mesh: Make, golden: Items) -> None:
    transfers = {"backend": "NIXL", "transceiver_runtime": "PYTHON"}
    context = {"cache_transceiver_config": {**transfers, "enable_pipelined_transfer": True}, "max_num_tokens": 32}
    generation = {"cache_transceiver_config": transfers}
    mesh = make_brief_mesh({"context": context, "generation": generation}, router=GENERATION_FIRST)
    assert mesh["context"].get("/server_info")["transfer_backend"] == "NIXL"
    check(mesh, golden, stream=False)
    check(mesh, golden, stream=True)


def test_aggregated(make_brief_mesh: Make, golden: Items) -> None:
    mesh = make_brief_mesh({"worker": {}})
    check(mesh, golden, stream=False)
    check(mesh, golden, stream=True)
    assert mesh["worker"].stats()["transfers_started_total"] == 0
