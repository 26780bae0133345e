"""Messages between a server's front process and its engine process (ZMQ ipc pair, msgpack).

The front sends :data:`ToEngine`, the engine answers with :data:`FromEngine`; both are tagged unions.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from kvmesh.protocol.cache_report import CacheReport, IterationRecord
from kvmesh.protocol.disagg import CtxUsage
from kvmesh.protocol.kv_cache_events import KvCacheEvent
from kvmesh.protocol.retention import RetentionConfig
from kvmesh.protocol.sampling import SamplingParams, TokenLogprob
from kvmesh.protocol.transfer import LedgerEvent
from kvmesh.protocol.version import PROTOCOL_VERSION

__all__ = [
    "MAX_NOTED_CHUNKS",
    "Abort",
    "DrainKvEvents",
    "EngineFailed",
    "EngineReady",
    "EngineStats",
    "FinishReason",
    "FromEngine",
    "Generate",
    "IterationRecords",
    "KvEventsDrained",
    "LedgerUpdate",
    "PeerDead",
    "Ping",
    "Pong",
    "RequestFailed",
    "RequestKind",
    "RequestTimings",
    "Shutdown",
    "ToEngine",
    "TokenBatch",
    "TokenOutput",
]

MAX_NOTED_CHUNKS: Final = 256
"""Of one traced request: a prompt of 128k tokens in chunks of 512."""

RequestKind = Literal["aggregated", "context", "generation"]
FinishReason = Literal["stop", "length", "not_finished", "cancelled"]


class Generate(msgspec.Struct, tag=True, kw_only=True, omit_defaults=True):
    """Start one sequence."""

    request_id: str
    prompt_token_ids: bytes
    """int32 little-endian token ids."""
    sampling: SamplingParams
    kind: RequestKind = "aggregated"
    transfer_id: int = 0
    """The disaggregated request id; keys the transfer session (context and generation kinds)."""
    first_tokens: list[int] = []
    """Generation kind: tokens that the context server already sampled."""
    handoff: bytes = b""
    """Generation kind: msgpack :class:`kvmesh.protocol.disagg.HandOff`."""
    generation_first: bool = False
    """Both legs run at once. A context request waits for its receiver; a generation request has no ``first_tokens``."""
    ctx_address: bytes = b""
    """Generation first, generation kind: the signed :class:`kvmesh.protocol.disagg.ContextAddress` of the owner."""
    cache_salt: str | None = None
    lora_id: int | None = None
    retention: RetentionConfig | None = None
    """Priorities of its blocks in this engine's cache."""
    conversation_id: str | None = None
    """For the ``per_conversation`` reuse policy; the front gives it to one sequence at a time."""
    dp_rank: int | None = None
    """Attention data-parallel rank that is wanted; once the front has placed the sequence, the one that it is on."""
    dp_matched_tokens: int | None = None
    """Leading prompt tokens that ``dp_rank`` holds, as far as the sender knows: then the rank is a wish, which the
    front weighs against the ranks' load. None: it is an order."""
    priority: int = 0
    probe: bool = False
    """Asks only whether the engine computes: it reuses nothing, leaves nothing reusable, and is in no statistics."""
    traced: bool = False
    """Note the times of its prefill chunks and transfer slices, from which the front makes spans."""
    deadline_s: float | None = None
    """Seconds from receipt after which the engine fails the request by itself."""


class Abort(msgspec.Struct, tag=True):
    """Stop a sequence and free what it holds; unknown ids are ignored. Answered by a final output ``cancelled``."""

    request_id: str


class Ping(msgspec.Struct, tag=True):
    """Liveness of the executor loop, answered from within it."""

    sequence: int


class PeerDead(msgspec.Struct, tag=True):
    """A member is gone: fail its transfers and release what it mapped. ``epoch`` and older are dead."""

    instance_id: str
    epoch: int


class DrainKvEvents(msgspec.Struct, tag=True):
    """Fetch the buffered (pull) KV events. They are kept until a later fetch confirms that somebody has them."""

    sequence: int
    confirmed: int = 0
    """``position`` of the last answer whose events have reached a client."""


class Shutdown(msgspec.Struct, tag=True):
    """Finish or fail what runs within ``drain_s`` seconds, then leave."""

    drain_s: float = 0.0


ToEngine = Generate | Abort | Ping | PeerDead | DrainKvEvents | Shutdown


class EngineReady(msgspec.Struct, tag=True, kw_only=True):
    """The engine is loaded and serves; facts that ``/server_info`` and the membership carry."""

    num_pages: int
    page_bytes: int
    tokens_per_block: int
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    kv_cache_hash_algo: str
    layout_digest: str
    device: str
    pid: int
    ctx_info_endpoint: str | None = None
    """Control endpoint of the transceiver, None when it is disabled."""
    ctx_address: bytes = b""
    """Signed :class:`kvmesh.protocol.disagg.ContextAddress` of this engine; empty without a transceiver."""
    transfer_backend: str | None = None
    events_endpoint: str | None = None
    replay_endpoint: str | None = None
    protocol: int = PROTOCOL_VERSION


class EngineFailed(msgspec.Struct, tag=True):
    """The engine cannot start; the process ends after this. ``message`` is for a person."""

    message: str


class RequestTimings(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Wall-clock nanoseconds since the Unix epoch of one request's phases; 0 means it did not happen."""

    arrived_ns: int = 0
    scheduled_ns: int = 0
    first_token_ns: int = 0
    transfer_start_ns: int = 0
    transfer_end_ns: int = 0
    finished_ns: int = 0
    transfer_bytes: int = 0
    transfer_pages: int = 0
    first_slice_s: float = 0.0
    """Seconds from asking for the prompt's pages until the first slice of them was here."""
    slices: list[int] = []
    """Of a traced request, two for each slice of the transfer, in order: start, end; the first ones of many. By the
    clock of the server that moved them."""
    chunks: list[int] = []
    """Of a traced request, three for each prefill chunk, in order: start, end, tokens; the first
    :data:`MAX_NOTED_CHUNKS` of them."""


class TokenOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """New tokens of one sequence."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token that stopped the sequence (EOS or a stop token id); it is the last of ``token_ids``."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    handoff: bytes = b""
    """Context kind, final output: msgpack :class:`kvmesh.protocol.disagg.HandOff`."""
    ctx_usage: CtxUsage | None = None
    """Generation first, generation kind, first output: usage as the context server counted it."""
    timings: RequestTimings | None = None
    """Set on the final output."""


class TokenBatch(msgspec.Struct, tag=True):
    """All outputs of one executor step."""

    outputs: list[TokenOutput]


class RequestFailed(msgspec.Struct, tag=True, kw_only=True):
    """A sequence ended with an error; the fields are those of :class:`kvmesh.protocol.errors.ApiError`."""

    request_id: str
    status: int
    message: str
    error_type: str = "invalid_request_error"
    code: str | None = None
    retry_after_s: int | None = None


class Pong(msgspec.Struct, tag=True):
    """Answer to :class:`Ping`."""

    sequence: int
    iteration: int


class EngineStats(msgspec.Struct, tag=True, kw_only=True):
    """Gauges now and counters since start; sent when they changed, at most four times a second."""

    iteration: int = 0
    running: int = 0
    waiting: int = 0
    """In the queue, :attr:`suspended` included."""
    suspended: int = 0
    """In the queue with their cache kept."""
    held_back: int = 0
    """In the queue until prompts before them are read: these hold the share of the cache that is lent to them."""
    in_transfer: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_evictable: int = 0
    pages_held: int = 0
    pages_pinned: int = 0
    """Under leases: transfers read or write them."""
    pages_locked: int = 0
    pages_quarantined: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    prefilled_tokens_total: int = 0
    generated_tokens_total: int = 0
    preemptions_total: int = 0
    """Times that a sequence gave way for want of pages: :attr:`suspensions_total` and :attr:`recomputations_total`."""
    suspensions_total: int = 0
    resumptions_total: int = 0
    recomputations_total: int = 0
    caches_lost_total: int = 0
    """Suspended sequences that started anew because a page was damaged in a cold tier."""
    starved_total: int = 0
    """Requests that failed because nothing could go on for want of pages."""
    evicted_pages_total: int = 0
    transfers_started_total: int = 0
    transfers_completed_total: int = 0
    transfers_failed_total: int = 0
    transfers_cancelled_total: int = 0
    transfers_timed_out_total: int = 0
    transfers_refused_total: int = 0
    """Tickets that were not accepted (forged, expired, foreign, replayed), and requests for pages not held any more."""
    transfer_links: int = 0
    """Engines that this one is paired with, as owner or receiver."""
    transfer_messages_dropped_total: int = 0
    transfer_isolated_errors_total: int = 0
    """Defects that ended the transfer or the connection of one peer, and nothing else."""
    ledger_dropped_total: int = 0
    transfer_bytes_total: int = 0
    transfer_pages_total: int = 0
    transfer_pages_reused_total: int = 0
    transfers_borrowed_total: int = 0
    """Whose pages were read here on loan: without asking their owner."""
    staging_bytes: int = 0
    """Size of each of the two staging buffers of the CPP runtime; 0 without it."""
    staging_send_used_bytes: int = 0
    staging_receive_used_bytes: int = 0
    """With rooms that stay out of use until an owner that was asked to stop has answered."""
    staging_send_waiting: int = 0
    """Transfers whose pages are here, and that wait for room in the send buffer."""
    staging_receive_waiting: int = 0
    """Transfers to here that wait for room in the receive buffer."""
    bounce_transfers_total: int = 0
    """Transfers from here whose pages went in one piece."""
    bounce_small_total: int = 0
    """Bounce regions were there, but the pages of so many transfers moved one by one: too few to gain by it."""
    bounce_contiguous_total: int = 0
    """They were in few pieces already."""
    bounce_no_room_total: int = 0
    """No run of the regions was free that holds them."""
    bounce_not_offered_total: int = 0
    """The receiver had reserved none."""
    bounce_orphaned_bytes: int = 0
    """Of the receive region: kept for transfers that ended while their owner may still write."""
    events_published_total: int = 0
    """Batches of streamed KV events."""
    events_dropped_total: int = 0
    events_blocks_stored_total: int = 0
    events_blocks_removed_total: int = 0
    events_blocks_moved_total: int = 0
    events_blocks_suppressed_total: int = 0
    events_blocks_non_target_total: int = 0
    events_blocks_dropped_total: int = 0
    events_buffered: int = 0
    """Buffered KV events that nobody has fetched."""
    events_buffered_total: int = 0
    events_buffer_dropped_total: int = 0
    integrity_checks_total: int = 0
    integrity_failures_total: int = 0
    cache: CacheReport = msgspec.field(default_factory=CacheReport)
    """The cache by tier and layer group."""


class IterationRecords(msgspec.Struct, tag=True):
    """What iterations did, oldest first; sent as often as :class:`EngineStats` at most."""

    records: list[IterationRecord]


class LedgerUpdate(msgspec.Struct, tag=True):
    """Transfer state changes for the coordinator's ledger; the front forwards them, nothing waits."""

    events: list[LedgerEvent]


class KvEventsDrained(msgspec.Struct, tag=True):
    """Answer to :class:`DrainKvEvents`."""

    sequence: int
    position: int
    events: list[KvCacheEvent]


FromEngine = (
    EngineReady
    | EngineFailed
    | TokenBatch
    | RequestFailed
    | Pong
    | EngineStats
    | IterationRecords
    | LedgerUpdate
    | KvEventsDrained
)
