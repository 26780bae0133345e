"""``disaggregated_params``: what a context server hands to a generation server through the router.

Field names are TensorRT-LLM's OpenAI-level protocol, so that its servers and routers can read ours.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvmesh.protocol.version import PROTOCOL_VERSION

__all__ = [
    "CONTEXT_FIRST",
    "GENERATION_FIRST",
    "ContextAddress",
    "CtxUsage",
    "DisaggregatedParams",
    "HandOff",
    "RequestType",
]

RequestType = Literal["context_only", "generation_only", "context_and_generation"]

CONTEXT_FIRST = 0
GENERATION_FIRST = 1
"""Values of ``schedule_style``."""


class CtxUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Usage as the context server counted it; the final answer repeats it."""

    prompt_tokens: int
    cached_tokens: int = 0


class DisaggregatedParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The JSON object ``disaggregated_params`` of an OpenAI request or choice."""

    request_type: str | None = None
    """A :data:`RequestType`, any case; lower-cased and checked at the edge. It may be left out of a whole request."""
    first_gen_tokens: list[int] | None = None
    first_gen_log_probs: list[list[object]] | None = None
    """Per first token: ``[token_id, logprob, [[token_id, logprob], ...]]``."""
    ctx_request_id: int | None = None
    disagg_request_id: int | None = None
    encoded_opaque_state: str | None = None
    """Base64 of a msgpack :class:`HandOff`; generation first, of a signed :class:`ContextAddress`."""
    draft_tokens: list[int] | None = None
    ctx_dp_rank: int | None = None
    """Attention data-parallel rank of the context server: to it, the rank that must take the leg; from it, the rank
    that holds the pages."""
    dp_rank: int | None = None
    """Attention data-parallel rank that is wanted of the server that gets this (KVMesh's own)."""
    dp_matched_tokens: int | None = None
    """Leading prompt tokens that ``dp_rank`` holds, as far as the sender knows: then the rank is a wish, weighed
    against the ranks' load. None: it is an order (KVMesh's own)."""
    ctx_info_endpoint: str | list[str] | None = None
    schedule_style: int = 0
    """0: context first, 1: generation first."""
    conversation_id: str | None = None
    ctx_usage: CtxUsage | None = None


class HandOff(msgspec.Struct, frozen=True, kw_only=True):
    """What the generation engine needs to pull a prompt's pages: signed by the page owner, opaque to everyone else."""

    ticket: bytes
    """A signed :class:`kvmesh.protocol.transfer.Ticket` (see ``kvmesh.transceiver.tickets``)."""
    control_endpoint: str
    """ZMQ endpoint of the context engine's transceiver, e.g. ``tcp://127.0.0.1:41234``."""
    instance_id: str
    epoch: int
    layout_digest: str
    seed: int
    """The resolved sampling seed: the generation server continues the same random stream."""
    protocol: int = PROTOCOL_VERSION


class ContextAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Generation first: where a generation engine asks for a prompt that a context engine has still to compute.

    Signed by the context engine (see ``kvmesh.transceiver.claims``), so that nobody can be made to dial elsewhere.
    """

    control_endpoint: str
    instance_id: str
    epoch: int
    protocol: int = PROTOCOL_VERSION
