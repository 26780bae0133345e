"""TensorRT-LLM's cluster storage: string keys with a time to live, and watches on key prefixes.

:class:`KeyValueStore` is what the coordinator needs of a store; :class:`MemoryStore` keeps it in this process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

import anyio

from kvmesh.net.clock import Clock

__all__ = ["KeyValueStore", "MemoryStore", "StoreFullError", "StoredItem", "Watch", "WatchEvent", "WatchEventType"]

NO_TTL = -1
"""A key that lives until it is deleted."""

MAX_KEYS = 100_000
"""Worker records are a few hundred bytes: about 50 MB."""

MAX_PENDING_EVENTS = 10_000
"""Events that a watch holds for a reader that does not read; the oldest are dropped first."""


class WatchEventType(IntEnum):
    """What happened to a key; the numbers are TensorRT-LLM's."""

    SET = 0
    DELETE = 1


class WatchEvent(NamedTuple):
    """One change under a watched prefix; a deletion carries the last value."""

    key: str
    value: str
    type: WatchEventType


class StoreFullError(RuntimeError):
    """The store holds as many keys as it may."""


class Watch:
    """Changes under one prefix, in order.

    Not guaranteed: that every event arrives. A reader that falls :data:`MAX_PENDING_EVENTS` behind loses the oldest
    (``lost`` counts them) and should read the prefix again.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.lost = 0
        self._events: deque[WatchEvent] = deque()
        self._arrived = anyio.Event()

    def push(self, event: WatchEvent) -> None:
        """Add an event and wake the reader."""
        if len(self._events) >= MAX_PENDING_EVENTS:
            self._events.popleft()
            self.lost += 1
        self._events.append(event)
        self._arrived.set()

    def drain_nowait(self) -> list[WatchEvent]:
        """Everything that is there, maybe nothing."""
        events = list(self._events)
        self._events.clear()
        self._arrived = anyio.Event()
        return events

    async def drain(self) -> list[WatchEvent]:
        """Everything that is there, waiting for at least one event."""
        while not self._events:
            await self._arrived.wait()
        return self.drain_nowait()


class KeyValueStore(Protocol):
    """Keys with a time to live. Methods are async because a store may be another process."""

    async def set(self, key: str, value: str, *, overwrite: bool = False, ttl_s: float = NO_TTL) -> bool:
        """Store a value. False, and no change, when the key exists and ``overwrite`` is not set.

        Raises:
            StoreFullError: no room for another key.
        """

    async def get(self, key: str) -> str | None:
        """The value, or None when the key is absent or expired."""

    async def expire(self, key: str, ttl_s: float) -> bool:
        """Let a key live for ``ttl_s`` from now. False when it is absent or expired."""

    async def delete(self, key: str) -> bool:
        """Remove a key. False when it is absent or expired."""

    async def get_prefix(self, prefix: str, *, keys_only: bool = False) -> dict[str, str]:
        """All live keys that begin with ``prefix``; values are empty with ``keys_only``."""

    async def sweep(self) -> int:
        """Remove expired keys and tell watchers; called about once a second. Gives their number."""


@dataclass(slots=True)
class _Item:
    value: str
    ttl_s: float | None
    expires_s: float | None


class StoredItem(NamedTuple):
    """A value and how long it lives after it was last set or renewed; None: until it is deleted."""

    value: str
    ttl_s: float | None


class MemoryStore:
    """A :class:`KeyValueStore` in this process's memory.

    Args:
        clock: times to live are measured on its monotonic time.
        max_keys: memory bound.
    """

    def __init__(self, clock: Clock, *, max_keys: int = MAX_KEYS) -> None:
        self.on_touched: Callable[[str], None] = _ignored
        """Hears of every key that has changed."""
        self._clock = clock
        self._max_keys = max_keys
        self._items: dict[str, _Item] = {}
        self._watches: list[Watch] = []
        self._held_s: float | None = None

    async def set(self, key: str, value: str, *, overwrite: bool = False, ttl_s: float = NO_TTL) -> bool:
        """See :meth:`KeyValueStore.set`."""
        existing = self._live(key)
        if existing is not None and not overwrite:
            return False
        if existing is None and len(self._items) >= self._max_keys:
            raise StoreFullError(f"the store holds {self._max_keys} keys already")
        self._put(key, value, ttl_s if ttl_s > 0 else None)
        return True

    async def get(self, key: str) -> str | None:
        """See :meth:`KeyValueStore.get`."""
        item = self._live(key)
        return None if item is None else item.value

    async def expire(self, key: str, ttl_s: float) -> bool:
        """See :meth:`KeyValueStore.expire`."""
        item = self._live(key)
        if item is None:
            return False
        item.ttl_s, item.expires_s = ttl_s, self._now_s + ttl_s
        self.on_touched(key)
        return True

    async def delete(self, key: str) -> bool:
        """See :meth:`KeyValueStore.delete`."""
        if self._live(key) is None:
            return False
        self._drop(key)
        return True

    async def get_prefix(self, prefix: str, *, keys_only: bool = False) -> dict[str, str]:
        """See :meth:`KeyValueStore.get_prefix`."""
        now = self._now_s
        return {
            key: "" if keys_only else item.value
            for key, item in self._items.items()
            if key.startswith(prefix) and not _expired(item, now)
        }

    async def sweep(self) -> int:
        """See :meth:`KeyValueStore.sweep`."""
        now = self._now_s
        expired = [key for key, item in self._items.items() if _expired(item, now)]
        for key in expired:
            self._drop(key)
        return len(expired)

    def replace(self, items: Mapping[str, StoredItem]) -> int:
        """Hold what an earlier coordinator has stored and nothing else; what is new has its whole time to live.

        Returns:
            How many keys are new, or another than before.
        """
        for key in [key for key in self._items if key not in items]:
            self._drop(key)
        news = {key: item for key, item in items.items() if self.item(key) != item}
        for key, item in news.items():
            self._put(key, item.value, item.ttl_s)
        return len(news)

    def hold(self) -> None:
        """Let no key expire until :meth:`go_on`: somebody else may be told that it is wanted."""
        if self._held_s is None:
            self._held_s = self._clock.monotonic_s()

    def go_on(self) -> None:
        """Let keys expire again; each has as long as it had when they were held."""
        if self._held_s is None:
            return
        held_for_s = self._clock.monotonic_s() - self._held_s
        self._held_s = None
        for item in self._items.values():
            if item.expires_s is not None:
                item.expires_s += held_for_s

    def item(self, key: str) -> StoredItem | None:
        """A key as it is kept here, expired or not."""
        item = self._items.get(key)
        return None if item is None else StoredItem(item.value, item.ttl_s)

    def stored_keys(self) -> list[str]:
        """Every key that is kept."""
        return list(self._items)

    def forget_all(self) -> None:
        """Begin anew: another coordinator has taken over. Watches hear of no deletion, for there was none."""
        self._items.clear()

    @contextmanager
    def watch(self, prefix: str) -> Iterator[Watch]:
        """Collect the changes under ``prefix`` for the length of a ``with`` block."""
        watch = Watch(prefix)
        self._watches.append(watch)
        try:
            yield watch
        finally:
            self._watches.remove(watch)

    def statistics(self) -> dict[str, float]:
        """Keys and watches now."""
        return {"keys": len(self._items), "watches": len(self._watches)}

    @property
    def _now_s(self) -> float:
        return self._clock.monotonic_s() if self._held_s is None else self._held_s

    def _live(self, key: str) -> _Item | None:
        item = self._items.get(key)
        if item is not None and _expired(item, self._now_s):
            self._drop(key)
            return None
        return item

    def _put(self, key: str, value: str, ttl_s: float | None) -> None:
        self._items[key] = _Item(value, ttl_s, None if ttl_s is None else self._now_s + ttl_s)
        self._notify(key, value, WatchEventType.SET)

    def _drop(self, key: str) -> None:
        self._notify(key, self._items.pop(key).value, WatchEventType.DELETE)

    def _notify(self, key: str, value: str, type: WatchEventType) -> None:
        self.on_touched(key)
        for watch in self._watches:
            if key.startswith(watch.prefix):
                watch.push(WatchEvent(key, value, type))


def _ignored(_key: str) -> None:
    """Nobody wants to know."""


def _expired(item: _Item, now_s: float) -> bool:
    return item.expires_s is not None and item.expires_s <= now_s
