"""A burst of prompts goes to one server before its first event, or even the first answer of the indexer, can tell."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvmesh.net.clock import ManualClock
from kvmesh.protocol.members import Member
from kvmesh.protocol.ranks import RankWish
from kvmesh.router.cluster import Cluster
from kvmesh.router.loads import Loads
from kvmesh.router.match import NoMatcher, Route
from kvmesh.router.plan import Avoid, Planner
from kvmesh.router.policy.kv_cache_aware import KvCacheAware
from kvmesh.router.recent import RecentRoutes
from kvmesh.router.work import Work

MakeWork = Callable[..., Work]
Join = Callable[..., None]

BLOCK = 16


class Told(NoMatcher):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.routes: list[Route] = []

    def routed(self, route: Route) -> None:
        self.routes.append(route)


def member(name: str, **fields: object) -> Member:
    return Member(
        instance_id=name, role="context", url="http://x", **{"model": "m", "tokens_per_block": BLOCK, **fields}
    )


def test_a_burst_goes_to_one_server(cluster: Cluster, join: Join, make_work: MakeWork) -> None:
    for name in ("c1", "c2", "c3"):
        join(name, "context", tokens_per_block=BLOCK)
    join("g1", "generation")
    plan = Planner(cluster, Loads(), context_policy=KvCacheAware(), generation_policy=KvCacheAware())
    told = Told()
    recent = RecentRoutes(told, ManualClock(), ttl_s=5.0)
    chosen = []
    works = [make_work() for _ in range(4)]  # all of them were matched before the first is placed
    for work in works:
        recent.look(work)
        server = plan.place(work, Avoid()).server.member
        recent.sent(work, server, RankWish())
        chosen.append(server.instance_id)
    assert len(set(chosen)) == 1
    assert [route.instance_id for route in told.routes] == chosen
    assert works[-1].matches.by_server[chosen[0]].device_tokens == 96


def test_what_is_found_and_what_is_predicted_is_what_is_more(make_work: MakeWork) -> None:
    recent = RecentRoutes(NoMatcher(), ManualClock(), ttl_s=5.0)
    recent.sent(make_work(prompt_tokens=48), member("a"), RankWish())
    work = make_work(matched={"a": 16, "b": 64})
    recent.look(work)
    assert {name: match.device_tokens for name, match in work.matches.by_server.items()} == {"a": 48, "b": 64}
    work = make_work(matched={"a": 80})
    recent.look(work)
    assert work.matches.by_server["a"].device_tokens == 80


def test_a_prediction_is_over_after_its_time(make_work: MakeWork) -> None:
    clock = ManualClock()
    recent = RecentRoutes(NoMatcher(), clock, ttl_s=5.0)
    recent.sent(make_work(), member("a"), RankWish())

    def predicted() -> int:
        work = make_work(matched={})
        recent.look(work)
        return len(work.matches.by_server)

    clock.advance(4.9)
    assert predicted() == 1
    clock.advance(0.2)
    assert predicted() == 0
    assert recent.statistics()["predicted_blocks"] == 0


def test_only_under_the_same_salt_and_while_the_server_lives(make_work: MakeWork) -> None:
    recent = RecentRoutes(NoMatcher(), ManualClock(), ttl_s=5.0)
    recent.sent(make_work(cache_salt="tenant"), member("a"), RankWish())
    for salt, expected in (("tenant", {"a"}), ("other", set()), (None, set())):
        work = make_work(matched={}, cache_salt=salt)
        recent.look(work)
        assert set(work.matches.by_server) == expected
    recent.forget("a")
    work = make_work(matched={}, cache_salt="tenant")
    recent.look(work)
    assert work.matches.by_server == {}


def test_what_nobody_can_know_is_not_predicted(make_work: MakeWork) -> None:
    told = Told()
    recent = RecentRoutes(told, ManualClock(), ttl_s=5.0)
    recent.sent(make_work(), member("a", tokens_per_block=0), RankWish())
    recent.sent(make_work(), member("b", dp_size=2), RankWish())
    assert told.routes == []
    recent.sent(make_work(), member("b", dp_size=2), RankWish(rank=1))
    assert [(route.dp_rank, route.block_size) for route in told.routes] == [(1, BLOCK)]
    never = RecentRoutes(told, ManualClock(), ttl_s=0.0)
    never.sent(make_work(), member("a"), RankWish())
    assert len(told.routes) == 1
    np.testing.assert_array_equal(told.routes[0].token_ids, np.arange(100))
