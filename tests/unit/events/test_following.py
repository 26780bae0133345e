"""What goes wrong with one publisher is nobody else's: it is followed anew, and what it holds is not relied on."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest
import zmq
from waiting import until

from kvmesh.events.endpoints import EndpointError, check_endpoint
from kvmesh.events.feeds import Feed, Feeds, Gate
from kvmesh.events.feeds.feed import feeds_of
from kvmesh.events.index import PrefixIndex, Source
from kvmesh.events.items import Batch
from kvmesh.events.listener import StreamName
from kvmesh.events.records import RecordBatch, Stored
from kvmesh.events.subscriber import EventSubscriber
from kvmesh.net.clock import ManualClock
from kvmesh.protocol.match import MAX_DP_RANK
from kvmesh.protocol.members import Member

TOKENS = np.arange(8, dtype=np.int32)
GOOD = Stored(hashes=[1, 2], parent=None, token_ids=TOKENS, block_size=4)
BAD = Stored(hashes=[3, 4, 5], parent=2, token_ids=TOKENS, block_size=4)
"""Nothing that a decoder gives: one hash too many."""


def batch(sequence: int, *records: Stored) -> Batch:
    return Batch(
        sequence,
        "",
        RecordBatch(ts=0.0, rank=None, records=list(records), dialects={}, rejected={}, samples={}),
        replayed=False,
    )


def held(index: PrefixIndex) -> dict[str, int]:
    return {match.instance_id: match.device_tokens for match in index.match(TOKENS, model="m")}


@pytest.mark.parametrize("closed", [False, True], ids=["at once", "after a snapshot"])
async def test_a_batch_that_cannot_be_taken_in_costs_its_publishers_blocks(
    monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    items = [batch(0, GOOD), batch(1, BAD)]

    async def run(subscriber: EventSubscriber, deliver: Any) -> None:
        if subscriber.endpoint == "tcp://127.0.0.1:1":
            for item in items:
                deliver(item)
        else:
            deliver(items[0])
        await anyio.sleep_forever()

    monkeypatch.setattr(EventSubscriber, "run", run)
    index, gate = PrefixIndex(), Gate(ManualClock())
    with zmq.Context() as context:
        async with anyio.create_task_group() as tasks:
            feeds = Feeds(index, tasks, context, gate=gate)
            if closed:
                async with gate.closing():
                    follow_two(feeds)
                    await anyio.wait_all_tasks_blocked()
                    assert held(index) == {}
            else:
                follow_two(feeds)
            await until(lambda: feeds.statistics()["feed_failures_total"] == 1)
            assert held(index) == {"b": 8}
            feeds._running[Source("a")].following.watch.compared_total = 3  # type: ignore[union-attr]
            before = feeds.statistics()
            feeds.stop("a")
            after = feeds.statistics()
            for name in ("feed_failures_total", "drift_checks_total", "drift_total"):
                assert after[name] == before[name], "totals do not go back"
            tasks.cancel_scope.cancel()
    assert not gate.closed


def follow_two(feeds: Feeds) -> None:
    feeds.follow(Feed(Source("a"), "m", "tcp://127.0.0.1:1"))
    feeds.follow(Feed(Source("b"), "m", "tcp://127.0.0.1:2"))


async def test_a_subscription_that_fails_is_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    async def run(subscriber: EventSubscriber, deliver: Any) -> None:
        runs.append(subscriber)
        stream = subscriber._ordered
        stream.deliver = deliver
        await stream.opened(lambda: 0)
        if len(runs) == 1:
            deliver(batch(0, GOOD))
            assert held(index) == {"a": 8}
            raise ValueError("a defect")
        await anyio.sleep_forever()

    monkeypatch.setattr(EventSubscriber, "run", run)
    monkeypatch.setattr("kvmesh.events.feeds.following.FIRST_REST_S", 0.05)
    index = PrefixIndex()
    with zmq.Context() as context:
        async with anyio.create_task_group() as tasks:
            feeds = Feeds(index, tasks, context)
            feeds.follow(Feed(Source("a"), "m", "tcp://127.0.0.1:1"))
            await until(lambda: runs and not feeds.statistics()["feeds_connected"])
            assert held(index) == {}, "nobody hears what it removes"
            await until(lambda: len(runs) == 2 and bool(feeds.statistics()["feeds_connected"]))
            tasks.cancel_scope.cancel()


async def test_a_change_that_cannot_be_made_does_not_keep_those_behind_it() -> None:
    gate, made = Gate(ManualClock()), []

    def fail() -> None:
        raise ValueError("a defect")

    async with gate.closing():
        gate.wait(fail)
        gate.wait(lambda: made.append(1))
    assert made == [1]
    assert not gate.closed


async def test_publishers_that_come_by_themselves_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.events.feeds.feeds.MAX_ANNOUNCED", 2)
    with zmq.Context() as context:
        async with anyio.create_task_group() as tasks:
            feeds = Feeds(PrefixIndex(), tasks, context, listen_endpoint="tcp://127.0.0.1:*")
            admit = feeds._admit
            assert admit(StreamName("kv@w@m", MAX_DP_RANK + 1)) is None
            assert admit(StreamName("kv@w@m", 2**64 - 1)) is None
            admitted = [admit(StreamName(f"kv@w{number}@m", 0)) for number in range(3)]
            assert [each is None for each in admitted[-2:]] == [False, True]
            feeds.stop("w0")
            assert admit(StreamName("kv@x@m", 0)) is not None
            assert admit(StreamName("kv@x@m", 0)) is not None, "it is known"
            listener = feeds._listener
            assert listener is not None
            assert listener.streams is listener.streams, "every feed asks: a copy would cost the square of their number"
            tasks.cancel_scope.cancel()


@pytest.mark.parametrize(("ranks", "block_tokens"), [(2**62, 4), (1, 2**40)])
def test_a_member_that_cannot_be_is_refused(ranks: int, block_tokens: int) -> None:
    member = Member(
        instance_id="w",
        role="both",
        url="http://127.0.0.1:1",
        model="m",
        dp_size=ranks,
        tokens_per_block=block_tokens,
    )
    with pytest.raises(EndpointError, match="cannot be"):
        feeds_of(member)


@pytest.mark.parametrize(
    "endpoint",
    [
        *(
            "",
            "tcp://",
            "tcp://x",
            "tcp://:1",
            "tcp://h:0",
            "tcp://h:*",
            "tcp://*:5557",
            "tcp://127.0.0.1:99999",
            "tcp://h:" + "9" * 5000,
        ),
        *("tcp://a\0b:1", "tcp://a b:1", "tcp://é:1", "ipc://", "ipc://" + "x" * 300, "udp://h:1", "inproc://x"),
    ],
)
def test_endpoints_that_nobody_can_be_reached_at(endpoint: str) -> None:
    with pytest.raises(EndpointError):
        check_endpoint(endpoint)


@pytest.mark.parametrize("endpoint", ["tcp://worker-0.mesh:5557", "tcp://[::1]:65535", "ipc:///run/kv.sock"])
def test_endpoints_that_may_be(endpoint: str) -> None:
    assert check_endpoint(endpoint) == endpoint
