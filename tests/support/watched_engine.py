"""An engine whose cache is watched: what it did is counted, its events are checked, and so is what it leaves behind."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from event_checks import CheckedEvents

from kvmesh.cache.events import EventSink, StoredBlocks
from kvmesh.cache.storage.memory import HostPool
from kvmesh.config import WorkerSettings
from kvmesh.events.factory import EventOrigin
from kvmesh.events.source import EventSource
from kvmesh.net.clock import ManualClock
from kvmesh.protocol.engine import EngineStats

__all__ = ["WatchedEngine"]

STEP_S = 0.001
CHECKED_EVERY = 64
"""Steps between two integrity checks while requests run."""


class _WatchedEvents(CheckedEvents):
    """Counts what the checks of both event paths do not."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.priorities: Counter[int] = Counter()
        self.removed = self.changed_priorities = 0

    def on_stored(self, group: int, blocks: StoredBlocks) -> None:
        """See :class:`kvmesh.cache.events.EventSink`."""
        self.priorities.update(blocks.priorities.tolist())
        super().on_stored(group, blocks)

    def on_removed(self, group: int, keys: Sequence[bytes], level: int) -> None:
        """See :class:`kvmesh.cache.events.EventSink`."""
        self.removed += len(keys)
        super().on_removed(group, keys, level)

    def on_priority(self, group: int, keys: Sequence[bytes], old: int, new: int) -> None:
        """See :class:`kvmesh.cache.events.EventSink`."""
        self.changed_priorities += len(keys)
        super().on_priority(group, keys, old, new)


class _WatchedSource(EventSource):
    """Reads the events after every step, and after the last."""

    def __init__(self, checked: CheckedEvents) -> None:
        super().__init__("v2_sha256")
        self._checked = checked
        self._open = True

    @property
    def sink(self) -> EventSink:
        """See :class:`EventSource`."""
        return self._checked

    def flush(self) -> None:
        """See :class:`EventSource`."""
        self._checked.step()

    def shutdown(self) -> None:
        """See :class:`EventSource`."""
        if self._open:
            self._open = False
            self._checked.finish()


class WatchedEngine:
    """One engine of ``make_engine`` that is closed here.

    Args:
        make_engine: the fixture.
        monkeypatch: puts the checked events in place.
        disk: directory of the disk tier, which is empty before and after.
        options: of ``make_engine``.
    """

    def __init__(
        self, make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, disk: Path, **options: Any
    ) -> None:
        self._disk = disk
        self._host_pools = _host_pools()
        self._descriptors = _descriptors()
        self._clock = ManualClock(start_s=1000.0)
        made: list[_WatchedEvents] = []

        def source(_: WorkerSettings, origin: EventOrigin, *_rest: Any) -> EventSource:
            algo = "v2_sha256" if origin.manager_v2 else "v1_block_key"
            made.append(_WatchedEvents(origin.layout, algo=algo, manager_v2=origin.manager_v2))
            return _WatchedSource(made[0])

        with monkeypatch.context() as patched:
            patched.setattr("kvmesh.engine.build.create_event_source", source)
            self.bench = make_engine(clock=self._clock, **options)
        [self._events] = made
        self.manager = self.bench.engine.manager
        self._seen: Counter[str] = Counter()
        self._watch()
        self._steps = 0

    @property
    def answers(self) -> dict[str, Any]:
        """By request id."""
        answers: dict[str, Any] = self.bench.answers
        return answers

    @property
    def executor(self) -> Any:
        """The engine's."""
        return self.bench.executor

    def submit(self, request: Any) -> None:
        """Queue a request."""
        self.bench.submit(request)

    def step(self) -> None:
        """One iteration, one millisecond."""
        self._clock.advance(STEP_S)
        self.bench.step()
        self._steps += 1
        if self._steps % CHECKED_EVERY == 0:
            self.manager.check_integrity()

    def evidence(self) -> dict[str, int]:
        """What the cache has done, by the names of its counters and of :meth:`_watch`."""
        stats, engine = self.bench.cache, self.executor.counters
        counters = {name: getattr(stats.counters, name) for name in stats.counters.__slots__}
        tiers: Counter[str] = Counter()
        for flow in stats.flows:
            tier = self.manager.tiers[flow.level]
            tiers[f"to_{tier}"] += flow.offloaded
            tiers[f"from_{tier}"] += flow.onboarded
        return {
            **counters,
            **tiers,
            **self._seen,
            "gave_way_with_cache": engine.suspended,
            "went_on": engine.resumed,
            "recomputed": engine.recomputed,
            "lost": engine.lost,
            "starved": engine.starved,
            "endpoint_blocks": self._events.priorities[70],
            "changed_priorities": self._events.changed_priorities,
        }

    def statistics(self) -> EngineStats:
        """As the front gets them."""
        return self.bench.engine.reporter._statistics(self.bench.cache)

    def close(self) -> None:
        """Nothing is in use; after the end nothing is left: no page, no stored block, no file, no memory."""
        self.bench.check_idle()
        own = [pool for pool in _host_pools() if pool not in self._host_pools]
        assert bool(own) == (len(self.manager.tiers) > 1)
        self.bench.engine.close()
        assert all(pool._mapping.closed for pool in own)
        assert list(self._disk.iterdir()) == []
        assert _descriptors() == self._descriptors

    def _watch(self) -> None:
        seen, manager, executor = self._seen, self.manager, self.executor
        runner, pages = executor._runner, executor._pages
        find_scratch, chunk_end, prefetch = runner._scratch, pages.chunk_end, manager.prefetch

        def scratch(*args: Any) -> Any:
            found = find_scratch(*args)
            seen["scratch_blocks"] += sum(one.end - one.begin for rows in found.values() for _, one in rows)
            return found

        def forced_end(seq: Any, end: int) -> int:
            forced: int = chunk_end(seq, end)
            seen["forced_chunks"] += forced < end
            return forced

        def counted_prefetch(*args: Any, **options: Any) -> int:
            moved: int = prefetch(*args, **options)
            seen["prefetched"] += moved
            return moved

        runner._scratch, pages.chunk_end, manager.prefetch = scratch, forced_end, counted_prefetch
        if hasattr(manager, "end_turn"):
            end_turn = manager.end_turn

            def watched_end(*args: Any) -> None:
                before = self._events.removed
                end_turn(*args)
                seen["dropped_by_turns"] += self._events.removed - before

            manager.end_turn = watched_end


def _descriptors() -> list[str]:
    """Open files of this process that a cache may have: pools and page files."""
    names = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own
            names.append(str(descriptor.readlink()))
    return sorted(name for name in names if "kvmesh" in name)


def _host_pools() -> list[HostPool]:
    """Those that have memory."""
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) is HostPool and not thing._mapping.closed]
