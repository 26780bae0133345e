"""Time under control, and faults at named points."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import anyio
import pytest

from kvmesh.net import faults
from kvmesh.net.clock import ManualClock, SystemClock


async def test_manual_clock_wakes_sleepers_in_order() -> None:
    clock = ManualClock()
    woken: list[str] = []

    async def sleeper(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append(name)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sleeper, "late", 2.0)
        tasks.start_soon(sleeper, "soon", 1.0)
        await anyio.wait_all_tasks_blocked()
        assert clock.sleepers == 2
        clock.advance(1.0)
        await anyio.wait_all_tasks_blocked()
        assert woken == ["soon"]
        clock.advance(1.0)
    assert woken == ["soon", "late"]
    assert clock.monotonic_s() == 2.0
    assert clock.unix_ns() - ManualClock().unix_ns() == 2_000_000_000


def test_clocks_do_not_go_back() -> None:
    with pytest.raises(ValueError, match="does not go back"):
        ManualClock().advance(-1)
    clock = SystemClock()
    assert clock.monotonic_s() <= clock.monotonic_s()


def test_fault_points_do_what_is_armed() -> None:
    faults.fault_point("test.point")
    hits: list[int] = []
    with faults.injected("test.point", lambda: hits.append(1)):
        faults.fault_point("test.point")
        faults.fault_point("test.other")
    faults.fault_point("test.point")
    assert hits == [1]


def test_faults_are_armed_from_the_environment() -> None:
    assert faults.arm_from_environment({"KVMESH_FAULTS": "test.a=fail, test.b=pause:0"}) == ["test.a", "test.b"]
    try:
        with pytest.raises(faults.FaultInjectedError, match=r"test\.a"):
            faults.fault_point("test.a")
        faults.fault_point("test.b")
    finally:
        faults.disarm("test.a")
        faults.disarm("test.b")
    with pytest.raises(ValueError, match="not kill, stop"):
        faults.arm_from_environment({"KVMESH_FAULTS": "test.a=explode"})
    with pytest.raises(ValueError, match="hold:DIRECTORY"):
        faults.arm_from_environment({"KVMESH_FAULTS": "test.a=hold"})


def test_a_thread_is_held_at_the_hit_that_a_file_names(tmp_path: Path) -> None:
    faults.arm_from_environment({"KVMESH_FAULTS": f"test.a=hold:{tmp_path}"})
    armed, reached, hits = (tmp_path / f"test.a.{name}" for name in ("armed", "reached", "hits"))
    try:
        faults.fault_point("test.a")  # Nobody has asked for it yet.
        (tmp_path / "new").write_text("3")
        (tmp_path / "new").rename(armed)
        faults.fault_point("test.a")
        faults.fault_point("test.a")
        assert not reached.exists()
        held = threading.Thread(target=lambda: faults.fault_point("test.a"))
        held.start()
        deadline_s = time.monotonic() + 10
        while not reached.exists():
            assert time.monotonic() < deadline_s
        faults.fault_point("test.a")  # Others pass: it holds once.
        assert held.is_alive()
        assert (armed.exists(), hits.read_text()) == (False, "3")
        reached.unlink()
        held.join(10)
        assert not held.is_alive()
        # Armed anew, hits count anew.
        armed.write_text("1000")
        faults.fault_point("test.a")
        assert hits.read_text() == "1"
    finally:
        faults.disarm("test.a")


def test_a_hold_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "MAX_HOLD_S", 0.05)
    faults.arm_from_environment({"KVMESH_FAULTS": f"test.a=hold:{tmp_path}"})
    try:
        (tmp_path / "test.a.armed").write_text("1")
        faults.fault_point("test.a")
        assert (tmp_path / "test.a.reached").exists()
    finally:
        faults.disarm("test.a")
