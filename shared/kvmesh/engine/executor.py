"""The executor: one iteration takes stock of transfers and deadlines, schedules, computes, and reports.

An iteration never waits; :mod:`kvmesh.engine.loop` does, in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from kvmesh.engine.computing import ModelRunner, compute
from kvmesh.engine.counters import EngineCounters
from kvmesh.engine.deadlines import Deadlines
from kvmesh.engine.failures import (
    broken_logits,
    deadline_exceeded,
    duplicate_request_id,
    duplicate_transfer_id,
    internal_error,
    legs_differ,
    sampling_failed,
)
from kvmesh.engine.intake import Intake
from kvmesh.engine.outbox import Outbox
from kvmesh.engine.pages import SequencePages
from kvmesh.engine.plan import Chunk, StepPlan
from kvmesh.engine.sampler import NO_CHOICE, Sampled, Sampler
from kvmesh.engine.scheduler import Scheduler
from kvmesh.engine.sequence import Phase, Sequence
from kvmesh.engine.starvation import StarvationWatch
from kvmesh.engine.transfers import TransferDesk
from kvmesh.engine.upkeep import CacheUpkeep
from kvmesh.net.clock import Clock
from kvmesh.net.faults import fault_point
from kvmesh.protocol.disagg import CtxUsage
from kvmesh.protocol.engine import MAX_NOTED_CHUNKS, FinishReason, Generate
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.sampling import TokenLogprob
from kvmesh.protocol.transfer import Aux
from kvmesh.telemetry import get_logger
from kvmesh.transceiver import TransceiverDeadError

__all__ = ["Executor", "StepOutcome"]

_log = get_logger("engine.executor")


def _nothing() -> None:
    """Nobody wants to know."""


class StepOutcome(NamedTuple):
    """What an iteration did, which decides how long the loop may wait before the next."""

    computed: bool
    blocked: bool
    """Sequences wait for pages that others (transfers) hold."""
    made_way: bool = False
    """Others have just let go of pages: what was blocked may go on."""


class Executor:
    """All sequences of one engine. Single-threaded.

    Args:
        intake: admits requests.
        scheduler: plans steps.
        pages: the scheduler's pages.
        upkeep: what the cache needs between steps.
        starvation: notices when nothing can go on for want of pages.
        runner: computes chunks.
        sampler: chooses tokens.
        outbox: where outputs go.
        clock: for deadlines and time stamps.
        desk: KV transfers, None when this engine moves none.
    """

    def __init__(
        self,
        *,
        intake: Intake,
        scheduler: Scheduler,
        pages: SequencePages,
        upkeep: CacheUpkeep,
        starvation: StarvationWatch,
        runner: ModelRunner,
        sampler: Sampler,
        outbox: Outbox,
        clock: Clock,
        desk: TransferDesk | None = None,
    ) -> None:
        self._intake = intake
        self._scheduler = scheduler
        self._pages = pages
        self._upkeep = upkeep
        self._starvation = starvation
        self._runner = runner
        self._sampler = sampler
        self._outbox = outbox
        self._clock = clock
        self._desk = desk
        self._live: dict[str, Sequence] = {}
        self._deadlines = Deadlines()
        self.counters = EngineCounters()
        self.on_planned: Callable[[], None] = _nothing
        """Called when a step has its pages, before it is computed."""

    @property
    def num_live(self) -> int:
        """Sequences that are not finished."""
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their receiver, for their first step or to go on, :attr:`num_suspended` included."""
        return len(self._scheduler.waiting) + (0 if self._desk is None else self._desk.offers.num_waiting)

    @property
    def num_suspended(self) -> int:
        """Sequences that wait with their cache kept."""
        return sum(seq.phase is Phase.SUSPENDED for seq in self._scheduler.waiting)

    @property
    def num_receiving(self) -> int:
        """Sequences whose prompt is being transferred."""
        return 0 if self._desk is None else self._desk.num_receiving

    def submit(self, request: Generate) -> None:
        """Take a request; whatever is wrong with it is answered, to its own client only."""
        try:
            if request.request_id in self._live:
                raise duplicate_request_id(request.request_id)
            if self._desk is not None and request.kind != "aggregated" and self._desk.knows(request.transfer_id):
                raise duplicate_transfer_id(request.transfer_id)
            seq = self._intake.admit(request, self.num_waiting)
            if waits_for_receiver := seq.kind == "context" and seq.generation_first:
                assert self._desk is not None
                self._desk.expect(seq)
        except ApiError as error:
            self._outbox.fail(request.request_id, error)
            if self._desk is not None and (source := self._intake.source_of(request)) is not None:
                self._desk.decline(request.transfer_id, source)
            return
        self._live[seq.request_id] = seq
        if seq.deadline_s is not None:
            self._deadlines.set(seq.request_id, seq.deadline_s)
        if not waits_for_receiver:
            self._scheduler.enqueue(seq)

    def abort(self, request_id: str) -> None:
        """Stop a sequence, or the transfer that a finished context request left behind; unknown ids are ignored."""
        if (seq := self._live.get(request_id)) is not None:
            self._finish(seq, [], "cancelled")
        elif self._desk is not None and (transfer_id := self._desk.outgoing_of(request_id)) is not None:
            self._desk.cancel(transfer_id)

    def abort_all(self, error: ApiError) -> None:
        """Fail whatever is still running."""
        for seq in list(self._live.values()):
            self._fail(seq, error)

    def peer_dead(self, instance_id: str, epoch: int) -> None:
        """A member of the mesh is gone: its transfers fail now instead of at their deadline."""
        if self._desk is not None:
            self._desk.transceiver.on_peer_dead(instance_id, epoch)

    def step(self) -> StepOutcome:
        """One iteration."""
        fault_point("engine.step")
        self.counters.iteration += 1
        self._settle_transfers()
        self._outbox.flush()  # What a context server has sampled does not wait for the next token.
        self._expire()
        self._upkeep.before_step(self.counters.iteration, self._clock.monotonic_s())
        plan = self._scheduler.schedule()
        self._note(plan)
        if plan.chunks:
            self.on_planned()
        for seq in plan.receiving:
            self._start_receiving(seq)
        if plan.chunks:
            self._compute(plan.chunks)
        self._fail_starved(plan)
        self._outbox.flush()
        # Prompts that wait to be fetched make way for those that cannot run otherwise.
        made_way = bool(plan.refused) and self._desk is not None and self._desk.make_way()
        return StepOutcome(bool(plan.chunks), bool(plan.refused), made_way)

    def next_deadline_in_s(self) -> float | None:
        """Seconds until the next request deadline, or until a prompt that was held back may begin; None: neither."""
        next_s = self._deadlines.next_s()
        times = [] if next_s is None else [max(0.0, next_s - self._clock.monotonic_s())]
        if (held_back_s := self._scheduler.held_back_for_s()) is not None:
            times.append(held_back_s)
        return min(times, default=None)

    @property
    def num_held_back(self) -> int:
        """Context prompts that wait until prompts before them are read; part of :attr:`num_waiting`."""
        return self._scheduler.num_held_back

    def await_transfer(self, outcome: StepOutcome, bound_s: float) -> bool:
        """After an iteration without work: wait for a transfer that holds up everything else, ``bound_s`` at most.

        Returns:
            Whether there is such a transfer; without one this returns at once.
        """
        return self._desk is not None and self._desk.wait(bound_s, blocked=outcome.blocked)

    def transfer_wait_s(self) -> float | None:
        """How long an idle loop may wait while transfers are tracked, None when there is no such bound."""
        return None if self._desk is None else self._desk.idle_wait_s()

    @property
    def has_unfinished_business(self) -> bool:
        """Whether a sequence lives or a transfer is open."""
        return bool(self._live) or (self._desk is not None and self._desk.is_tracking)

    def _settle_transfers(self) -> None:
        if self._desk is None:
            return
        for end in self._desk.look():
            if end.error is not None:
                self._fail(end.seq, end.error)
                continue
            with self._isolated(end.seq):
                if end.aux is not None:
                    self._received_first(end.seq, end.aux)
                else:
                    self._received(end.seq)
        for seq in self._desk.offers.take_claimed():
            self._scheduler.enqueue(seq)

    def _expire(self) -> None:
        for request_id in self._deadlines.take_passed(self._clock.monotonic_s()):
            seq = self._live[request_id]
            self._fail(seq, deadline_exceeded(seq))

    def _fail_starved(self, plan: StepPlan) -> None:
        in_transfer = self._desk is not None and self._desk.is_tracking
        for seq, error in self._starvation.check(plan, in_transfer=in_transfer):
            self.counters.starved += 1
            _log.error("request starved", request=seq.request_id, message=error.message)
            self._fail(seq, error)

    def _note(self, plan: StepPlan) -> None:
        self.counters.note(plan)
        for seq in plan.admitted:
            if seq.num_cached is None:
                seq.num_cached = min(seq.num_computed, seq.history.prompt_length)
                seq.timings.scheduled_ns = self._clock.unix_ns()
                if not seq.probe:
                    self.counters.prompt_tokens += seq.history.prompt_length
                    self.counters.cached_tokens += seq.num_cached

    def _start_receiving(self, seq: Sequence) -> None:
        assert self._desk is not None
        with self._isolated(seq):
            self._desk.receive(seq, self._pages.first_missing_blocks(seq))

    @contextlib.contextmanager
    def _isolated(self, seq: Sequence) -> Iterator[None]:
        """The border of error isolation: whatever moving a request's pages raises ends that request, and no other."""
        try:
            yield
        except ApiError as error:
            self._fail(seq, error)
        except TransceiverDeadError:
            raise  # Nothing will ever be moved again: the engine must end.
        except Exception:
            _log.exception("transfer failed", request=seq.request_id)
            if self._desk is not None:
                self._desk.cancel(seq.transfer_id)
            if seq.request_id in self._live:
                self._fail(seq, internal_error("The KV cache of this request could not be moved."))

    def _received(self, seq: Sequence) -> None:
        """The prompt is here: go on from the tokens that the context server sampled."""
        self._pages.receive(seq)
        seq.handoff = None
        seq.phase = Phase.RUNNING
        seq.timings.first_token_ns = self._clock.unix_ns()
        tokens = seq.history.output().tolist()
        self._emit(seq, tokens, None)

    def _received_first(self, seq: Sequence, aux: Aux) -> None:
        """Generation first: the prompt is here, and with it the first token; or that token has ended the answer."""
        try:
            self._intake.check_aux(aux)
        except ApiError as error:
            self._fail(seq, error)
            return
        if not aux.finished:
            self._pages.receive(seq)
        seq.ctx_address = b""
        seq.phase = Phase.RUNNING
        seq.timings.first_token_ns = self._clock.unix_ns()
        seq.ctx_usage = CtxUsage(prompt_tokens=aux.prompt_tokens, cached_tokens=aux.cached_tokens)
        [token] = aux.first_tokens
        seq.history.append(token)
        seq.params = msgspec.structs.replace(seq.params, seed=aux.seed)
        seq.state = self._sampler.state(seq.params, seq.history)
        self._emit(seq, [token], aux.first_logprobs or None)
        if aux.finished and seq.phase is not Phase.FINISHED:
            self._fail(seq, legs_differ())

    def _compute(self, chunks: list[Chunk]) -> None:
        began_ns = self._clock.unix_ns()
        for done in compute(self._runner, self._sampler, chunks):
            if done.sampled is None:
                for chunk in done.chunks:
                    self._fail(chunk.seq, internal_error("The model failed on this request."))
                continue
            for chunk in done.chunks:
                if not chunk.seq.is_decoding and not chunk.seq.probe:
                    self.counters.prefilled_tokens += chunk.length
                    if chunk.seq.traced:
                        self._note_chunk(chunk, began_ns)
                self._pages.advance(chunk.seq, chunk.length)
                if chunk.seq.pipelined and not chunk.sample:
                    assert self._desk is not None
                    with self._isolated(chunk.seq):
                        self._desk.offers.chunk_done(chunk.seq, chunk.start, chunk.start + chunk.length)
            for chunk, choice in done.sampled:
                self._take_token(chunk.seq, choice)

    def _note_chunk(self, chunk: Chunk, began_ns: int) -> None:
        noted = chunk.seq.timings.chunks
        if len(noted) < 3 * MAX_NOTED_CHUNKS:
            noted += (began_ns, self._clock.unix_ns(), chunk.length)

    def _take_token(self, seq: Sequence, choice: Sampled) -> None:
        if choice.token_id < 0:
            self._fail(seq, sampling_failed() if choice.token_id == NO_CHOICE else broken_logits())
            return
        if not seq.timings.first_token_ns:
            seq.timings.first_token_ns = self._clock.unix_ns()
        seq.history.append(choice.token_id)
        self.counters.generated_tokens += not seq.probe
        self._emit(seq, [choice.token_id], None if choice.logprob is None else [choice.logprob])

    def _emit(self, seq: Sequence, token_ids: list[int], logprobs: list[TokenLogprob] | None) -> None:
        reason: FinishReason | None = None
        if token_ids[-1] in seq.state.end_ids:
            reason = "stop"
        elif seq.history.output_length >= seq.params.max_tokens:
            reason = "length"
        elif seq.kind == "context":
            reason = "not_finished"
        if reason is None:
            self._outbox.tokens(seq, token_ids, logprobs)
        else:
            self._finish(seq, token_ids, reason, logprobs)

    def _finish(
        self, seq: Sequence, token_ids: list[int], reason: FinishReason, logprobs: list[TokenLogprob] | None = None
    ) -> None:
        handoff = b""
        offered_first = seq.kind == "context" and seq.generation_first and reason != "cancelled"
        if reason == "not_finished" or offered_first:
            assert self._desk is not None
            with self._isolated(seq):
                fault_point("engine.before_handoff")
                if offered_first:
                    self._desk.offer(seq, _aux_of(seq, token_ids, reason, logprobs))
                else:
                    handoff = self._desk.send(seq)
            if seq.phase is Phase.FINISHED:
                return
        seq.timings.finished_ns = self._clock.unix_ns()
        self._outbox.tokens(seq, token_ids, logprobs, finish=reason, handoff=handoff)
        self._retire(seq, trusted=True)

    def _fail(self, seq: Sequence, error: ApiError) -> None:
        self._outbox.fail(seq.request_id, error)
        self._retire(seq, trusted=False)

    def _retire(self, seq: Sequence, *, trusted: bool) -> None:
        """Forget a sequence and give back what it holds; ``trusted`` pages stay reusable."""
        if seq.phase is Phase.RECEIVING and self._desk is not None:
            self._desk.cancel(seq.transfer_id)
            trusted = False  # Its pages may be half written; the transfer's lease outlives the cache.
        elif seq.awaits_transfer and self._desk is not None:
            self._desk.decline(seq.transfer_id, seq.handoff or seq.ctx_address)
        elif self._desk is not None and seq.transfer_id in self._desk.offers:
            self._desk.cancel(seq.transfer_id)
        self._scheduler.remove(seq)
        if seq.cache is not None:
            if trusted:
                self._pages.release(seq)
            else:
                self._pages.discard(seq)
        seq.phase = Phase.FINISHED
        self._deadlines.drop(seq.request_id)
        del self._live[seq.request_id]


def _aux_of(seq: Sequence, token_ids: list[int], reason: FinishReason, logprobs: list[TokenLogprob] | None) -> Aux:
    return Aux(
        first_tokens=token_ids,
        seed=seq.params.seed,
        prompt_tokens=seq.history.prompt_length,
        cached_tokens=seq.num_cached or 0,
        first_logprobs=logprobs or [],
        finished=reason != "not_finished",
    )
