"""Breakers and loads: what failures mean, and counts that always come back to zero."""

from __future__ import annotations

import pytest

from kvmesh.net.clock import ManualClock
from kvmesh.protocol.members import Load
from kvmesh.router.breaker import FAILURES_TO_OPEN, FIRST_WAIT_S, MAX_WAIT_S, Breaker
from kvmesh.router.loads import Loads, ServerLoad


def test_some_failures_open_it_and_a_good_probe_closes_it() -> None:
    clock = ManualClock()
    breaker = Breaker(clock)
    for _ in range(FAILURES_TO_OPEN - 1):
        breaker.failed()
    breaker.succeeded()
    for _ in range(FAILURES_TO_OPEN - 1):
        breaker.failed()
    assert breaker.closed, "only consecutive failures count"
    breaker.failed()
    assert breaker.retry_at_s == FIRST_WAIT_S
    breaker.succeeded()
    assert breaker.closed
    assert breaker.opened_total == 1


def test_unreachable_opens_it_at_once_and_probes_come_rarer() -> None:
    clock = ManualClock()
    breaker = Breaker(clock)
    breaker.unreachable()
    waits = []
    for _ in range(10):
        breaker.probe_failed()
        assert breaker.retry_at_s is not None
        waits.append(breaker.retry_at_s - clock.monotonic_s())
    assert waits[0] == 2 * FIRST_WAIT_S
    assert waits == sorted(waits)
    assert waits[-1] == MAX_WAIT_S
    breaker.succeeded()
    breaker.unreachable()
    assert breaker.retry_at_s == FIRST_WAIT_S


def test_loads_are_released_however_a_request_ends() -> None:
    loads = Loads()

    def fail() -> None:
        with loads.track("a", 50):
            assert loads.of("a") == ServerLoad(2, 150)
            raise RuntimeError

    with loads.track("a", 100):
        with pytest.raises(RuntimeError):
            fail()
        assert loads.of("a") == ServerLoad(1, 100)
    assert loads.of("a") == ServerLoad(0, 0)


def test_heartbeats_tell_what_other_routers_send() -> None:
    loads = Loads()
    with loads.track("a", 10):
        loads.heard("a", Load(running=2, waiting=1))
        assert loads.of("a").requests == 3
    assert loads.of("a").requests == 2
    loads.heard("a", Load())
    assert loads.of("a").requests == 0


def test_a_server_that_leaves_while_it_is_used() -> None:
    loads = Loads()
    with loads.track("a", 10):
        loads.forget("a")
        assert loads.of("a").requests == 1
    assert loads.of("a") == ServerLoad(0, 0)
