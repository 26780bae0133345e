"""Whom a request that was not finished in time is held against."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from kvmesh.router.deadline import PATIENCE_S, Deadline


async def test_only_who_was_silent_until_the_deadline_is_blamed() -> None:
    now_s = anyio.current_time()
    assert Deadline(now_s, 5.0).blames(now_s - 6.0)
    assert not Deadline(now_s, 5.0).blames(now_s - 1.0), "it was asked late, or has been talking"
    assert not Deadline(now_s + 60.0, 5.0).blames(now_s - 6.0), "it was given up for another reason"
    assert not Deadline().blames(now_s - 1e9)


@pytest.mark.parametrize(("timeout_s", "patience_s"), [(180.0, PATIENCE_S), (1.0, 0.5)])
async def test_current(timeout_s: float, patience_s: float) -> None:
    with anyio.fail_after(timeout_s) as scope:
        await anyio.lowlevel.checkpoint()
        assert Deadline.current(timeout_s) == (scope.deadline, patience_s)
