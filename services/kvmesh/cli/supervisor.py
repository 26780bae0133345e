"""Keeps the processes of a mesh running: starts, restarts with back-off, stops in order, leaves nothing.

Each child leads a session of its own, so that Ctrl-C in the terminal reaches the supervisor alone and so that whatever
a child leaves behind can be ended by its process group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import anyio
from anyio.abc import Process, TaskGroup

from kvmesh.cli.rundir import ProcessState, start_ticks
from kvmesh.net.clock import Clock, SystemClock

__all__ = ["RELEASE_S", "USER_ERROR", "Child", "ChildEvent", "StartFailedError", "Supervisor"]

STABLE_S = 30.0
"""A child that lived this long starts the back-off anew when it dies."""

START_ATTEMPTS = 3
"""Before the mesh is ready, a child that dies this often will not come up by itself."""

USER_ERROR = 2
"""A child's exit status for a mistake in its settings: trying again is useless."""

KILL_AFTER_S = 5.0
"""On top of the drain time: a child that has not ended by then is killed."""


RELEASE_S = 5.0
"""Longest wait for what a killed child has left behind to let go of what the next life needs."""

RELEASE_POLL_S = 0.05


class Child(NamedTuple):
    """What to run."""

    name: str
    argv: Sequence[str]
    log: Path
    stop_rank: int = 0
    """Lower ranks stop first."""
    renew: Callable[[], bool] | None = None
    """Called before it is started again: whether its settings have changed, so that it may start now."""
    released: Callable[[], bool] | None = None
    """Whether what it needs from the machine is free; waited for, up to :data:`RELEASE_S`, before ``renew``."""


class ChildEvent(NamedTuple):
    """Something that happened to a child."""

    name: str
    kind: str
    """``started`` or ``died``."""
    pid: int
    status: int = 0
    """``died``: exit status, negative for a signal."""
    restart_in_s: float = 0.0

    @property
    def cause(self) -> str:
        """How it ended, readable."""
        return signal.Signals(-self.status).name if self.status < 0 else f"exit status {self.status}"


class StartFailedError(RuntimeError):
    """A child does not come up; ``name`` says which, ``status`` how it ended and ``log`` why."""

    def __init__(self, name: str, status: int, log: Path) -> None:
        super().__init__(f"{name} does not start ({ChildEvent(name, 'died', 0, status).cause})")
        self.name = name
        self.status = status
        self.log = log


class Supervisor:
    """Runs children until :meth:`stop`.

    Args:
        children: in the order in which they start.
        env: their environment.
        on_event: hears of starts and deaths.
        backoff_s: first wait before a restart; doubled up to ``backoff_max_s`` while a child keeps dying young.
        backoff_max_s: longest wait.
        drain_s: what children get to end by themselves.
        clock: for the waits between restarts.
    """

    def __init__(
        self,
        children: Sequence[Child],
        *,
        env: Mapping[str, str],
        on_event: Callable[[ChildEvent], None],
        backoff_s: float = 0.5,
        backoff_max_s: float = 15.0,
        drain_s: float = 10.0,
        clock: Clock | None = None,
    ) -> None:
        self._children = children
        self._env = env
        self._on_event = on_event
        self._backoff_s = backoff_s
        self._backoff_max_s = backoff_max_s
        self._drain_s = drain_s
        self._clock = clock or SystemClock()
        self._running: dict[str, Process] = {}
        self._restarts: dict[str, int] = dict.fromkeys((child.name for child in children), 0)
        self._stopping = anyio.Event()
        self._ready = False

    def start(self, tasks: TaskGroup) -> None:
        """Start all children and keep them running; a :class:`StartFailedError` ends ``tasks``."""
        for child in self._children:
            tasks.start_soon(self._keep, child)

    def mark_ready(self) -> None:
        """The mesh has come up: from now on a child that dies is restarted however often that takes."""
        self._ready = True

    def processes(self) -> list[ProcessState]:
        """The children that run now."""
        return [
            ProcessState(
                name=name, pid=process.pid, start_ticks=start_ticks(process.pid), restarts=self._restarts[name]
            )
            for name, process in self._running.items()
        ]

    async def stop(self) -> None:
        """End all children, rank by rank. Whatever does not end in time is killed with all its descendants."""
        self._stopping.set()
        for rank in sorted({child.stop_rank for child in self._children}):
            async with anyio.create_task_group() as tasks:
                for child in self._children:
                    if child.stop_rank == rank and (process := self._running.get(child.name)) is not None:
                        tasks.start_soon(self._end, process)

    def kill(self) -> None:
        """End everything at once, without a word."""
        self._stopping.set()
        for process in self._running.values():
            _kill_group(process.pid)

    async def _end(self, process: Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with anyio.move_on_after(self._drain_s + KILL_AFTER_S):
            await process.wait()
        _kill_group(process.pid)
        await process.wait()

    async def _keep(self, child: Child) -> None:
        # Only stop() ends this: were it cancelled along with everything else, its child would be killed undrained.
        with anyio.CancelScope(shield=True):
            await self._keep_running(child)

    async def _keep_running(self, child: Child) -> None:
        backoff_s = self._backoff_s
        deaths = 0
        while not self._stopping.is_set():
            started_s = self._clock.monotonic_s()
            status = await self._run(child)
            if self._stopping.is_set():
                return
            deaths += 1
            refused = status == USER_ERROR
            # It said so itself, after ending what it had started: nothing of its own is waited for.
            renewed = refused and child.renew is not None and child.renew()
            if not self._ready and ((refused and not renewed) or deaths >= START_ATTEMPTS):
                raise StartFailedError(child.name, status, child.log)
            if self._clock.monotonic_s() - started_s >= STABLE_S:
                backoff_s = self._backoff_s
            self._on_event(ChildEvent(child.name, "died", 0, status, backoff_s))
            await self._pause(backoff_s)
            if not refused:
                await self._released(child)
                if child.renew is not None and not self._stopping.is_set():
                    child.renew()
            backoff_s = min(backoff_s * 2, self._backoff_max_s)
            # Refused and now with other settings it is another start, not one more of what failed.
            self._restarts[child.name] += not renewed

    async def _released(self, child: Child) -> None:
        """Give what a killed child has left behind the time to end."""
        if child.released is None:
            return
        end_s = self._clock.monotonic_s() + RELEASE_S
        while not child.released() and self._clock.monotonic_s() < end_s and not self._stopping.is_set():
            await self._pause(RELEASE_POLL_S)

    async def _pause(self, seconds: float) -> None:
        """Sleep, but no longer than until the end."""

        async def end() -> None:
            await self._stopping.wait()
            racers.cancel_scope.cancel()

        async with anyio.create_task_group() as racers:
            racers.start_soon(end)
            await self._clock.sleep(seconds)
            racers.cancel_scope.cancel()

    async def _run(self, child: Child) -> int:
        """One life of a child; its exit status."""
        with child.log.open("ab") as log:
            process = await anyio.open_process(
                list(child.argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                start_new_session=True,
            )
        self._running[child.name] = process
        try:
            self._on_event(ChildEvent(child.name, "started", process.pid))
            return await process.wait()
        finally:
            # Its own children must not outlive it: they hold ports, memory and files that the next life needs.
            _kill_group(process.pid)
            with anyio.CancelScope(shield=True):
                await process.wait()
            del self._running[child.name]


def _kill_group(leader_pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader_pid, signal.SIGKILL)
