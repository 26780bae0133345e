"""The supervisor over real child processes: small Python programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import anyio
import pytest
from waiting import until

from kvmesh.cli.rundir import start_ticks
from kvmesh.cli.supervisor import RELEASE_S, StartFailedError
from kvmesh.net.clock import ManualClock, SystemClock

SLEEPER = """
    import os, pathlib, signal, sys, time
    def end(*_):
        with open(os.path.join(os.environ["DIRECTORY"], "order"), "a") as file:
            file.write(pathlib.Path(sys.argv[0]).stem + "\\n")
        sys.exit(0)
    signal.signal(signal.SIGTERM, end)
    pathlib.Path(sys.argv[0]).with_suffix(".up").touch()
    while True:
        time.sleep(60)
"""

WITH_GRANDCHILD = """
    import os, pathlib, subprocess, sys, time
    grandchild = subprocess.Popen(["sleep", "600"])
    path = pathlib.Path(os.environ["DIRECTORY"], "grandchild")
    path.with_suffix(".tmp").write_text(str(grandchild.pid))
    path.with_suffix(".tmp").rename(path)
    time.sleep(600)
"""

STUBBORN = """
    import pathlib, signal, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pathlib.Path(sys.argv[0]).with_suffix(".up").touch()
    while True:
        time.sleep(60)
"""


async def test_a_dead_child_is_started_again_after_growing_waits(family):
    child = family.child("router", SLEEPER)
    async with family.running(child) as supervisor:
        supervisor.mark_ready()
        for life in range(1, 4):
            await until(lambda life=life: len(family.happened("started", "router")) == life)
            os.kill(family.happened("started", "router")[-1].pid, signal.SIGKILL)
        await until(lambda: len(family.happened("started", "router")) == 4)
        assert supervisor.processes()[0].restarts == 3
    deaths = family.happened("died", "router")
    assert [death.restart_in_s for death in deaths] == [0.02, 0.04, 0.08]
    assert {death.cause for death in deaths} == {"SIGKILL"}


async def test_children_stop_in_order_and_leave_nothing(family):
    names = ["coordinator", "context-0", "router"]
    children = [family.child(name, SLEEPER, rank) for rank, name in enumerate(reversed(names))]
    async with family.running(*children):
        await until(lambda: all((family.directory / f"{name}.up").exists() for name in names))
    assert (family.directory / "order").read_text().split() == ["router", "context-0", "coordinator"]
    assert all(start_ticks(event.pid) == 0 for event in family.events)


async def test_what_a_child_started_ends_with_it(family):
    """The front of a worker dies by kill -9: its engine must not live on."""
    async with family.running(family.child("context-0", WITH_GRANDCHILD)) as supervisor:
        supervisor.mark_ready()
        path = family.directory / "grandchild"
        await until(path.exists)
        first = int(path.read_text())
        path.unlink()
        os.kill(family.happened("started", "context-0")[0].pid, signal.SIGKILL)
        await until(lambda: start_ticks(first) == 0)
        await until(path.exists)
        second = int(path.read_text())
    await until(lambda: start_ticks(second) == 0)


async def test_a_stubborn_child_is_killed(family, monkeypatch):
    monkeypatch.setattr("kvmesh.cli.supervisor.KILL_AFTER_S", 0.1)
    async with family.running(family.child("router", STUBBORN), drain_s=0.0):
        await until((family.directory / "router.up").exists)
    assert start_ticks(family.events[0].pid) == 0


async def test_a_second_interrupt_kills_at_once(family):
    async with family.running(family.child("router", STUBBORN), drain_s=60.0) as supervisor:
        await until((family.directory / "router.up").exists)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervisor.stop)
            await anyio.wait_all_tasks_blocked()
            supervisor.kill()
    assert start_ticks(family.events[0].pid) == 0


@pytest.mark.parametrize(("program", "lives"), [("raise SystemExit(2)", 1), ("print('no'); raise SystemExit(1)", 3)])
async def test_a_child_that_does_not_start_ends_the_start(family, program, lives):
    with pytest.raises(ExceptionGroup) as group:
        async with family.running(family.child("router", program)), anyio.create_task_group():
            await anyio.sleep(20)
    error = group.value.exceptions[0]
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, StartFailedError)
    assert error.name == "router"
    assert "exit status" in str(error)
    assert len(family.happened("started", "router")) == lives


async def test_a_child_whose_settings_were_renewed_is_tried_again(family):
    fixed = family.directory / "fixed"
    program = """
        import os, pathlib, sys, time
        if not pathlib.Path(os.environ["DIRECTORY"], "fixed").exists():
            sys.exit(2)
        time.sleep(60)
    """
    child = family.child("child", program)._replace(renew=lambda: fixed.touch() is None)
    async with family.running(child) as supervisor:
        await until(lambda: len(family.happened("started", "child")) == 2)
        assert [state.restarts for state in supervisor.processes()] == [0], "nothing that worked has failed"
    assert [event.status for event in family.happened("died", "child")][:1] == [2]


class HurriedClock(SystemClock):
    """Nobody waits: to sleep is to let that much time pass."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        await anyio.lowlevel.checkpoint()
        self.now_s += seconds


@pytest.mark.parametrize("free_after", [0, 1, 7])
async def test_what_a_killed_child_left_gets_the_time_to_end(family, free_after):
    """Its engine holds the ports for a moment longer: the next life uses the same ones."""
    asked: list[str] = []

    def released() -> bool:
        asked.append("released")
        return asked.count("released") > free_after

    child = family.child("child", SLEEPER)._replace(released=released, renew=lambda: asked.append("renew") is not None)
    async with family.running(child, clock=HurriedClock()) as supervisor:
        supervisor.mark_ready()
        await until(lambda: len(family.happened("started", "child")) == 1)
        os.kill(family.happened("started", "child")[0].pid, signal.SIGKILL)
        await until(lambda: len(family.happened("started", "child")) == 2)
        assert asked == ["released"] * (free_after + 1) + ["renew"]
        assert [state.restarts for state in supervisor.processes()] == [1]


async def test_what_is_never_released_is_waited_for_in_bounds_and_the_restart_counts(family):
    clock = HurriedClock()
    renewed_s: list[float] = []
    child = family.child("child", SLEEPER)._replace(
        released=lambda: False, renew=lambda: renewed_s.append(clock.now_s) is None
    )
    async with family.running(child, clock=clock) as supervisor:
        supervisor.mark_ready()
        await until(lambda: len(family.happened("started", "child")) == 1)
        os.kill(family.happened("started", "child")[0].pid, signal.SIGKILL)
        await until(lambda: len(family.happened("started", "child")) == 2)
        assert [state.restarts for state in supervisor.processes()] == [1], "it ran, and died"
    [at_s] = renewed_s
    assert RELEASE_S <= at_s < RELEASE_S + 1


async def test_a_child_that_refuses_to_start_is_renewed_without_a_wait(family):
    """Whoever holds its ports is none of its own: those it has ended by then."""
    fixed = family.directory / "fixed"
    program = """
        import os, pathlib, sys, time
        if not pathlib.Path(os.environ["DIRECTORY"], "fixed").exists():
            sys.exit(2)
        time.sleep(60)
    """
    asked: list[str] = []
    child = family.child("child", program)._replace(
        renew=lambda: fixed.touch() is None, released=lambda: asked.append("released") is not None
    )
    async with family.running(child):
        await until(lambda: len(family.happened("started", "child")) == 2)
    assert asked == []


async def test_the_end_waits_for_nothing_that_is_to_be_released(family):
    waiting = anyio.Event()
    child = family.child("child", "raise SystemExit(1)")._replace(
        released=lambda: waiting.set() is not None, renew=lambda: pytest.fail("there is no next life")
    )
    async with family.running(child, clock=ManualClock()) as supervisor:
        supervisor.mark_ready()
        clock = supervisor._clock
        await until(lambda: clock.sleepers == 1)
        clock.advance(0.02)  # the back-off
        await waiting.wait()
    assert len(family.happened("started", "child")) == 1


async def test_renewing_does_not_go_on_forever_before_the_start(family):
    child = family.child("child", "import sys; sys.exit(2)")._replace(renew=lambda: True)
    with pytest.RaisesGroup(StartFailedError, flatten_subgroups=True):
        async with family.running(child):
            await anyio.sleep_forever()
    assert len(family.happened("started", "child")) == 3


async def test_after_the_start_it_never_gives_up(family):
    async with family.running(family.child("router", "raise SystemExit(2)"), backoff_max_s=0.02) as supervisor:
        supervisor.mark_ready()
        await until(lambda: len(family.happened("started", "router")) > 4)


def test_a_child_ends_with_its_supervisor():
    """However the supervisor ends: here by SIGKILL."""
    child = "from kvmesh.cli.parent import end_with_parent; end_with_parent(); print('up', flush=True); input()"
    supervisor = textwrap.dedent(
        f"""
        import os, subprocess, sys
        env = {{**os.environ, "KVMESH_SUPERVISOR_PID": str(os.getpid())}}
        child = subprocess.Popen([sys.executable, "-c", {child!r}], env=env, stdin=subprocess.PIPE,
                                 stdout=subprocess.PIPE, start_new_session=True)
        child.stdout.readline()
        print(child.pid, flush=True)
        input()
        """
    )
    process = subprocess.Popen([sys.executable, "-c", supervisor], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    pid = int(process.stdout.readline())
    assert start_ticks(pid) != 0
    process.kill()
    process.communicate()
    deadline_s = time.monotonic() + 10
    while start_ticks(pid) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert start_ticks(pid) == 0


def test_an_orphan_notices_at_once(monkeypatch):
    from kvmesh.cli.parent import SUPERVISOR_PID_VARIABLE, end_with_parent

    monkeypatch.delenv(SUPERVISOR_PID_VARIABLE, raising=False)
    end_with_parent()
    monkeypatch.setenv(SUPERVISOR_PID_VARIABLE, "1" if os.getppid() != 1 else "2")
    program = "from kvmesh.cli.parent import end_with_parent; end_with_parent(); raise SystemExit(7)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
