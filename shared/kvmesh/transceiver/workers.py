"""Threads that do the slow work of a peer (attaching memory, moving bytes, checksums): one for each peer.

A peer that has stopped, or whose network is cut, can then hold up nobody but itself.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Final

__all__ = ["PeerWorkers", "WorkerBusyError"]

MAX_QUEUED_JOBS: Final = 1024
"""Above the number of requests an engine admits; reaching it means that a peer has stopped."""

Job = Callable[[], None]


class WorkerBusyError(Exception):
    """A peer has too many jobs waiting."""


class _Worker:
    def __init__(self, name: str, after: _Worker | None = None) -> None:
        self._after = after
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.error: BaseException | None = None
        self._thread.start()

    def submit(self, job: Job) -> None:
        if self._jobs.qsize() >= MAX_QUEUED_JOBS:
            raise WorkerBusyError(f"{self._thread.name}: {MAX_QUEUED_JOBS} jobs wait already")
        self._jobs.put(job)

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._thread.is_alive()

    def end(self, last_job: Job | None = None) -> None:
        if last_job is not None:
            self._jobs.put(last_job)
        self._jobs.put(None)

    def join(self, timeout_s: float | None) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._after is not None:
            self._after.join(None)
            self._after = None
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:
                self.error = error
                raise


class PeerWorkers:
    """Workers by name, started on first use. Jobs of one name run in order; jobs of different names do not wait."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._lock = threading.Lock()
        self._workers: dict[str, _Worker] = {}
        self._retired: dict[str, _Worker] = {}
        """Those that have not ended yet, the latest of each name."""
        self._closed = False

    def submit(self, name: str, job: Job) -> None:
        """Run ``job`` on the worker ``name``.

        Raises:
            WorkerBusyError: that worker has :data:`MAX_QUEUED_JOBS` waiting, or everything is closed.
        """
        with self._lock:
            if self._closed:
                raise WorkerBusyError(f"{self._owner} is shutting down")
            worker = self._workers.get(name)
            if worker is None:
                worker = self._workers[name] = _Worker(f"{self._owner}-{name}"[:48], self._retired.get(name))
            worker.submit(job)

    def retire(self, name: str, last_job: Job | None = None) -> None:
        """End the worker ``name`` after what it has queued and ``last_job``.

        It starts anew when it is used again, but not before that: a last job that lets go of a peer's memory must not
        come after a job that reaches it again.
        """
        with self._lock:
            worker = self._workers.pop(name, None)
            if worker is None and name in self._retired and last_job is not None and not self._closed:
                worker = _Worker(f"{self._owner}-{name}"[:48], self._retired[name])
            if worker is not None:
                self._retired = {one: of for one, of in self._retired.items() if of.is_alive}
                self._retired[name] = worker
                worker.end(last_job)
                return
        if last_job is not None:
            last_job()

    @property
    def error(self) -> BaseException | None:
        """The defect that ended a worker, if one did."""
        with self._lock:
            return next((worker.error for worker in self._workers.values() if worker.error), None)

    def close(self, timeout_s: float) -> None:
        """End every worker, waiting ``timeout_s`` at most for each; one that is stuck in a library is left behind."""
        with self._lock:
            self._closed = True
            workers = list(self._workers.values())
            self._workers.clear()
        for worker in workers:
            worker.end()
        for worker in workers:
            worker.join(timeout_s)
