"""Scenario T23: TensorRT-LLM's cluster storage."""

from __future__ import annotations

import anyio
import pytest

from kvmesh.coordinator import storage
from kvmesh.coordinator.storage import MemoryStore, StoredItem, StoreFullError, WatchEvent, WatchEventType
from kvmesh.net.clock import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> MemoryStore:
    return MemoryStore(clock, max_keys=4)


async def test_set_twice_without_overwrite_is_refused(store):
    assert await store.set("k", "1")
    assert not await store.set("k", "2")
    assert await store.get("k") == "1"
    assert await store.set("k", "2", overwrite=True)
    assert await store.get("k") == "2"


async def test_ttl_expires_with_a_delete_event(clock, store):
    with store.watch("/w/") as watch:
        await store.set("/w/1", "v", ttl_s=1)
        await store.set("/other", "v", ttl_s=1)
        clock.advance(0.5)
        assert await store.sweep() == 0
        clock.advance(0.5)
        assert await store.sweep() == 2
        assert watch.drain_nowait() == [
            WatchEvent("/w/1", "v", WatchEventType.SET),
            WatchEvent("/w/1", "v", WatchEventType.DELETE),
        ]
    assert await store.get("/w/1") is None


async def test_an_expired_key_is_gone_before_the_sweep(clock, store):
    await store.set("k", "1", ttl_s=1)
    clock.advance(1)
    with store.watch("") as watch:
        assert not await store.expire("k", 5)
        assert [event.type for event in watch.drain_nowait()] == [WatchEventType.DELETE]
        assert not await store.delete("k")
        assert await store.get_prefix("") == {}
        assert await store.set("k", "2"), "an expired key does not stand in the way"


async def test_refreshing_keeps_a_key(clock, store):
    await store.set("k", "1", ttl_s=1)
    for _ in range(3):
        clock.advance(0.9)
        assert await store.expire("k", 1)
    assert await store.get("k") == "1"
    await store.set("forever", "1")
    clock.advance(1e6)
    assert await store.get("forever") == "1"


async def test_overwriting_replaces_the_ttl(clock, store):
    await store.set("k", "1", ttl_s=1)
    await store.set("k", "2", overwrite=True)
    clock.advance(10)
    assert await store.get("k") == "2"


async def test_prefix(store):
    await store.set("/a/1", "x")
    await store.set("/a/2", "y")
    await store.set("/b/1", "z")
    assert await store.get_prefix("/a/") == {"/a/1": "x", "/a/2": "y"}
    assert await store.get_prefix("/a/", keys_only=True) == {"/a/1": "", "/a/2": ""}


async def test_a_watch_waits(store):
    with store.watch("k") as watch, anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            received: list[WatchEvent] = []

            async def read() -> None:
                received.extend(await watch.drain())

            tasks.start_soon(read)
            await anyio.wait_all_tasks_blocked()
            await store.set("k", "1")
            await store.delete("k")
        assert [event.type for event in received] == [WatchEventType.SET, WatchEventType.DELETE]
    assert store.statistics() == {"keys": 0, "watches": 0}


async def test_a_watch_that_is_not_read_is_bounded(store, monkeypatch):
    monkeypatch.setattr(storage, "MAX_PENDING_EVENTS", 3)
    with store.watch("") as watch:
        for value in "12345":
            await store.set("k", value, overwrite=True)
        assert [event.value for event in watch.drain_nowait()] == ["3", "4", "5"]
        assert watch.lost == 2


async def test_the_number_of_keys_is_bounded(store):
    for number in range(4):
        await store.set(str(number), "")
    with pytest.raises(StoreFullError):
        await store.set("4", "")
    assert await store.set("3", "", overwrite=True)


async def test_while_keys_are_held_none_expires_and_each_keeps_what_it_had_left(clock, store):
    await store.set("a", "1", ttl_s=10)
    clock.advance(6)
    store.hold()
    clock.advance(100)
    assert await store.sweep() == 0
    assert await store.get("a") == "1"
    store.go_on()
    clock.advance(3.9)
    assert await store.get("a") == "1"
    clock.advance(0.1)
    assert await store.get("a") is None


async def test_a_takeover_replaces_all_keys_and_tells_watchers_what_differs(store):
    for key in ("same", "other", "gone"):
        await store.set(key, "1")
    with store.watch("") as watch:
        new = {"same": StoredItem("1", None), "other": StoredItem("2", None), "new": StoredItem("3", None)}
        assert store.replace(new) == 2
        assert {(event.key, event.type.name) for event in watch.drain_nowait()} == {
            ("gone", "DELETE"),
            ("other", "SET"),
            ("new", "SET"),
        }
    assert await store.get_prefix("") == {"same": "1", "other": "2", "new": "3"}
