"""``disaggregated_params`` at a worker: what a leg is asked to do, and what it hands on."""

from __future__ import annotations

import base64
import binascii
from typing import NamedTuple

import msgspec

from kvmesh.config.worker import WorkerRole
from kvmesh.protocol.disagg import CONTEXT_FIRST, GENERATION_FIRST, CtxUsage, DisaggregatedParams, HandOff
from kvmesh.protocol.engine import RequestKind
from kvmesh.protocol.errors import ApiError, bad_request
from kvmesh.protocol.openai.validate import MAX_TOKEN_ID, request_type_of
from kvmesh.protocol.ranks import RankWish
from kvmesh.protocol.sampling import TokenLogprob
from kvmesh.protocol.version import PROTOCOL_VERSION

__all__ = ["Leg", "context_params", "leg_of", "rank_wish"]

MAX_REQUEST_ID = 2**63 - 1
_handoff_decoder = msgspec.msgpack.Decoder(HandOff)


class Leg(NamedTuple):
    """One leg of a request as the engine sees it."""

    kind: RequestKind
    transfer_id: int = 0
    first_tokens: tuple[int, ...] = ()
    first_logprobs: tuple[TokenLogprob, ...] = ()
    handoff: bytes = b""
    seed: int | None = None
    """The seed that the context server sampled with, which the generation server goes on with."""
    ctx_usage: CtxUsage | None = None
    generation_first: bool = False
    """Both legs run at once: a context leg waits for its receiver, a generation leg has no first tokens."""
    ctx_address: bytes = b""
    """Generation first, generation leg: the signed address of the context engine."""


def rank_wish(params: DisaggregatedParams | None, leg: Leg) -> RankWish:
    """What a request says of the rank that it wants; a context leg may name it as TensorRT-LLM does."""
    if params is None:
        return RankWish()
    if leg.kind == "context" and params.ctx_dp_rank is not None:
        return RankWish(params.ctx_dp_rank)
    return RankWish(params.dp_rank, params.dp_matched_tokens)


def leg_of(params: DisaggregatedParams | None, role: WorkerRole) -> Leg:
    """Which leg a request is.

    Raises:
        ApiError: 400 when the parameters are incomplete or malformed, or this server's role does not serve that leg.
    """
    kind = request_type_of(params)
    if kind == "context_and_generation":
        if role == "context":
            raise bad_request(
                "This is a context server: it serves request_type 'context_only'. Send whole requests to the router.",
                param="disaggregated_params.request_type",
            )
        return Leg("aggregated")
    assert params is not None
    if params.schedule_style not in (CONTEXT_FIRST, GENERATION_FIRST):
        raise bad_request(
            f"'schedule_style' is {params.schedule_style}; it must be {CONTEXT_FIRST} (context first) or "
            f"{GENERATION_FIRST} (generation first).",
            param="disaggregated_params.schedule_style",
        )
    generation_first = params.schedule_style == GENERATION_FIRST
    if kind == "context_only":
        if role == "generation":
            raise bad_request(
                "This is a generation server: it does not serve request_type 'context_only'.",
                param="disaggregated_params.request_type",
            )
        return Leg("context", _request_id(params, made_by_caller=True), generation_first=generation_first)
    if role == "context":
        raise bad_request(
            "This is a context server: it does not serve request_type 'generation_only'.",
            param="disaggregated_params.request_type",
        )
    return _early_generation_leg(params) if generation_first else _generation_leg(params)


def context_params(
    leg: Leg,
    token_ids: list[int],
    logprobs: list[TokenLogprob] | None,
    handoff: bytes,
    *,
    dp_rank: int,
    endpoint: str | None,
) -> DisaggregatedParams:
    """What a context server answers with: enough for a generation server to pull the pages and go on.

    Generation first there is no hand-off: the generation server hears of everything from the context engine.
    ``endpoint`` is the control endpoint of the rank that holds the pages, ``dp_rank``.
    """
    return DisaggregatedParams(
        request_type="context_only",
        first_gen_tokens=token_ids,
        first_gen_log_probs=None if logprobs is None else [_plain(entry) for entry in logprobs],
        ctx_request_id=leg.transfer_id,
        disagg_request_id=leg.transfer_id,
        encoded_opaque_state=base64.b64encode(handoff).decode() if handoff else None,
        ctx_dp_rank=dp_rank,
        ctx_info_endpoint=endpoint,
        schedule_style=GENERATION_FIRST if leg.generation_first else CONTEXT_FIRST,
    )


def _early_generation_leg(params: DisaggregatedParams) -> Leg:
    if params.first_gen_tokens:
        raise bad_request(
            "A generation-first leg has no 'first_gen_tokens': they come with the pages.",
            param="disaggregated_params.first_gen_tokens",
        )
    if params.encoded_opaque_state is None:
        raise bad_request(
            "'encoded_opaque_state' is missing; generation first it is the context server's address, which its "
            "/server_info has as ctx_addresses.",
            param="disaggregated_params.encoded_opaque_state",
        )
    try:
        address = base64.b64decode(params.encoded_opaque_state, validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad_request(
            f"'encoded_opaque_state' is no address of a context server: {error}.",
            param="disaggregated_params.encoded_opaque_state",
        ) from None
    if not address:
        raise bad_request("'encoded_opaque_state' is empty.", param="disaggregated_params.encoded_opaque_state")
    request_id = _request_id(params, made_by_caller=True)
    return Leg("generation", request_id, generation_first=True, ctx_address=address)


def _generation_leg(params: DisaggregatedParams) -> Leg:
    if not params.first_gen_tokens:
        raise _missing("first_gen_tokens")
    if not all(0 <= token <= MAX_TOKEN_ID for token in params.first_gen_tokens):
        raise bad_request("'first_gen_tokens' must be token ids.", param="disaggregated_params.first_gen_tokens")
    if params.encoded_opaque_state is None:
        raise _missing("encoded_opaque_state")
    try:
        handoff = base64.b64decode(params.encoded_opaque_state, validate=True)
        decoded = _handoff_decoder.decode(handoff)
    except (binascii.Error, ValueError, msgspec.DecodeError) as error:
        raise bad_request(
            f"'encoded_opaque_state' is not what a context server gave out: {error}.",
            param="disaggregated_params.encoded_opaque_state",
        ) from None
    if decoded.protocol != PROTOCOL_VERSION:
        raise bad_request(
            f"The context server speaks protocol {decoded.protocol} and this server {PROTOCOL_VERSION}; upgrade both.",
            code="protocol_mismatch",
        )
    return Leg(
        "generation",
        _request_id(params, made_by_caller=False),
        tuple(params.first_gen_tokens),
        tuple(_logprob(entry) for entry in params.first_gen_log_probs or ()),
        handoff,
        decoded.seed,
        params.ctx_usage,
    )


def _request_id(params: DisaggregatedParams, *, made_by_caller: bool) -> int:
    """The transfer's key: the context server's id where there is one, else the mesh-wide id.

    ``made_by_caller``: there is no context server's answer yet that it could come from.
    """
    found = params.ctx_request_id if params.ctx_request_id is not None else params.disagg_request_id
    if found is None and made_by_caller:
        raise bad_request(
            "'disagg_request_id' is missing; choose a positive 63-bit integer, the same for both legs of this request "
            "and for no other.",
            param="disaggregated_params.disagg_request_id",
        )
    if found is None:
        raise _missing("disagg_request_id")
    if not 0 < found <= MAX_REQUEST_ID:
        raise bad_request(
            f"'disagg_request_id' is {found}; it must be a positive 63-bit integer.",
            param="disaggregated_params.disagg_request_id",
        )
    return found


def _missing(name: str) -> ApiError:
    return bad_request(
        f"'{name}' is missing; it comes from the context server's answer.", param=f"disaggregated_params.{name}"
    )


def _plain(entry: TokenLogprob) -> list[object]:
    return [entry.token_id, entry.logprob, [list(pair) for pair in entry.top]]


def _logprob(entry: list[object]) -> TokenLogprob:
    try:
        return msgspec.convert(entry, TokenLogprob)
    except msgspec.ValidationError as error:
        raise bad_request(
            f"'first_gen_log_probs' must hold [token_id, logprob, [[token_id, logprob], ...]]: {error}.",
            param="disaggregated_params.first_gen_log_probs",
        ) from None
