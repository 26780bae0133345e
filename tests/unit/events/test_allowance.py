"""A share of a processor in the long run, and more at once."""

from __future__ import annotations

import pytest

from kvmesh.events.allowance import Allowance
from kvmesh.net.clock import ManualClock


def test_work_has_its_share_and_no_more() -> None:
    clock = ManualClock()
    allowance = Allowance(0.25, 2.0, clock)
    worked = 0.0
    for _ in range(1000):
        rest_s = allowance.rest_s()
        clock.advance(rest_s)
        assert allowance.rest_s() == pytest.approx(0.0, abs=1e-9)
        allowance.spend(0.5)
        worked += 0.5
    assert worked == pytest.approx(2.0 + 0.25 * clock.monotonic_s(), rel=0.01)


def test_what_is_not_used_comes_back_up_to_a_bound() -> None:
    clock = ManualClock()
    allowance = Allowance(0.5, 1.0, clock)
    clock.advance(1000.0)
    allowance.spend(1.0)
    assert allowance.rest_s() == 0.0
    allowance.spend(2.0)
    assert allowance.rest_s() == 4.0
    clock.advance(3.0)
    assert allowance.rest_s() == 1.0
