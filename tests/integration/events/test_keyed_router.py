"""A router with an index of its own follows a worker that tells keyed names, and matches prompts as ever."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import numpy as np
import pytest

from kvmesh.cache.events import StoredBlocks
from kvmesh.events.keyed import KeyRing, StreamKey
from kvmesh.events.publisher import ZmqPublisher
from kvmesh.events.sink import StreamSink
from kvmesh.hashing import ReuseScope, salt_id, v2_block_keys, v2_root
from kvmesh.net.clock import SystemClock
from kvmesh.protocol.members import Member, MemberEvent
from kvmesh.router.match_in_process import InProcessMatcher

SIZE = 4
KEY = StreamKey(bytes(range(32)))
PROMPT = np.arange(13, dtype=np.int32)


@pytest.mark.parametrize(("ring", "held"), [(KeyRing([KEY]), {"w": 12}), (None, {})], ids=["with key", "without"])
async def test_prompts_are_matched(ring: KeyRing | None, held: dict[str, int]) -> None:
    scope = ReuseScope(salt=salt_id("tenant"))
    sink = StreamSink(SIZE, key=KEY)
    keys = v2_block_keys(PROMPT, SIZE, v2_root(scope))
    sink.on_stored(0, StoredBlocks(scope, None, keys, PROMPT[:12].reshape(-1, SIZE), 0, np.zeros(3, np.uint8)))
    publisher = ZmqPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    publisher.start()
    publisher.publish(sink.take())
    matcher = InProcessMatcher(
        SystemClock(),
        max_memory_bytes=1 << 26,
        predicted_ttl_s=1.0,
        approximate_ttl_s=1.0,
        anti_entropy_interval_s=0.0,
        keys=ring,
    )
    member = Member(
        instance_id="w",
        role="context",
        url="http://127.0.0.1:1",
        model="m",
        epoch=1,
        events_endpoint=publisher.endpoint,
        replay_endpoint=publisher.replay_endpoint,
        tokens_per_block=SIZE,
        started_unix_ms=0,
        pid=1,
    )
    matcher.hear(MemberEvent(kind="joined", member=member, revision=1))
    try:
        async with anyio.create_task_group() as tasks:
            await tasks.start(matcher.run)
            await until(lambda: bool(matcher.statistics().get("index_feed_batches_total")))
            found = await matcher.match("m", PROMPT, cache_salt="tenant")
            assert {name: match.device_tokens for name, match in found.by_server.items()} == held
            assert (await matcher.match("m", PROMPT)).by_server == {}, "another salt"
            tasks.cancel_scope.cancel()
    finally:
        publisher.shutdown()


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(5):
        while not holds():  # noqa: ASYNC110 - what is waited for has no event
            await anyio.sleep(0.005)
