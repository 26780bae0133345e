"""The loop: what wakes it, how long it may wait, how it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvmesh.engine.counters import EngineCounters
from kvmesh.engine.executor import StepOutcome
from kvmesh.engine.loop import BLOCKED_WAIT_S, IDLE_WAIT_S, EngineLoop
from kvmesh.net.clock import ManualClock
from kvmesh.protocol.engine import (
    Abort,
    DrainKvEvents,
    Generate,
    PeerDead,
    Ping,
    Pong,
    RequestFailed,
    Shutdown,
)
from kvmesh.protocol.sampling import SamplingParams

IDLE = StepOutcome(computed=False, blocked=False)
REQUEST = Generate(request_id="r", prompt_token_ids=bytes(4), sampling=SamplingParams(max_tokens=1))


class ScriptedExecutor:
    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.counters = EngineCounters()
        self.outcomes: list[StepOutcome] = []
        self.has_unfinished_business = False
        self.transfer_wait: float | None = None
        self.deadline: float | None = None
        self.awaited: list[tuple[bool, float]] | None = None
        """What transfers were waited for: (blocked, bound); None while no transfer holds anything up."""

    def submit(self, request: Generate) -> None:
        self.calls.append(("submit", request.request_id))

    def abort(self, request_id: str) -> None:
        self.calls.append(("abort", request_id))

    def abort_all(self, error: Exception) -> None:
        self.calls.append("abort all")

    def peer_dead(self, instance_id: str, epoch: int) -> None:
        self.calls.append(("dead", instance_id, epoch))

    def step(self) -> StepOutcome:
        self.calls.append("step")
        return self.outcomes.pop(0) if self.outcomes else IDLE

    def await_transfer(self, outcome: StepOutcome, bound_s: float) -> bool:
        if self.awaited is None:
            return False
        self.awaited.append((outcome.blocked, bound_s))
        return True

    def transfer_wait_s(self) -> float | None:
        return self.transfer_wait

    def next_deadline_in_s(self) -> float | None:
        return self.deadline


class ScriptedReporter:
    def __init__(self) -> None:
        self.due: float | None = None
        self.drained: list[DrainKvEvents] = []
        self.over = False

    def drain_kv_events(self, message: DrainKvEvents) -> None:
        self.drained.append(message)

    def after_step(self, *, computed: bool) -> None:
        assert not self.over

    def after_last_step(self) -> None:
        assert not self.over
        self.over = True

    def due_in_s(self) -> float | None:
        return self.due


class ScriptedChannel:
    """Delivers the next batch of messages at each receive; a wait moves the clock when there is none."""

    def __init__(self, clock: ManualClock, *batches: list[Any]) -> None:
        self.waits: list[float] = []
        self.sent: list[Any] = []
        self._clock = clock
        self._batches = list(batches)

    def wait(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        if not self._batches:
            self._clock.advance(timeout_s)
        return bool(self._batches)

    def receive(self) -> list[Any]:
        return self._batches.pop(0) if self._batches else []

    def send(self, message: Any) -> None:
        self.sent.append(message)


Build = Callable[..., tuple[EngineLoop, ScriptedExecutor, ScriptedChannel]]


@pytest.fixture
def build() -> Build:
    def make(*batches: list[Any]) -> tuple[EngineLoop, ScriptedExecutor, ScriptedChannel]:
        clock = ManualClock()
        executor, channel = ScriptedExecutor(), ScriptedChannel(clock, *batches)
        return EngineLoop(channel, executor, ScriptedReporter(), clock), executor, channel  # type: ignore[arg-type]

    return make


def test_messages_reach_the_executor_in_order(build: Build) -> None:
    loop, executor, channel = build(
        [REQUEST, Abort("r"), Ping(7), PeerDead("x", 3), DrainKvEvents(8, 4)], [Shutdown(0.0)]
    )
    executor.counters.iteration = 5
    loop.run()
    assert executor.calls == [("submit", "r"), ("abort", "r"), ("dead", "x", 3), "step", "step", "abort all"]
    assert channel.sent == [Pong(7, 5)]
    assert loop._reporter.drained == [DrainKvEvents(8, 4)]  # type: ignore[attr-defined]
    assert loop._reporter.over  # type: ignore[attr-defined]


def test_there_is_no_wait_while_there_is_work(build: Build) -> None:
    loop, executor, channel = build([], [], [], [Shutdown(0.0)])
    executor.outcomes = [StepOutcome(computed=True, blocked=False), StepOutcome(computed=True, blocked=True), IDLE]
    loop.run()
    assert channel.waits == [IDLE_WAIT_S, IDLE_WAIT_S]  # before the first step, and after the last


def test_an_idle_loop_waits_for_whatever_comes_first(build: Build) -> None:
    loop, executor, channel = build()
    blocked = StepOutcome(computed=False, blocked=True)
    loop._wait(IDLE)
    loop._wait(blocked)
    executor.deadline = 4.0
    loop._wait(IDLE)
    # T19: with only tracked transfers left the wait is bounded by them, woken or not.
    executor.transfer_wait = 1.5
    loop._wait(IDLE)
    loop._wait(blocked)
    loop._reporter.due = 0.001  # type: ignore[attr-defined]
    loop._wait(IDLE)
    assert channel.waits == [IDLE_WAIT_S, BLOCKED_WAIT_S, 4.0, 1.5, 1.5, 0.001]


def test_a_transfer_that_holds_up_everything_is_waited_for_as_such(build: Build) -> None:
    loop, executor, channel = build()
    executor.awaited = []
    executor.transfer_wait = 1.5
    loop._wait(IDLE)
    executor.deadline = 0.5
    loop._wait(StepOutcome(computed=False, blocked=True))
    loop._wait(StepOutcome(computed=True, blocked=True))
    executor.deadline = 0.0
    loop._wait(IDLE)
    assert executor.awaited == [(False, IDLE_WAIT_S), (True, 0.5)]
    assert channel.waits == []


def test_shutdown_drains_and_refuses_new_requests(build: Build) -> None:
    loop, executor, channel = build([Shutdown(3.0)], [REQUEST])
    executor.has_unfinished_business = True
    loop.run()
    assert ("submit", "r") not in executor.calls
    [failure] = channel.sent
    assert isinstance(failure, RequestFailed)
    assert (failure.status, failure.code) == (503, "shutting_down")
    assert sum(channel.waits[1:]) == pytest.approx(6.0)  # the wait for the refused message, and the drain
    assert executor.calls[-1] == "abort all"


def test_a_step_that_raises_ends_the_loop(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, executor, _ = build()

    def broken() -> StepOutcome:
        raise RuntimeError("bookkeeping is wrong")

    monkeypatch.setattr(executor, "step", broken)
    with pytest.raises(RuntimeError, match="bookkeeping"):
        loop.run()
