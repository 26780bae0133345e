"""Who may be used and paired with whom."""

from __future__ import annotations

import pytest

from kvmesh.net.clock import ManualClock
from kvmesh.protocol.members import Load, Member, MemberEvent
from kvmesh.router.cluster import Cluster, pairable, preparation_problem
from kvmesh.router.loads import Loads


def member(name: str, role: str, **fields: object) -> Member:
    return Member(instance_id=name, role=role, url=f"http://{name}", **{"model": "m", **fields})


class Mesh:
    def __init__(self, **arguments: object) -> None:
        self.gone: list[str] = []
        self.problems: list[tuple[str, str]] = []
        self.loads = Loads()
        self.clock = ManualClock()
        self.cluster = Cluster(
            self.clock,
            self.loads,
            on_gone=self.gone.append,
            on_problem=lambda member, problem: self.problems.append((member.instance_id, problem)),
            **arguments,
        )

    def tell(self, kind: str, who: Member) -> None:
        self.cluster.apply(MemberEvent(revision=1, kind=kind, member=who))


@pytest.fixture
def mesh() -> Mesh:
    return Mesh()


def names(servers: list[object]) -> list[str]:
    return [server.member.instance_id for server in servers]


def test_ready_needs_a_fitting_pair_or_a_whole_server(mesh: Mesh) -> None:
    assert not mesh.cluster.ready()
    mesh.tell("joined", member("c", "context", compat_digest="x"))
    assert not mesh.cluster.ready()
    mesh.tell("joined", member("g", "generation", compat_digest="y"))
    assert not mesh.cluster.ready(), "their caches differ"
    mesh.tell("updated", member("g", "generation", compat_digest="x"))
    assert mesh.cluster.ready("m")
    assert not mesh.cluster.ready("other")
    mesh.tell("dead", member("g", "generation"))
    assert not mesh.cluster.ready()
    assert mesh.cluster.statistics()["ready"] == 0
    mesh.tell("joined", member("b", "both"))
    assert mesh.cluster.ready()
    assert mesh.cluster.statistics()["ready"] == 1
    assert mesh.gone == ["g"]


def test_a_mesh_can_ask_for_more_servers_before_it_is_ready() -> None:
    mesh = Mesh(min_context_servers=2)
    mesh.tell("joined", member("c1", "context"))
    mesh.tell("joined", member("g", "generation"))
    assert not mesh.cluster.ready()
    mesh.tell("joined", member("c2", "context"))
    assert mesh.cluster.ready()
    assert mesh.cluster.info()["minimal_instances"] == {"context_servers": 2, "generation_servers": 1}
    mesh.tell("left", member("c1", "context"))
    assert not mesh.cluster.ready()


def test_pairs() -> None:
    context = member("c", "context", compat_digest="x")
    assert pairable(context, member("g", "generation", compat_digest="x"))
    assert pairable(context, member("g", "generation")), "one that states no digest is taken at its word by the peer"
    assert not pairable(context, member("g", "generation", compat_digest="y"))
    assert not pairable(context, member("g", "generation", compat_digest="x", model="n"))
    assert not pairable(context, member("g", "generation", compat_digest="x", dialect="vllm"))


def test_select_gives_reasons(mesh: Mesh) -> None:
    for name in ("a", "b", "c"):
        mesh.tell("joined", member(name, "context"))
    mesh.tell("joined", member("other", "context", model="n"))
    mesh.tell("updated", member("b", "context", draining=True))
    mesh.cluster.get("c").breaker.unreachable()
    usable, unusable = mesh.cluster.select("context", "m")
    assert names(usable) == ["a"]
    assert dict(unusable) == {"b": "draining", "c": "not answering"}


def test_a_server_whose_engine_does_not_answer_is_not_used(mesh: Mesh) -> None:
    mesh.tell("joined", member("b", "both"))
    mesh.tell("updated", member("b", "both", load=Load(healthy=False)))
    assert mesh.cluster.select("both", "m") == ([], [("b", "engine not answering")])
    mesh.tell("updated", member("b", "both", load=Load()))
    assert names(mesh.cluster.select("both", "m")[0]) == ["b"]


def test_an_answer_counts_for_more_than_an_older_heartbeat(mesh: Mesh) -> None:
    mesh.tell("joined", member("b", "both"))
    mesh.cluster.get("b").breaker.succeeded()
    mesh.clock.advance(1)
    mesh.tell("updated", member("b", "both", load=Load(healthy=False)))
    assert mesh.cluster.get("b").unusable() == "engine not answering", "the heartbeat is newer"
    mesh.clock.advance(1)
    mesh.cluster.get("b").breaker.succeeded()
    assert mesh.cluster.get("b").unusable() is None
    mesh.clock.advance(1)
    mesh.tell("updated", member("b", "both", load=Load(healthy=False)))
    assert mesh.cluster.get("b").unusable() == "engine not answering"


def test_due_probes_follow_the_breakers(mesh: Mesh) -> None:
    mesh.tell("joined", member("a", "context"))
    mesh.cluster.get("a").breaker.unreachable()
    assert mesh.cluster.due_probes() == []
    mesh.clock.advance(1)
    assert names(mesh.cluster.due_probes()) == ["a"]


def test_a_new_life_starts_afresh(mesh: Mesh) -> None:
    mesh.tell("joined", member("a", "context", epoch=1))
    mesh.cluster.get("a").breaker.unreachable()
    mesh.tell("dead", member("a", "context", epoch=0))
    assert mesh.cluster.get("a") is not None, "an older life's death is no news"
    mesh.tell("joined", member("a", "context", epoch=2))
    assert mesh.cluster.get("a").unusable() is None
    assert mesh.gone == ["a"]
    assert mesh.cluster.statistics()["breaker_opened_total"] == 1


def test_an_update_keeps_health_and_hears_the_load(mesh: Mesh) -> None:
    mesh.tell("joined", member("a", "context"))
    mesh.cluster.get("a").breaker.unreachable()
    mesh.tell("updated", member("a", "context", load=Load(running=2)))
    assert mesh.cluster.get("a").unusable() == "not answering"
    assert mesh.loads.of("a").requests == 2


@pytest.mark.parametrize(
    ("fields", "tokens_per_block", "problem"),
    [
        ({}, None, None),
        ({"tokens_per_block": 32, "kv_cache_hash_algo": "v2_sha256"}, 32, None),
        ({"tokens_per_block": 64}, 32, None),
        ({"tokens_per_block": 16}, 32, None),
        ({"tokens_per_block": 48}, 32, "blocks of 48"),
        ({"kv_cache_hash_algo": "md5"}, None, "md5"),
        ({"dialect": "klingon"}, None, "klingon"),
    ],
)
def test_unprepared_servers(fields: dict[str, object], tokens_per_block: int | None, problem: str | None) -> None:
    found = preparation_problem(
        member("a", "context", **fields), dialects=("kvmesh",), tokens_per_block=tokens_per_block
    )
    assert (found is None) if problem is None else (found is not None and problem in found)


def test_an_unprepared_server_is_listed_but_never_used() -> None:
    mesh = Mesh()
    mesh.tell("joined", member("a", "both", kv_cache_hash_algo="md5"))
    assert not mesh.cluster.ready()
    assert mesh.problems == [("a", "hashes blocks by the unknown 'md5'")]
    [server] = mesh.cluster.info()["servers"]
    assert (server["usable"], server["reason"]) == (False, "hashes blocks by the unknown 'md5'")


def test_models_and_their_shortest_context(mesh: Mesh) -> None:
    mesh.tell("joined", member("a", "context", max_seq_len=100))
    mesh.tell("joined", member("b", "generation", max_seq_len=80))
    mesh.tell("joined", member("c", "generation"))
    mesh.tell("joined", member("d", "both", model="n"))
    mesh.tell("joined", member("r", "router"))
    assert mesh.cluster.models() == {"m": 80, "n": 0}


def test_info_has_tensorrt_llms_fields(mesh: Mesh) -> None:
    mesh.tell("joined", member("c", "context"))
    mesh.tell("joined", member("g", "generation"))
    info = mesh.cluster.info()
    assert info["is_ready"] is True
    assert info["current_workers"]["context_servers"] == ["http://c"]
    assert info["current_workers"]["generation_servers"] == ["http://g"]
    assert info["minimal_instances"] == {"context_servers": 1, "generation_servers": 1}
