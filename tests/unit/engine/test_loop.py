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
    KvEventsDrained,
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

    def transfer_wait_s(self) -> float | None:
        return self.transfer_wait

    def next_deadline_in_s(self) -> float | None:
        return self.deadline


class ScriptedReporter:
    due: float | None = None

    def after_step(self, *, computed: bool) -> None:
        pass

    def due_in_s(self) -> float | None:
        return self.due


class ScriptedChannel:
    """Delivers the next batch of messages at each receive, moving the clock by the wait when there is none."""

    def __init__(self, clock: ManualClock, *batches: list[Any]) -> None:
        self.waits: list[float] = []
        self.sent: list[Any] = []
        self._clock = clock
        self._batches = list(batches)

    def receive(self, timeout_s: float) -> list[Any]:
        self.waits.append(timeout_s)
        if self._batches:
            return self._batches.pop(0)
        self._clock.advance(timeout_s)
        return []

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
    loop, executor, channel = build([REQUEST, Abort("r"), Ping(7), PeerDead("x", 3), DrainKvEvents(8)], [Shutdown(0.0)])
    executor.counters.iteration = 5
    loop.run()
    assert executor.calls == [("submit", "r"), ("abort", "r"), ("dead", "x", 3), "step", "step", "abort all"]
    assert channel.sent == [Pong(7, 5), KvEventsDrained(8, b"[]")]


def test_there_is_no_wait_while_there_is_work(build: Build) -> None:
    loop, executor, channel = build([], [], [], [Shutdown(0.0)])
    executor.outcomes = [StepOutcome(computed=True, blocked=False), StepOutcome(computed=True, blocked=True), IDLE]
    loop.run()
    assert channel.waits == [IDLE_WAIT_S, 0.0, 0.0, IDLE_WAIT_S]


def test_an_idle_loop_waits_for_whatever_comes_first(build: Build) -> None:
    loop, executor, _ = build()
    assert loop.wait_s(IDLE) == IDLE_WAIT_S
    executor.deadline = 4.0
    assert loop.wait_s(IDLE) == 4.0
    executor.transfer_wait = 1.5
    assert loop.wait_s(IDLE) == 1.5
    assert loop.wait_s(StepOutcome(computed=False, blocked=True)) == BLOCKED_WAIT_S
    loop._reporter.due = 0.001  # type: ignore[attr-defined]
    assert loop.wait_s(IDLE) == 0.001


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
