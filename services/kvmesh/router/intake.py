"""What the router reads from a client's request: the body, checked, and what concerns routing and tracing."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import msgspec

from kvmesh.protocol.disagg import DisaggregatedParams
from kvmesh.protocol.errors import ApiError, bad_request
from kvmesh.protocol.openai.cache import ConversationParams, conversation_id_of
from kvmesh.protocol.openai.requests import ApiKind, ChatCompletionRequest, CompletionRequest, decode_request
from kvmesh.protocol.openai.sampling import DEFAULT_COMPLETION_MAX_TOKENS, requested_max_tokens, resolve_max_tokens
from kvmesh.protocol.openai.validate import request_type_of, validate_request

__all__ = ["conversation_of", "max_tokens_of", "passed_on", "take_in"]

Request = CompletionRequest | ChatCompletionRequest


def take_in(kind: ApiKind, body: bytes, *, model: str, vocab_size: int) -> Request:
    """Decode and check a body. A conversation that it names stands in ``conversation_params`` afterwards, stripped.

    Raises:
        ApiError: 400 naming the field at fault; 404 for another model.
    """
    request = decode_request(kind, body)
    validate_request(request, vocab_size=vocab_size)
    if request.model != model:
        raise ApiError(
            404,
            f"The model '{request.model}' does not exist here; this mesh serves '{model}'.",
            code="model_not_found",
            param="model",
        )
    _refuse_internal(request)
    named = conversation_id_of(request.conversation_params, request.disaggregated_params)
    conversation = None if named is None else ConversationParams(conversation_id=named)
    return msgspec.structs.replace(request, conversation_params=conversation, disaggregated_params=None)


def max_tokens_of(request: Request, prompt_tokens: int, max_seq_len: int) -> int | None:
    """How many tokens may be generated; None leaves it to the worker, when none states its context (0).

    Raises:
        ApiError: 400 when prompt and asked tokens exceed the context.
    """
    if max_seq_len:
        return resolve_max_tokens(request, prompt_tokens=prompt_tokens, max_seq_len=max_seq_len)
    wanted = requested_max_tokens(request)
    if wanted is None and not isinstance(request, ChatCompletionRequest):
        return DEFAULT_COMPLETION_MAX_TOKENS
    return wanted


def conversation_of(request: Request) -> str | None:
    """The conversation that a request of :func:`take_in` is routed by: the one it names, or its ``prompt_cache_key``.

    A cache key only brings similar prompts together, many at a time: servers are told of named conversations alone.
    """
    named = request.conversation_params.conversation_id if request.conversation_params is not None else None
    return named or (request.prompt_cache_key or "").strip() or None


def passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """The caller's trace context as it came; a new one where there is none, so that all servers log the same id."""
    traceparent = headers.get("traceparent")
    if traceparent is None:
        return {"traceparent": f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00"}
    passed = {"traceparent": traceparent}
    if (tracestate := headers.get("tracestate")) is not None:
        passed["tracestate"] = tracestate
    return passed


def _refuse_internal(request: Request) -> None:
    """Fields that only the router may set for its workers: from a client they could name somebody else's pages."""
    if request.prompt_token_ids is not None:
        raise bad_request(
            "'prompt_token_ids' is set by the router; send 'prompt' or 'messages'.", param="prompt_token_ids"
        )
    params = request.disaggregated_params
    if params is None:
        return
    if request_type_of(params) != "context_and_generation":
        raise bad_request(
            "The router serves whole requests; 'context_only' and 'generation_only' are between it and its servers.",
            param="disaggregated_params.request_type",
        )
    if params != DisaggregatedParams(request_type=params.request_type, conversation_id=params.conversation_id):
        raise bad_request(
            "Only 'conversation_id' may be given here; the router sets the rest.", param="disaggregated_params"
        )
