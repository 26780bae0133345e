"""A worker says at once that its engines do not answer, and at once that they do again."""

from __future__ import annotations

from collections.abc import Iterator

import structlog

from kvmesh.engine.stream import EngineDeadError
from kvmesh.protocol.errors import ApiError, unavailable
from kvmesh.worker.liveness import CHECK_S, HEALTH_TIMEOUT_S, RETRY_S, Liveness


class FakeClock:
    """Never waits; remembers for how long it was asked to."""

    def __init__(self) -> None:
        self.slept_s: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)


class FakeEngines:
    """Answers with what it is given; then it is dead."""

    def __init__(self, answers: list[ApiError | None]) -> None:
        self._answers: Iterator[ApiError | None] = iter(answers)

    async def ping(self, timeout_s: float) -> None:
        assert timeout_s == HEALTH_TIMEOUT_S
        error = next(self._answers, EngineDeadError("The engine process has ended (exit status 0)."))
        if error is not None:
            raise error


async def watched(*answers: ApiError | None) -> tuple[list[bool], list[float], list[str]]:
    """What was told, the pauses between pings, and the warnings."""
    told: list[bool] = []
    clock = FakeClock()
    liveness = Liveness(lambda: told.append(liveness.healthy), clock)
    with structlog.testing.capture_logs() as logs:
        await liveness.watch(FakeEngines(list(answers)).ping)
    return told, clock.slept_s, [entry["event"] for entry in logs if entry["log_level"] == "warning"]


async def test_every_change_is_told_once_and_silent_engines_are_asked_again_soon() -> None:
    slow = unavailable("No answer within 10 s.", code="engine_busy")
    told, slept_s, warnings = await watched(None, slow, slow, None)
    assert told == [False, True, False]
    assert slept_s == [CHECK_S, CHECK_S, RETRY_S, RETRY_S, CHECK_S]
    assert len(warnings) == 1


async def test_engines_that_end_are_no_news() -> None:
    told, _, warnings = await watched(None)
    assert told == [False]
    assert warnings == []
