"""What a server says of its ranks."""

from __future__ import annotations

from typing import Any

import pytest

from kvmesh.config import WorkerSettings
from kvmesh.protocol.engine import EngineReady
from kvmesh.telemetry.metrics import Metrics
from kvmesh.worker.engine_metrics import expose_world_size
from kvmesh.worker.facts import member_of, server_info

READY = EngineReady(
    num_pages=1,
    page_bytes=64,
    tokens_per_block=4,
    max_batch_size=2,
    max_num_tokens=8,
    max_seq_len=16,
    kv_cache_hash_algo="v2_sha256",
    layout_digest="d",
    device="cpu",
    pid=1,
)


@pytest.mark.parametrize(
    ("sizes", "engines", "said"),
    [
        ({}, 1, (1, 1, 1, 1)),
        ({"tensor_parallel_size": 3, "pipeline_parallel_size": 2}, 1, (6, 1, 3, 2)),
        ({"tensor_parallel_size": 2, "enable_attention_dp": True}, 2, (2, 2, 1, 1)),
    ],
    ids=["alone", "tp3-pp2", "attention-dp"],
)
def test_ranks(sizes: dict[str, Any], engines: int, said: tuple[int, int, int, int]) -> None:
    world_size, dp_size, tp_size, pp_size = said
    settings = WorkerSettings(instance_id="w", **sizes)
    info = server_info(settings, "m", [READY] * engines, epoch=1)
    assert (info["world_size"], info["dp_size"]) == (world_size, dp_size)
    assert info["tensor_parallel_size"] == settings.tensor_parallel_size
    assert info["pipeline_parallel_size"] == pp_size
    member = member_of(settings, "m", [READY] * engines, epoch=1, url="http://w")
    assert (member.dp_size, member.tp_size, member.pp_size) == (dp_size, tp_size, pp_size)
    assert settings.ranks_per_engine == tp_size * pp_size
    metrics = Metrics()
    expose_world_size(metrics, settings.world_size)
    assert f"kvmesh_world_size {world_size}.0" in metrics.render().decode()
