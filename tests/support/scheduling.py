"""A scheduler over the fake cache, and a stand-in for the model: every step computes what was planned."""

from __future__ import annotations

from typing import Any

import numpy as np
from fake_cache import FakeCacheManager

from kvmesh.engine.pages import SequencePages
from kvmesh.engine.plan import SchedulerLimits, StepPlan
from kvmesh.engine.sampler import Sampler
from kvmesh.engine.scheduler import Scheduler
from kvmesh.engine.sequence import Phase, Sequence
from kvmesh.engine.tokens import TokenHistory
from kvmesh.hashing import ReuseScope
from kvmesh.protocol.disagg import HandOff
from kvmesh.protocol.sampling import SamplingParams

BLOCK = 4
HANDOFF = HandOff(ticket=b"", control_endpoint="", instance_id="c", epoch=1, layout_digest="", seed=0)


class SchedulerBench:
    """Adds sequences and steps; checks the cache and the bounds of every step."""

    def __init__(self, manager: FakeCacheManager | int, **limits: Any) -> None:
        self.manager = FakeCacheManager([manager]) if isinstance(manager, int) else manager
        self.pages = SequencePages(self.manager)  # type: ignore[arg-type]
        self.limits = SchedulerLimits(**{"max_batch_size": 8, "max_num_tokens": 16, **limits})
        self.scheduler = Scheduler(self.limits, self.pages)
        self.all: list[Sequence] = []
        self._sampler = Sampler(frozenset())

    def add(
        self,
        name: str,
        prompt: int,
        *,
        max_tokens: int = 8,
        priority: int = 0,
        first: int = 0,
        kind: Any = "aggregated",
        received: bool = False,
    ) -> Sequence:
        """A prompt of the tokens ``first, first + 1, ...``."""
        tokens = TokenHistory(np.arange(first, first + prompt, dtype=np.int32))
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        seq = Sequence(
            name,
            kind,
            params,
            tokens,
            self._sampler.state(params, tokens),
            ReuseScope(None, None),
            len(self.all) + 1,
            priority,
        )
        if received:
            seq.handoff = HANDOFF
            tokens.append(1)
        self.all.append(seq)
        self.scheduler.enqueue(seq)
        return seq

    def step(self) -> StepPlan:
        """Schedule and compute."""
        plan = self.scheduler.schedule()
        self.check(plan)
        for chunk in plan.chunks:
            self.pages.advance(chunk.seq, chunk.length)
            if chunk.sample:
                chunk.seq.history.append(1)
                if chunk.seq.history.output_length >= chunk.seq.params.max_tokens or chunk.seq.kind == "context":
                    self.finish(chunk.seq)
        self.manager.check()
        return plan

    def check(self, plan: StepPlan) -> None:
        """The bounds of one step."""
        chunks = plan.chunks
        assert len(chunks) <= self.limits.max_batch_size
        assert sum(chunk.length for chunk in chunks) <= self.limits.max_num_tokens
        assert len({chunk.seq.request_id for chunk in chunks}) == len(chunks)
        for seq, start, length, sample in chunks:
            assert length > 0
            assert seq.phase is Phase.RUNNING
            assert start == seq.num_computed
            assert seq.cache is not None
            assert start + length <= seq.cache.capacity
            assert sample == (start + length == seq.history.length)
        if self.limits.context_kv_cap_tokens is not None:
            attended = sum(chunk.start + chunk.length for chunk in chunks if not chunk.seq.is_decoding)
            assert attended <= self.limits.context_kv_cap_tokens

    def arrive(self, seq: Sequence) -> None:
        """The prompt of a receiver is there."""
        self.pages.receive(seq)
        seq.handoff, seq.phase = None, Phase.RUNNING

    def finish(self, seq: Sequence) -> None:
        """The sequence is over, or its client gone."""
        self.scheduler.remove(seq)
        if seq.cache is not None:
            self.pages.release(seq)
        seq.phase = Phase.FINISHED

    def run(self, steps: int = 500) -> list[StepPlan]:
        """Step until all is finished."""
        plans = []
        while any(seq.phase is not Phase.FINISHED for seq in self.all):
            assert len(plans) < steps, {seq.request_id: seq.phase for seq in self.all}
            plans.append(self.step())
        return plans


def shape(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    """The chunks by name."""
    return [(chunk.seq.request_id, chunk.start, chunk.length, chunk.sample) for chunk in plan.chunks]


def names(sequences: list[Sequence]) -> list[str]:
    """Request ids."""
    return [seq.request_id for seq in sequences]
