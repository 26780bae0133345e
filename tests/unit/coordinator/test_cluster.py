from __future__ import annotations

import pytest

from kvmesh.coordinator.cluster import MinimalInstances, cluster_info
from kvmesh.protocol.members import Member


def member(role: str, number: int = 0, **fields: object) -> Member:
    return Member(instance_id=f"{role}-{number}", role=role, url=f"http://127.0.0.1:81{number:02d}", **fields)


@pytest.mark.parametrize(
    ("roles", "ready"),
    [
        (["context", "generation"], True),
        (["context"], False),
        (["generation", "router", "indexer"], False),
        (["both"], True),
        ([], False),
    ],
)
def test_one_server_of_each_role_makes_ready(roles, ready):
    assert cluster_info([member(role) for role in roles], {}).is_ready is ready


def test_readiness_flips_on_removal():
    members = [member("context"), member("generation")]
    assert cluster_info(members, {}).is_ready
    assert not cluster_info(members[:1], {}).is_ready


def test_draining_members_do_not_count():
    assert not cluster_info([member("context"), member("generation", draining=True)], {}).is_ready


def test_minimal_instances():
    minimal = MinimalInstances(context_servers=2)
    members = [member("context"), member("generation")]
    assert not cluster_info(members, {}, minimal).is_ready
    assert cluster_info([*members, member("context", 1)], {}, minimal).is_ready


def test_tensorrt_llm_workers_count_and_rubbish_does_not():
    records = {
        "/trtllm-disagg/c/workers/a": '{"worker_id": "a", "host": "10.0.0.1", "port": 8001, "role": 0}',
        "/trtllm-disagg/c/workers/b": '{"worker_id": "b", "host": "10.0.0.2", "port": 8002, "role": "generation"}',
        "/trtllm-disagg/c/workers/c": '{"worker_id": "c", "host": "10.0.0.2", "port": 8002, "role": 7}',
        "/trtllm-disagg/c/workers/d": "{",
        "/trtllm-disagg/c/workers/e": "[]",
    }
    info = cluster_info([], records)
    assert info.is_ready
    assert [w.host for w in info.current_workers["context_servers"]] == ["10.0.0.1"]
    assert [w.port for w in info.current_workers["generation_servers"]] == [8002]
