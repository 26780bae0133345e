"""From a request to the engine's sampling parameters of one sequence."""

from __future__ import annotations

import secrets

from kvmesh.protocol.errors import bad_request
from kvmesh.protocol.openai.requests import ChatCompletionRequest, CompletionRequest, GenerationRequest
from kvmesh.protocol.sampling import SamplingParams

__all__ = [
    "DEFAULT_COMPLETION_MAX_TOKENS",
    "requested_max_tokens",
    "resolve_max_tokens",
    "resolve_seed",
    "sampling_params",
]

DEFAULT_COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of ``/v1/completions``; chat defaults to the rest of the context."""

_SEED_MASK = 2**63 - 1


def requested_max_tokens(request: GenerationRequest) -> int | None:
    """The limit that the request names itself: ``max_completion_tokens`` before ``max_tokens``, None when neither."""
    if isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None:
        return request.max_completion_tokens
    return request.max_tokens


def resolve_max_tokens(request: GenerationRequest, *, prompt_tokens: int, max_seq_len: int) -> int:
    """How many tokens may be generated.

    Raises:
        ApiError: 400 ``context_length_exceeded`` when the prompt, or prompt and asked tokens, exceed the context.
    """
    param = "messages" if isinstance(request, ChatCompletionRequest) else "prompt"
    room = max_seq_len - prompt_tokens
    if room < 1:
        raise bad_request(
            f"This model's context is {max_seq_len} tokens and the prompt has {prompt_tokens}; send a shorter prompt.",
            param=param,
            code="context_length_exceeded",
        )
    wanted = requested_max_tokens(request)
    if wanted is None:
        return room if isinstance(request, ChatCompletionRequest) else min(DEFAULT_COMPLETION_MAX_TOKENS, room)
    if wanted > room:
        raise bad_request(
            f"This model's context is {max_seq_len} tokens; the prompt has {prompt_tokens} and {wanted} more were "
            f"asked for. Shorten the prompt or ask for at most {room}.",
            param=param,
            code="context_length_exceeded",
        )
    return wanted


def resolve_seed(seed: int | None, choice_index: int = 0) -> int:
    """The seed of one choice, in [0, 2**63): the given one plus the choice's index, else a random one."""
    if seed is None:
        return secrets.randbits(63)
    return (seed + choice_index) & _SEED_MASK


def sampling_params(
    request: CompletionRequest | ChatCompletionRequest,
    *,
    prompt_tokens: int,
    max_seq_len: int,
    choice_index: int = 0,
) -> SamplingParams:
    """The parameters of one sequence of a checked request.

    Args:
        request: a request that passed :func:`kvmesh.protocol.openai.validate.validate_request`.
        prompt_tokens: the prompt's length, for the default and the limit of ``max_tokens``.
        max_seq_len: the model's context in tokens.
        choice_index: index of the choice among the ``n`` of its prompt; it is added to a given seed.

    Raises:
        ApiError: 400 when the context is exceeded or ``min_tokens`` is above ``max_tokens``.
    """
    max_tokens = resolve_max_tokens(request, prompt_tokens=prompt_tokens, max_seq_len=max_seq_len)
    if (request.min_tokens or 0) > max_tokens:
        raise bad_request(
            f"'min_tokens' is {request.min_tokens}, above the {max_tokens} tokens that may be generated.",
            param="min_tokens",
        )
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens or 0,
        temperature=_or(request.temperature, 1.0),
        top_k=max(request.top_k or 0, 0),
        top_p=_or(request.top_p, 1.0),
        min_p=request.min_p or 0.0,
        seed=resolve_seed(request.seed, choice_index),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=request.logit_bias or {},
        stop_token_ids=request.stop_token_ids or [],
        ignore_eos=bool(request.ignore_eos),
        logprobs=_logprobs(request),
    )


def _logprobs(request: CompletionRequest | ChatCompletionRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    return (request.top_logprobs or 0) if request.logprobs else None


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
