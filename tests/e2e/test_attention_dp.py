"""A mesh whose context and generation servers have two attention data-parallel ranks each, as processes of their own.

The index knows each rank's blocks, the router sends a prompt to the rank that holds it, and a rank that is killed takes
its server along, whose next life is whole again.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from meshes.by_hand import Mesh
from meshes.process import request, until
from soaks import soak_only

from kvmesh.cli.ports import PortPicker
from kvmesh.models.store import DEFAULT_MODEL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

RANKS = 2
BLOCK = 32
GENERATED = 8


def server(ports: PortPicker) -> dict[str, Any]:
    first = ports.pick_run("127.0.0.1", 2 * RANKS, 0)
    events = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://127.0.0.1:{first}",
        "replay_endpoint": f"tcp://127.0.0.1:{first + RANKS}",
    }
    return {
        "enable_attention_dp": True,
        "tensor_parallel_size": RANKS,
        "device_memory_bytes": 512 << 20,
        "kv_cache_config": {"kv_events_config": events},
    }


@pytest.fixture(scope="module")
def settings() -> dict[str, dict[str, Any]]:
    ports = PortPicker()
    return {"context": server(ports), "generation": server(ports)}


@pytest.fixture(scope="module")
def ranked(make_mesh: Callable[..., Mesh], settings: dict[str, dict[str, Any]]) -> Mesh:
    mesh = make_mesh(settings, coordinator={"lease_s": 6})
    until(lambda: sum(feed["connected"] for feed in mesh["indexer"].get("/workers")) == 2 * RANKS, "all are followed")
    return mesh


def prompt(number: int) -> list[int]:
    """Three full blocks and a few tokens; prompts of different numbers have no block in common."""
    return [(number * 101 + 7 * position) % 1000 + 5 for position in range(3 * BLOCK + 5)]


def complete(mesh: Mesh, ids: list[int], router: str = "router") -> dict[str, Any]:
    asked = {"model": DEFAULT_MODEL, "prompt": ids, "max_tokens": GENERATED, "temperature": 0, "ignore_eos": True}
    status, answer = mesh[router].post("/v1/completions", {**asked, "return_token_ids": True})
    assert status == 200, answer
    return answer


def held(mesh: Mesh, name: str) -> dict[int, int]:
    """Blocks of a server in the index, by rank."""
    return {source["dp_rank"]: source["num_blocks"] for source in mesh["indexer"].get(f"/dump?instance_id={name}")}


def per_rank(mesh: Mesh, name: str, key: str) -> list[int]:
    return [rank[key] for rank in mesh[name].settled_stats()["attention_dp_ranks"]]


def test_a_prompt_goes_to_the_rank_that_the_index_names(ranked: Mesh) -> None:
    members = {member["instance_id"]: member for member in ranked["coordinator"].get("/members")["members"]}
    assert {members[name]["dp_size"] for name in ("context", "generation")} == {RANKS}

    first = [complete(ranked, prompt(number)) for number in range(4)]
    for name in ("context", "generation"):
        # Every rank has two of the four prompts, and they were told of by it.
        assert per_rank(ranked, name, "events_blocks_stored_total") == [6, 6]
        until(lambda name=name: held(ranked, name) == {0: 6, 1: 6}, f"the index has what {name} holds")
    assert per_rank(ranked, "generation", "transfers_completed_total") == [2, 2]

    again = [complete(ranked, prompt(number)) for number in (3, 0, 2, 1)]
    wished: Counter[tuple[int, int]] = Counter()
    for number, answer in zip((3, 0, 2, 1), again, strict=True):
        assert answer["choices"][0]["token_ids"] == first[number]["choices"][0]["token_ids"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 3 * BLOCK
        [sequence] = ranked["router"].get(f"/explain/{answer['id']}")["sequences"]
        [attempt] = sequence["attempts"]
        wished[attempt["context_dp_rank"], attempt["generation_dp_rank"]] += 1
    assert sum(count for (context, _), count in wished.items() if context == 0) == 2
    assert per_rank(ranked, "context", "transfers_completed_total") == [4, 4]
    # The generation ranks had their blocks, too: all but the last, partial one.
    assert all(reused >= 6 for reused in per_rank(ranked, "generation", "transfer_pages_reused_total"))
    ranked.wait_idle()


def test_answers_are_those_of_one_engine(ranked: Mesh, golden: list[dict[str, Any]]) -> None:
    for item in golden:
        answer = complete(ranked, item["prompt_ids"])
        known = item["certain"][:GENERATED]
        assert answer["choices"][0]["token_ids"][: len(known)] == known
    ranked.wait_idle()


def test_generation_first_asks_the_rank_that_computes(ranked: Mesh, golden: list[dict[str, Any]]) -> None:
    """§5.3: with both legs at once, the context rank is ordered and the generation rank told."""
    early = ranked.launch(
        "router-early",
        "router",
        {
            "port": 0,
            "coordinator_url": ranked["coordinator"].url,
            "indexer_match_endpoint": f"ipc://{ranked.directory}/match",
            "schedule_style": "generation_first",
        },
    )
    early.wait_serving()
    until(lambda: request(f"{early.url}/ready")[0] == 200, "the router is ready")
    before = per_rank(ranked, "context", "transfers_completed_total")
    for item in golden:
        answer = complete(ranked, item["prompt_ids"], "router-early")
        known = item["certain"][:GENERATED]
        assert answer["choices"][0]["token_ids"][: len(known)] == known
        [sequence] = early.get(f"/explain/{answer['id']}")["sequences"]
        assert sequence["attempts"][0]["context_dp_rank"] in range(RANKS)
    after = per_rank(ranked, "context", "transfers_completed_total")
    assert sum(after) - sum(before) == len(golden)
    assert early.metrics()["kvmesh_router_sequences_generation_first_total"] == len(golden)
    ranked.wait_idle()


def test_operators_see_every_rank(ranked: Mesh) -> None:
    command = [sys.executable, "-m", "kvmesh.cli.main", "status", "--coordinator", ranked["coordinator"].url]
    shown = subprocess.run(command, env=ranked.env, capture_output=True, text=True, timeout=60, check=True).stdout
    for name in ("context/0", "context/1", "generation/0", "generation/1"):
        assert name in shown
    status = subprocess.run([*command, "--json"], env=ranked.env, capture_output=True, timeout=60, check=True).stdout
    assert sorted(json.loads(status)["caches"]) == ["context/0", "context/1", "generation/0", "generation/1"]
    samples = ranked["context"].metrics()
    for rank in range(RANKS):
        assert samples[f'kvmesh_engine_prompt_tokens_total{{dp_rank="{rank}"}}'] > 0
    sides = [side for transfer in ranked["coordinator"].get("/transfers")["transfers"] for side in transfer["sides"]]
    assert {side["instance_id"] for side in sides} == {"context/0", "context/1", "generation/0", "generation/1"}


@pytest.mark.parametrize("name", ["generation", pytest.param("context", marks=soak_only)])
def test_a_killed_rank_takes_its_server_along_and_the_next_life_is_whole(
    ranked: Mesh, settings: dict[str, dict[str, Any]], name: str
) -> None:
    engines = ranked[name].engines()
    assert len(engines) == RANKS
    engines[1].send_signal(signal.SIGKILL)
    assert ranked[name].popen.wait(30) == 1
    _, alive = psutil.wait_procs(engines, timeout=10)
    assert not alive
    until(lambda: held(ranked, name) == {}, "the index has forgotten both ranks")

    common = {"coordinator_url": ranked["coordinator"].url}
    ranked.launch_worker(name, {**common, **settings[name]}).wait_serving()
    ranked.wait_ready()
    until(lambda: held(ranked, name) == {0: 0, 1: 0}, "the index follows both ranks of the new life")
    for number in range(10, 14):
        complete(ranked, prompt(number))
    until(lambda: held(ranked, name) == {0: 6, 1: 6}, "both ranks serve")
    ranked.wait_idle()
