"""Response bodies of both APIs as structs, and the pieces they are built from (usage, log-probabilities).

Encode with :func:`encode`. SSE is in :mod:`kvmesh.protocol.openai.sse`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvmesh.protocol.disagg import DisaggregatedParams
from kvmesh.protocol.openai.requests import ApiKind
from kvmesh.protocol.sampling import TokenLogprob

__all__ = [
    "ChatChoice",
    "ChatDelta",
    "ChatLogprobs",
    "ChatReply",
    "ChatResponse",
    "ChatStreamChoice",
    "ChatStreamChunk",
    "ChatTokenLogprob",
    "ChatTopLogprob",
    "CompletionChoice",
    "CompletionLogprobs",
    "CompletionResponse",
    "PromptTokensDetails",
    "Usage",
    "chat_choice",
    "chat_logprobs",
    "completion_choice",
    "completion_logprobs",
    "encode",
    "response_id",
    "token_text",
    "usage",
]

TokenBytes = Callable[[int], bytes]
"""The UTF-8 bytes of one token, maybe a part of a character."""


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    """How many prompt tokens were found in the cache."""

    cached_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    """Tokens counted for one response."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """``logprobs`` of a completions choice: parallel lists, one entry per token."""

    text_offset: list[int]
    """Where the token's text starts, in characters from the start of the choice's text."""
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]] | None


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One choice of a completions response or chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended the choice, None for EOS and length (as in vLLM)."""
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    disaggregated_params: DisaggregatedParams | msgspec.UnsetType = msgspec.UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    """Body of ``/v1/completions``, and of its stream's chunks."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class ChatTopLogprob(msgspec.Struct, kw_only=True):
    """One alternative of a token."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, kw_only=True):
    """One sampled token with its alternatives."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """``logprobs`` of a chat choice."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatReply(msgspec.Struct, kw_only=True):
    """The assistant's message."""

    role: str = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One choice of a chat response."""

    index: int
    message: ChatReply
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    disaggregated_params: DisaggregatedParams | msgspec.UnsetType = msgspec.UNSET


class ChatResponse(msgspec.Struct, kw_only=True):
    """Body of ``/v1/chat/completions``."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one chunk adds to the message; the first chunk carries the role."""

    role: str | None = None
    content: str | None = None


class ChatStreamChoice(msgspec.Struct, kw_only=True):
    """One choice of a chat chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    disaggregated_params: DisaggregatedParams | msgspec.UnsetType = msgspec.UNSET


class ChatStreamChunk(msgspec.Struct, kw_only=True):
    """One chunk of a chat stream."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatStreamChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


_encoder = msgspec.json.Encoder()


def encode(body: Any) -> bytes:
    """JSON bytes of a response, chunk or any other msgspec-encodable object."""
    return _encoder.encode(body)


def response_id(kind: ApiKind, request_id: str) -> str:
    """The ``id`` of a response: ``cmpl-...`` or ``chatcmpl-...``."""
    return f"{'cmpl' if kind == 'completions' else 'chatcmpl'}-{request_id}"


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> Usage:
    """Usage with its total."""
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
    )


def completion_choice(
    index: int,
    text: str,
    *,
    finish_reason: str | None,
    stop_reason: int | str | None = None,
    logprobs: CompletionLogprobs | None = None,
    token_ids: list[int] | None = None,
    prompt_token_ids: list[int] | None = None,
    disaggregated_params: DisaggregatedParams | None = None,
) -> CompletionChoice:
    """A completions choice; arguments that are None leave their field out where OpenAI does not have it."""
    return CompletionChoice(
        index=index,
        text=text,
        logprobs=logprobs,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        token_ids=msgspec.UNSET if token_ids is None else token_ids,
        prompt_token_ids=msgspec.UNSET if prompt_token_ids is None else prompt_token_ids,
        disaggregated_params=msgspec.UNSET if disaggregated_params is None else disaggregated_params,
    )


def chat_choice(
    index: int,
    text: str,
    *,
    finish_reason: str | None,
    stop_reason: int | str | None = None,
    logprobs: ChatLogprobs | None = None,
    token_ids: list[int] | None = None,
    prompt_token_ids: list[int] | None = None,
    disaggregated_params: DisaggregatedParams | None = None,
) -> ChatChoice:
    """A chat choice; arguments that are None leave their field out where OpenAI does not have it."""
    return ChatChoice(
        index=index,
        message=ChatReply(content=text),
        logprobs=logprobs,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        token_ids=msgspec.UNSET if token_ids is None else token_ids,
        prompt_token_ids=msgspec.UNSET if prompt_token_ids is None else prompt_token_ids,
        disaggregated_params=msgspec.UNSET if disaggregated_params is None else disaggregated_params,
    )


def token_text(raw: bytes) -> str:
    r"""A token's bytes as text; a part of a character becomes ``bytes:\xe2\x80``, as in OpenAI's API."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def completion_logprobs(
    entries: Sequence[TokenLogprob], token_bytes: TokenBytes, *, text_offsets: Sequence[int], top: int
) -> CompletionLogprobs:
    """Log-probabilities of consecutive tokens in the completions API's form.

    Args:
        entries: one per token, in order.
        token_bytes: the bytes of a token id.
        text_offsets: characters of the choice's text before each token; one that only ends a character begun by
            another has the same offset as that one.
        top: how many alternatives were asked for; 0 leaves ``top_logprobs`` null.
    """
    return CompletionLogprobs(
        text_offset=list(text_offsets),
        token_logprobs=[entry.logprob for entry in entries],
        tokens=[token_text(token_bytes(entry.token_id)) for entry in entries],
        top_logprobs=[_top_dict(entry, token_bytes, top) for entry in entries] if top else None,
    )


def chat_logprobs(entries: Sequence[TokenLogprob], token_bytes: TokenBytes, *, top: int) -> ChatLogprobs:
    """Log-probabilities of consecutive tokens in the chat API's form, with ``top`` alternatives each."""
    content = []
    for entry in entries:
        raw = token_bytes(entry.token_id)
        alternatives = [(token_bytes(token_id), logprob) for token_id, logprob in entry.top[:top]]
        content.append(
            ChatTokenLogprob(
                token=token_text(raw),
                logprob=entry.logprob,
                bytes=list(raw),
                top_logprobs=[
                    ChatTopLogprob(token=token_text(raw), logprob=logprob, bytes=list(raw))
                    for raw, logprob in alternatives
                ],
            )
        )
    return ChatLogprobs(content=content)


def _top_dict(entry: TokenLogprob, token_bytes: TokenBytes, top: int) -> dict[str, float]:
    """The ``top`` most likely tokens and the sampled one, so at most ``top + 1`` entries, as OpenAI documents."""
    found = {token_text(token_bytes(token_id)): logprob for token_id, logprob in entry.top[:top]}
    found.setdefault(token_text(token_bytes(entry.token_id)), entry.logprob)
    return found
