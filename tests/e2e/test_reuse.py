"""What was computed once is not computed again: usage, engine counters and ``kvmesh status`` say so."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from meshes.by_hand import Mesh
from meshes.process import until

from kvmesh.events.index import DEFAULT_TENANT
from kvmesh.models.store import DEFAULT_MODEL

pytestmark = pytest.mark.slow

BLOCK = 32
USERS = 3
SYSTEM_TOKENS = 500


def complete(mesh: Mesh, prompt: list[int], **options: Any) -> dict[str, Any]:
    body = {"model": DEFAULT_MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, **options}
    status, answer = mesh["router"].post("/v1/completions", body)
    assert status == 200, answer
    return answer


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def tokens(seed: int, length: int) -> list[int]:
    """A prompt that no other test has."""
    return [1000 + (seed * 7919 + i * 31) % 40_000 for i in range(length)]


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 100])
def test_all_but_the_last_token_is_reused(mesh: Mesh, length: int) -> None:
    # In a scope of its own: parts of blocks are not looked for below a node with 32 children or more, and other tests
    # leave many below the root.
    prompt, salt = tokens(length, length), f"reuse-{length}"
    first, second = complete(mesh, prompt, cache_salt=salt), complete(mesh, prompt, cache_salt=salt)
    assert cached(first) == 0
    assert cached(second) == length - 1
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"] == length


def test_whole_blocks_only_without_partial_reuse(make_mesh: Callable[..., Mesh]) -> None:
    whole = {"kv_cache_config": {"enable_partial_reuse": False}}
    mesh = make_mesh({"context": whole, "generation": whole})
    for length in (1, 31, 32, 33, 64, 65, 100):
        prompt = tokens(length, length)
        first, second = complete(mesh, prompt), complete(mesh, prompt)
        assert (cached(first), cached(second)) == (0, BLOCK * ((length - 1) // BLOCK)), length
        assert first["choices"][0]["text"] == second["choices"][0]["text"]
    mesh.wait_idle()


def test_system_prompt_is_prefilled_once(mesh: Mesh) -> None:
    system = tokens(77, SYSTEM_TOKENS)
    questions = [tokens(200 + user, 20) for user in range(USERS)]
    complete(mesh, system + questions[0])
    before = mesh["context"].settled_stats()
    moved = mesh["generation"].settled_stats()["transfer_pages_total"]
    answers = [complete(mesh, system + question) for question in questions[1:]]
    assert all(cached(answer) >= SYSTEM_TOKENS - BLOCK for answer in answers)
    after = mesh["context"].settled_stats()
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == (USERS - 1) * (SYSTEM_TOKENS + 20)
    prefilled = after["prefilled_tokens_total"] - before["prefilled_tokens_total"]
    assert prefilled == sum(SYSTEM_TOKENS + 20 - cached(answer) for answer in answers) <= (USERS - 1) * (20 + BLOCK)
    # The same numbers where Prometheus and people look.
    name = "kvmesh_engine_prefilled_tokens_total"
    assert mesh["context"].metrics()[name] == after["prefilled_tokens_total"]
    # Nor do pages cross that the generation server holds already: a tail of two blocks at most.
    assert mesh["generation"].settled_stats()["transfer_pages_total"] - moved <= (USERS - 1) * 2

    def shown() -> bool:
        load = next(
            member["load"] for member in status(mesh, "--json")["members"]["members"] if member["role"] == "context"
        )
        return (load["cached_tokens_total"], load["prompt_tokens_total"]) == (
            after["cached_tokens_total"],
            after["prompt_tokens_total"],
        )

    until(shown, "the next heartbeat tells it to the coordinator")
    share = after["cached_tokens_total"] / after["prompt_tokens_total"]
    assert f"{after['cached_tokens_total']} {share:.0%}" in status(mesh)


def status(mesh: Mesh, *flags: str) -> Any:
    """What ``kvmesh status`` prints; decoded with ``--json``."""
    argv = [sys.executable, "-m", "kvmesh.cli.main", "status", "--coordinator", mesh["coordinator"].url, *flags]
    done = subprocess.run(argv, env=mesh.env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout) if flags else done.stdout


def test_router_knows_what_the_servers_hold(mesh: Mesh) -> None:
    """The indexer follows the workers' events, and the router's choice is explained by its matches."""
    prompt = tokens(300, 4 * BLOCK + 1)
    complete(mesh, prompt)
    asked = 0

    def matched() -> bool:
        nonlocal asked
        asked += 1
        request_id = f"explained-{asked}"
        complete(mesh, prompt, request_id=request_id)
        [sequence] = mesh["router"].get(f"/explain/{request_id}")["sequences"]
        assert sequence["match_state"] == "answered"
        return sequence["matched_tokens"] == {"context": 4 * BLOCK, "generation": 4 * BLOCK}

    until(matched, "the router matches the whole prompt")
    status, answer = mesh["indexer"].post("/query", {"model": DEFAULT_MODEL, "token_ids": prompt})
    assert status == 200
    assert {name: held["GPU"] for name, held in answer[DEFAULT_TENANT].items()} == {
        "context": 4 * BLOCK,
        "generation": 4 * BLOCK,
    }
