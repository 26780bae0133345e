"""The engine's main loop: messages in, one executor iteration, and a wait that is exactly as long as it may be."""

from __future__ import annotations

from kvmesh.engine.channel import MessageChannel
from kvmesh.engine.executor import Executor, StepOutcome
from kvmesh.engine.outbox import failure_of
from kvmesh.engine.report import EngineReporter
from kvmesh.net.clock import Clock
from kvmesh.protocol.engine import (
    Abort,
    DrainKvEvents,
    Generate,
    PeerDead,
    Ping,
    Pong,
    Shutdown,
    ToEngine,
)
from kvmesh.protocol.errors import ApiError, unavailable

__all__ = ["BLOCKED_WAIT_S", "IDLE_WAIT_S", "EngineLoop"]

IDLE_WAIT_S = 60.0
"""Longest wait when nothing at all is going on: bounded, and still no load."""

BLOCKED_WAIT_S = 0.01
"""Wait when sequences got no pages although no transfer holds any: in the next iteration they may."""


class EngineLoop:
    """Runs until it is told to shut down.

    Args:
        channel: messages from and to the front.
        executor: does the work.
        reporter: tells about it.
        clock: for the drain deadline.
    """

    def __init__(self, channel: MessageChannel, executor: Executor, reporter: EngineReporter, clock: Clock) -> None:
        self._channel = channel
        self._executor = executor
        self._reporter = reporter
        self._clock = clock
        self._drain_until_s: float | None = None

    def run(self) -> None:
        """Serve until :class:`~kvmesh.protocol.engine.Shutdown` has come and its time, or the work, is over.

        Whatever an iteration raises is unrecoverable and ends the loop: the process must die, so that its front can
        tell the truth and be given a new engine.
        """
        outcome = StepOutcome(computed=False, blocked=False)
        while not self._over:
            self._wait(outcome)
            for message in self._channel.receive():
                self._dispatch(message)
            outcome = self._executor.step()
            self._reporter.after_step(computed=outcome.computed)
        self._executor.abort_all(_shutting_down())
        self._reporter.after_last_step()

    def _wait(self, outcome: StepOutcome) -> None:
        """Wait before the next iteration: not at all when there is work to run, else until whatever comes first.

        That is a message, a transfer that progresses, a deadline, a report that is due, or a look at quiet transfers.
        """
        if outcome.computed or outcome.made_way:
            return
        duties = (
            self._executor.next_deadline_in_s(),
            self._reporter.due_in_s(),
            None if self._drain_until_s is None else max(0.0, self._drain_until_s - self._clock.monotonic_s()),
        )
        bound_s = min((duty for duty in duties if duty is not None), default=IDLE_WAIT_S)
        if bound_s <= 0 or self._executor.await_transfer(outcome, bound_s):
            return
        look_s = self._executor.transfer_wait_s()
        if look_s is None:
            look_s = BLOCKED_WAIT_S if outcome.blocked else IDLE_WAIT_S
        self._channel.wait(min(bound_s, look_s))

    @property
    def _over(self) -> bool:
        if self._drain_until_s is None:
            return False
        return not self._executor.has_unfinished_business or self._clock.monotonic_s() >= self._drain_until_s

    def _dispatch(self, message: ToEngine) -> None:
        match message:
            case Generate():
                if self._drain_until_s is None:
                    self._executor.submit(message)
                else:
                    self._refuse(message)
            case Abort():
                self._executor.abort(message.request_id)
            case Ping():
                self._channel.send(Pong(message.sequence, self._executor.counters.iteration))
            case PeerDead():
                self._executor.peer_dead(message.instance_id, message.epoch)
            case DrainKvEvents():
                self._reporter.drain_kv_events(message)
            case Shutdown():
                self._drain_until_s = self._clock.monotonic_s() + message.drain_s

    def _refuse(self, message: Generate) -> None:
        self._channel.send(failure_of(message.request_id, _shutting_down()))


def _shutting_down() -> ApiError:
    return unavailable("The server is shutting down; send the request to another one.", code="shutting_down")
