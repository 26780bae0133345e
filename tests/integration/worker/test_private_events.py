"""A real worker whose events are encrypted and keyed: no token leaves it, and whoever has both keys finds prompts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import zmq

from kvmesh.config.curve import CurveSettings
from kvmesh.events.digests import DigestAnswer, DigestKey, DigestPoller, digest_of
from kvmesh.events.index import PrefixIndex, Source
from kvmesh.events.keyed import KeyRing, generate_key
from kvmesh.events.keyed_lookup import KeyedLookup
from kvmesh.events.records import Removed, Stored, Tier
from kvmesh.events.subscriber import Batch, EventSubscriber
from kvmesh.net.curve import CurveSecurity, create_key_pair

pytestmark = pytest.mark.slow

BLOCK = 32
WORKER = Source("w")


def prompt(number: int) -> list[int]:
    return [2000 + number * 1000 + i for i in range(4 * BLOCK + 1)]


async def test_the_index_answers_and_agrees_with_the_workers_digests(
    settings_of: Callable[..., Any], serve: Callable[..., Any], tmp_path: Path
) -> None:
    _, secret = create_key_pair(tmp_path)
    key_file = tmp_path / "events.keys"
    key_file.write_text(generate_key())
    key_file.chmod(0o600)
    settings = settings_of("both", backend=None, events=True, max_tokens=640, host_cache_size=16 << 20)
    settings = settings.model_copy(
        update={
            "curve": CurveSettings(key_file=str(secret)),
            "events": settings.events.model_copy(update={"key_file": str(key_file)}),
        }
    )
    security, keys = CurveSecurity.load(settings.curve), KeyRing.load(key_file, "x")
    assert keys is not None
    index = PrefixIndex()
    held: dict[tuple[int, Tier], None] = {}
    batches: list[Batch] = []
    digests: list[DigestAnswer] = []

    def take(item: Any) -> None:
        if not isinstance(item, Batch):
            return
        batches.append(item)
        index.apply(WORKER, item.records.records)
        for record in item.records.records:
            if isinstance(record, Stored):
                held.update(dict.fromkeys((number, record.tier) for number in record.hashes))
            elif isinstance(record, Removed):
                for number in record.hashes:
                    del held[number, record.tier]

    async with serve(settings) as (worker,):
        info = await worker.get("/server_info")
        index.add(WORKER, model="m", single_group=info["events_single_group"])
        with zmq.Context() as context:
            subscriber = EventSubscriber(
                info["events_endpoint"], info["replay_endpoint"], context=context, security=security, keys=keys.part()
            )
            poller = DigestPoller(
                context, info["replay_endpoint"], digests.append, interval_s=0.05, answer_s=5.0, security=security
            )
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(subscriber.run, take)
                tasks.start_soon(poller.run)
                for number in range(8):  # more than fits the device: some move to the host
                    status, answer = await worker.complete(prompt(number), max_tokens=1)
                    assert status == 200, answer
                with anyio.fail_after(20):
                    # An answer leaves the worker a moment before its events do.
                    while not KeyedLookup(index, keys).match(np.array(prompt(7), np.int32), model="m"):  # noqa: ASYNC110
                        await anyio.sleep(0.02)
                    # At rest what the worker says it has told is what was heard, tier by tier.
                    while not digests or digests[-1] != (subscriber.applied, sums(held, keys)):  # noqa: ASYNC110
                        await anyio.sleep(0.02)
                [found] = KeyedLookup(index, keys).match(np.array(prompt(7), np.int32), model="m")
                assert found.device_tokens == 4 * BLOCK
                assert index.match(np.array(prompt(7), np.int32), model="m") == [], "tokens themselves are unknown"
                tasks.cancel_scope.cancel()
    assert {tier for _, tier in held} == {Tier.DEVICE, Tier.HOST}
    assert not any(batch.records.rejected for batch in batches)
    assert set(subscriber.dialects) == {"keyed", "map"}


def sums(held: dict[tuple[int, Tier], None], keys: KeyRing) -> dict[DigestKey, Any]:
    by_tier: dict[Tier, list[int]] = {}
    for number, tier in held:
        by_tier.setdefault(tier, []).append(number)
    return {DigestKey(tier, None, keys.first.salt): digest_of(numbers) for tier, numbers in by_tier.items()}
