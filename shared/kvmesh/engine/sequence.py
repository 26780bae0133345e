"""One request inside the engine: its tokens, its progress and its place in the order of service."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvmesh.engine.sampler_state import SamplerState
from kvmesh.engine.tokens import TokenHistory
from kvmesh.protocol.disagg import CtxUsage, HandOff
from kvmesh.protocol.engine import RequestKind, RequestTimings
from kvmesh.protocol.retention import RetentionConfig
from kvmesh.protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from kvmesh.cache.base import SequenceCache
    from kvmesh.hashing import ReuseScope

__all__ = ["Phase", "Sequence"]


class Phase(enum.Enum):
    """Where a sequence is; semantics of a disaggregated request in brackets."""

    AWAITING_RECEIVER = "awaiting_receiver"
    """Generation first, context kind: not in the queue yet, for its receiver has not come (WAIT_SCHEDULER)."""
    WAITING = "waiting"
    """Queued: holds no pages (CONTEXT_INIT, GENERATION_INIT)."""
    SUSPENDED = "suspended"
    """Queued, with its cache: the pages are kept, and may lie in a colder tier."""
    RECEIVING = "receiving"
    """Its prompt's pages are on their way from a context server (TRANS_IN_PROGRESS); cannot be preempted."""
    RUNNING = "running"
    """Holds pages; every step may compute some of its tokens."""
    FINISHED = "finished"
    """Over; holds nothing. (A context request's pages may still be sent: the transfer's lease owns them.)"""


@dataclass(slots=True, eq=False)
class Sequence:
    """The engine's record of one request. The executor's thread owns it."""

    request_id: str
    kind: RequestKind
    params: SamplingParams
    history: TokenHistory
    state: SamplerState
    scope: ReuseScope
    arrival: int
    """Order of arrival, unique."""
    priority: int = 0
    """Higher is served first."""
    deadline_s: float | None = None
    """Monotonic time at which the request fails."""
    transfer_id: int = 0
    handoff: HandOff | None = None
    """Generation kind: how to get the prompt's pages; None once they are here (or were lost to a preemption)."""
    generation_first: bool = False
    """Both legs of the request run at once."""
    ctx_address: bytes = b""
    """Generation first, generation kind: whom to ask for the prompt's pages; empty once they are here."""
    pipelined: bool = False
    """Context kind: slices of its prompt go out while it is computed. It is never preempted, and has its pages reserved
    from the start, for what has been sent must stay as it is."""
    retention: RetentionConfig | None = None
    """Priorities of its blocks."""
    conversation_id: str | None = None
    """The conversation of which it is a turn."""
    probe: bool = False
    """Asks only whether the engine computes: it reuses nothing, leaves nothing, and is in no statistics."""
    phase: Phase = Phase.WAITING
    cache: SequenceCache | None = None
    num_computed: int = 0
    """Leading tokens whose KV is in the cache."""
    block_keys: list[bytes] = field(default_factory=list)
    """Keys of the full blocks of its leading tokens, as far as they were asked for: a prompt is hashed once."""
    prefetched: bool = False
    """Whether its pages in the slowest tier were asked for while it was queued."""
    in_statistics: bool = False
    """Whether a step of it was computed: then the cache's statistics know its prompt, however often it starts anew."""
    ctx_usage: CtxUsage | None = None
    """Generation first, generation kind: usage as the context server counted it, once the prompt is here."""
    num_cached: int | None = None
    """Prompt tokens found in the local cache when first scheduled; None before."""
    traced: bool = False
    """Whether its timings are to have the times of chunks and slices."""
    timings: RequestTimings = field(default_factory=RequestTimings)

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key of service: priority first, then arrival; smaller is served earlier."""
        return (-self.priority, self.arrival)

    @property
    def num_pending(self) -> int:
        """Tokens known but not yet computed: 1 while decoding, more while (re)computing a context."""
        return self.history.length - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest generated token is left to compute."""
        return self.num_pending == 1 and self.history.output_length > 0

    @property
    def awaits_transfer(self) -> bool:
        """Whether its prompt's pages have yet to come from a context server."""
        return self.handoff is not None or bool(self.ctx_address)

    @property
    def max_length(self) -> int:
        """Tokens that prompt and output can reach together."""
        return self.history.prompt_length + self.params.max_tokens

    @property
    def max_cached_length(self) -> int:
        """Tokens whose KV can ever be in the cache: the last sampled token's never is, nor a context's first."""
        return self.history.prompt_length if self.kind == "context" else self.max_length - 1
