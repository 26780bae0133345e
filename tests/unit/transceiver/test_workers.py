from __future__ import annotations

import threading

import pytest

from kvmesh.transceiver.workers import MAX_QUEUED_JOBS, PeerWorkers, WorkerBusyError


def test_jobs_of_one_peer_run_in_order_and_others_do_not_wait() -> None:
    workers = PeerWorkers("test")
    held, order, other = threading.Event(), [], threading.Event()
    workers.submit("a", lambda: (held.wait(10), order.append(1)))  # type: ignore[func-returns-value, arg-type]
    workers.submit("a", lambda: order.append(2))
    workers.submit("b", other.set)
    assert other.wait(10)
    assert order == []
    held.set()
    workers.close(10)
    assert order == [1, 2]


def test_a_retired_worker_does_its_last_job_last() -> None:
    workers = PeerWorkers("test")
    order: list[str] = []
    done = threading.Event()
    workers.submit("a", lambda: order.append("job"))
    workers.retire("a", lambda: (order.append("last"), done.set()))  # type: ignore[func-returns-value, arg-type]
    assert done.wait(10)
    assert order == ["job", "last"]
    workers.retire("never started", lambda: order.append("here"))
    assert order[-1] == "here"
    workers.close(10)


def test_a_stuck_peer_has_a_bounded_queue() -> None:
    workers = PeerWorkers("test")
    held, started = threading.Event(), threading.Event()
    workers.submit("a", lambda: (started.set(), held.wait(10)))  # type: ignore[func-returns-value, arg-type]
    assert started.wait(10)
    for _ in range(MAX_QUEUED_JOBS):
        workers.submit("a", lambda: None)
    with pytest.raises(WorkerBusyError, match="1024 jobs wait"):
        workers.submit("a", lambda: None)
    held.set()
    workers.close(10)
    with pytest.raises(WorkerBusyError, match="shutting down"):
        workers.submit("a", lambda: None)


def test_a_worker_that_starts_anew_waits_for_the_one_that_was_retired() -> None:
    """Else the last job of a link, which lets go of its peer's memory, would undo the attaching of the next link."""
    workers = PeerWorkers("test")
    held, attached, done = threading.Event(), [], threading.Event()
    workers.submit("a", lambda: (held.wait(10), attached.append("old")))  # type: ignore[func-returns-value, arg-type]
    workers.retire("a", lambda: attached.append("detached"))
    workers.submit("a", lambda: attached.append("new"))
    workers.retire("a", lambda: attached.append("detached"))
    workers.retire("a", lambda: attached.append("detached"))
    workers.submit("a", lambda: (attached.append("newest"), done.set()))  # type: ignore[func-returns-value, arg-type]
    assert attached == []
    held.set()
    assert done.wait(10)
    assert attached == ["old", "detached", "new", "detached", "detached", "newest"]
    workers.close(10)
