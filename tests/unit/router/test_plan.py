"""Which way a sequence goes, and over which servers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.match import WorkerMatch
from kvmesh.protocol.members import Member
from kvmesh.protocol.ranks import RankWish
from kvmesh.router.cluster import Cluster
from kvmesh.router.loads import Loads
from kvmesh.router.match import Matches
from kvmesh.router.plan import Avoid, Planner, needs_context
from kvmesh.router.policy.kv_cache_aware import KvCacheAware
from kvmesh.router.work import Work

MakeWork = Callable[..., Work]
Join = Callable[..., None]


def planner(cluster: Cluster, **arguments: object) -> Planner:
    return Planner(cluster, Loads(), context_policy=KvCacheAware(), generation_policy=KvCacheAware(), **arguments)


@pytest.mark.parametrize(
    ("total", "matched", "limit", "expected"),
    [(100, 80, 32, False), (100, 80, 10, True), (20, 0, 32, True), (20, 1, 19, False), (20, 1, 18, True)],
)
def test_rule_of_conditional_disaggregation(total: int, matched: int, limit: int, expected: bool) -> None:
    assert needs_context(total, matched, limit) is expected


def test_the_context_server_with_the_match(cluster: Cluster, join: Join, make_work: MakeWork) -> None:
    for name in ("c1", "c2"):
        join(name, "context")
    join("g1", "generation")
    placement = planner(cluster).place(make_work(matched={"c2": 96}), Avoid())
    assert (placement.mode, placement.decision.chosen) == ("disaggregated", "c2")


def test_a_context_server_without_a_partner_is_not_used(cluster: Cluster, join: Join, make_work: MakeWork) -> None:
    join("c1", "context", compat_digest="x")
    join("c2", "context", compat_digest="y")
    join("g1", "generation", compat_digest="x")
    plan = planner(cluster)
    placement = plan.place(make_work(matched={"c2": 96}), Avoid())
    assert placement.decision.chosen == "c1"
    assert {entry.instance_id: entry.excluded for entry in placement.decision.candidates if entry.excluded} == {
        "c2": "no generation server can read its pages now"
    }
    alone = plan.place(make_work(matched={"c2": 96}, max_tokens=1), Avoid())
    assert alone.decision.chosen == "c2", "one token needs no partner"


def test_generation_only_among_those_that_fit(cluster: Cluster, join: Join, make_work: MakeWork) -> None:
    join("c1", "context", compat_digest="x")
    join("g1", "generation", compat_digest="y")
    join("g2", "generation", compat_digest="x")
    work, plan = make_work(matched={"g1": 100}), planner(cluster)
    context = plan.place(work, Avoid()).server.member
    placement = plan.place_generation(work, context, Avoid())
    assert placement.decision.chosen == "g2"
    assert "cannot read" in str(placement.decision.candidates[-1].excluded)


def test_conditional_local_prefill(cluster: Cluster, join: Join, make_work: MakeWork) -> None:
    join("c1", "context")
    join("g1", "generation")
    join("g2", "generation")
    plan = planner(cluster, max_local_prefill_length=32)
    local = plan.place(make_work(matched={"g2": 80}), Avoid())
    assert (local.mode, local.decision.chosen) == ("local", "g2")
    assert plan.place(make_work(matched={"g2": 60}), Avoid()).mode == "disaggregated"
    assert plan.place(make_work(prompt_tokens=20), Avoid()).mode == "disaggregated"
    assert planner(cluster).place(make_work(matched={"g2": 100}), Avoid()).mode == "disaggregated"


def test_whole_servers_compete_with_context_servers(cluster: Cluster, join: Join, make_work: MakeWork) -> None:
    join("c1", "context")
    join("g1", "generation")
    join("b1", "both")
    plan = planner(cluster)
    assert plan.place(make_work(matched={"b1": 96}), Avoid()).mode == "aggregated"
    assert plan.place(make_work(matched={"c1": 96}), Avoid()).mode == "disaggregated"


def test_servers_that_failed_are_a_last_resort_and_dead_ones_none(
    cluster: Cluster, join: Join, make_work: MakeWork
) -> None:
    join("b1", "both")
    join("b2", "both")
    plan, avoid = planner(cluster), Avoid()
    work = make_work(matched={"b1": 96})
    avoid.failed.add("b1")
    assert plan.place(work, avoid).decision.chosen == "b2"
    avoid.failed.add("b2")
    assert plan.place(work, avoid).decision.chosen == "b1", "all have failed: ask again"
    avoid.down.add("b1")
    assert plan.place(work, avoid).decision.chosen == "b2"
    avoid.down.add("b2")
    with pytest.raises(ApiError, match="failed this request") as caught:
        plan.place(work, avoid)
    assert (caught.value.status, caught.value.code) == (503, "no_server_available")


def test_nobody_there(cluster: Cluster, make_work: MakeWork) -> None:
    with pytest.raises(ApiError, match="none has joined") as caught:
        planner(cluster).place(make_work(), Avoid())
    assert caught.value.retry_after_s == 1


def test_a_sibling_follows_where_its_prompt_was_computed(cluster: Cluster, join: Join, make_work: MakeWork) -> None:
    for name in ("c1", "c2"):
        join(name, "context")
    join("g1", "generation")
    work = make_work(matched={"c1": 96})
    work.prefer_context = "c2"
    decision = planner(cluster).place(work, Avoid()).decision
    assert (decision.policy, decision.chosen) == ("sibling", "c2")
    work.prefer_context = "gone"
    assert planner(cluster).place(work, Avoid()).decision.chosen == "c1"


def test_another_block_size_than_configured_gets_no_credit(cluster: Cluster, join: Join, make_work: MakeWork) -> None:
    join("b1", "both", tokens_per_block=64)
    join("b2", "both", tokens_per_block=32)
    work = make_work(matched={"b1": 96, "b2": 32})
    assert planner(cluster).place(work, Avoid()).decision.chosen == "b1"
    assert planner(cluster, tokens_per_block=32).place(work, Avoid()).decision.chosen == "b2"


def test_a_rank_is_wished_for_where_there_are_several(cluster: Cluster, join: Join, make_work: MakeWork) -> None:
    for name, size in (("one", 1), ("two", 2), ("unknown", 2)):
        join(name, "context", dp_size=size, tokens_per_block=32)
    work = make_work(matched={})
    found = {
        name: WorkerMatch(instance_id=name, dp_rank=1, device_tokens=32, host_tokens=64, disk_tokens=64)
        for name in ("one", "two")
    }
    work.matches = Matches("answered", found)
    wishes = {server: planner(cluster).rank_wish(work, member(cluster, server)) for server in ("one", "two", "unknown")}
    assert wishes == {"one": RankWish(), "two": RankWish(1, 64), "unknown": RankWish()}
    other_blocks = planner(cluster, tokens_per_block=64)
    assert other_blocks.rank_wish(work, member(cluster, "two")) == RankWish()


def member(cluster: Cluster, name: str) -> Member:
    server = cluster.get(name)
    assert server is not None
    return server.member
