"""Writes what has changed of a state to etcd: in batches, only what differs, and only while this process leads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import anyio

from kvmesh.coordinator.etcd import EtcdClient, Guard
from kvmesh.telemetry import get_logger

__all__ = ["DeposedError", "Mirror"]

MAX_CHANGES = 100
"""Changes in one transaction; etcd allows 128 unless told otherwise."""
MAX_LOOKS = 500
"""Keys that are compared at a time: nobody is heard meanwhile."""
MAX_BYTES = 256 * 1024
"""Of one transaction, but for its last value; etcd allows 1.5 MiB."""
MAX_VALUE_BYTES = 384 * 1024

_log = get_logger("coordinator.mirror")


class DeposedError(Exception):
    """The guard does not hold any more: another coordinator leads."""


class Mirror:
    """The keys that etcd holds under a prefix, and those that have to be written.

    Memory is bounded by the state itself: one value for each key that is stored.

    Args:
        etcd: where to write.
        prefix: of every key.
        read: the value of a key now, None when it has none.
    """

    def __init__(self, etcd: EtcdClient, prefix: str, read: Callable[[str], bytes | None]) -> None:
        self._etcd = etcd
        self._prefix = prefix
        self._read = read
        self._stored: dict[str, bytes] = {}
        self._dirty: dict[str, int] = {}
        """Key -> number of the touch since which it has not been written, in this order."""
        self._touches = 0
        self._written_before = 1
        """Every touch with a lower number has been written."""
        self._in_flight = 0
        self._filled = anyio.Event()
        self._written = anyio.Event()
        self.writes_total = 0

    @property
    def pending(self) -> int:
        """Keys that may have to be written, those that are just being written included."""
        return len(self._dirty) + self._in_flight

    @property
    def stored(self) -> int:
        """Keys that etcd holds."""
        return len(self._stored)

    def touch(self, key: str) -> None:
        """The value of a key may have changed."""
        self._touches += 1
        self._dirty.setdefault(key, self._touches)
        self._filled.set()

    def begin(self, stored: Mapping[str, bytes], keys: Iterable[str]) -> None:
        """Start from what etcd holds: every difference is to be written.

        Args:
            stored: keys, without the prefix, and values in etcd.
            keys: all keys that have a value here.
        """
        self._stored = dict(stored)
        self._dirty = {}
        # Whoever waits for an earlier touch waits for all of them: it is not known which of them have been written.
        for key in (*self._stored, *keys):
            self._dirty[key] = self._written_before
        self._filled.set()

    async def flushed(self) -> None:
        """Wait until everything that was touched before has been written; the caller bounds the wait."""
        last = self._touches
        while self._written_before <= last:
            await self._written.wait()

    async def run(self, guard: Guard) -> None:
        """Write what is touched, for as long as the guard holds.

        Raises:
            DeposedError: the guard does not hold.
            EtcdError: no answer. What was under way is written again by the next run.
        """
        while True:
            await self._filled.wait()
            await self.write(guard)
            self._written_before = next(iter(self._dirty.values()), self._touches + 1)
            written, self._written = self._written, anyio.Event()
            written.set()
            if not self._dirty:
                self._filled = anyio.Event()

    async def write(self, guard: Guard) -> None:
        """Write one batch.

        Raises:
            DeposedError: the guard does not hold.
            EtcdError: no answer.
        """
        puts: dict[str, bytes] = {}
        deletes: list[str] = []
        nbytes = 0
        taken: list[str] = []
        for key in self._dirty:
            if len(puts) + len(deletes) >= MAX_CHANGES or nbytes >= MAX_BYTES or len(taken) >= MAX_LOOKS:
                break
            taken.append(key)
            value = self._read(key)
            if value is not None and len(value) > MAX_VALUE_BYTES:
                _log.warning("a value is too long for etcd; it is kept in memory only", key=key, bytes=len(value))
                value = None
            if value == self._stored.get(key):
                continue
            if value is None:
                deletes.append(key)
            else:
                puts[key] = value
                nbytes += len(value)
        for key in taken:
            del self._dirty[key]
        if not (puts or deletes):
            return
        self._in_flight = len(puts) + len(deletes)
        try:
            revision = await self._etcd.commit(
                guard,
                {self._prefix + key: value for key, value in puts.items()},
                [self._prefix + key for key in deletes],
            )
        except BaseException:
            # It may have been written or not: what etcd holds of these keys is not known until it is read again.
            for key in (*puts, *deletes):
                self.touch(key)
            raise
        finally:
            self._in_flight = 0
        if revision is None:
            raise DeposedError
        self._stored |= puts
        for key in deletes:
            del self._stored[key]
        self.writes_total += len(puts) + len(deletes)
