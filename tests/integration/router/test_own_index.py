"""A router with an index of its own follows the members' events itself and asks nobody."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import anyio
import numpy as np
import pytest
from tellers import BLOCK, Teller, tokens
from waiting import until

from kvmesh.config import RouterSettings
from kvmesh.config.errors import ConfigError
from kvmesh.net.clock import ManualClock
from kvmesh.protocol.members import Member, MemberEvent
from kvmesh.router.app import RouterService
from kvmesh.router.match import Route
from kvmesh.router.match_in_process import InProcessMatcher

TTL_S = 5.0
APPROXIMATE_TTL_S = 60.0


@pytest.fixture
def teller() -> Iterator[Teller]:
    teller = Teller()
    yield teller
    teller.close()


def joined(name: str, teller: Teller | None) -> MemberEvent:
    stream, replay = (None, None) if teller is None else teller.endpoints
    member = Member(
        instance_id=name,
        role="context",
        url="http://x",
        model="m",
        tokens_per_block=BLOCK,
        events_endpoint=stream,
        replay_endpoint=replay,
    )
    return MemberEvent(revision=1, kind="joined", member=member)


@asynccontextmanager
async def running(clock: ManualClock, *heard: MemberEvent) -> AsyncIterator[InProcessMatcher]:
    matcher = InProcessMatcher(
        clock,
        max_memory_bytes=1 << 24,
        predicted_ttl_s=TTL_S,
        approximate_ttl_s=APPROXIMATE_TTL_S,
        anti_entropy_interval_s=0,
    )
    for event in heard:
        matcher.hear(event)  # the membership may be known before the index runs
    async with anyio.create_task_group() as tasks:
        await tasks.start(matcher.run)
        yield matcher
        tasks.cancel_scope.cancel()


async def held(matcher: InProcessMatcher, *numbers: int) -> dict[str, int]:
    found = await matcher.match("m", np.array(tokens(*numbers), np.int32))
    assert found.state == "answered"
    return {name: match.device_tokens // BLOCK for name, match in found.by_server.items()}


def route(name: str, *numbers: int) -> Route:
    return Route(name, 0, "m", np.array(tokens(*numbers), np.int32), BLOCK)


async def test_it_follows_members(teller: Teller) -> None:
    teller.store(1, 2)
    async with running(ManualClock(), joined("w", teller)) as matcher:
        await until(lambda: matcher.statistics()["index_feed_batches_total"] == 1)
        await until(lambda: matcher.statistics()["index_feeds_connected"] == 1)
        assert await held(matcher, 1, 2, 3) == {"w": 2}
        gone = joined("w", teller)
        gone.kind = "dead"
        matcher.hear(gone)
        assert await held(matcher, 1, 2, 3) == {}


async def test_what_was_sent_counts_for_a_while(teller: Teller) -> None:
    """Until its events come, or for longer where there are none."""
    clock = ManualClock()
    async with running(clock, joined("w", teller), joined("silent", None)) as matcher:
        await until(lambda: matcher.statistics()["index_feeds_connected"] == 1)
        matcher.routed(route("w", 1, 2))
        matcher.routed(route("silent", 1, 2))
        matcher.routed(route("nobody", 1, 2))
        assert await held(matcher, 1, 2) == {"w": 2, "silent": 2}
        clock.advance(TTL_S + 0.1)
        assert await held(matcher, 1, 2) == {"silent": 2}
        clock.advance(APPROXIMATE_TTL_S)
        assert await held(matcher, 1, 2) == {}
        assert matcher.statistics()["index_predictions_refused_total"] == 1


def test_it_needs_a_membership() -> None:
    with pytest.raises(ConfigError, match="coordinator_url"):
        RouterService(RouterSettings(index={"kind": "in_process"}))
