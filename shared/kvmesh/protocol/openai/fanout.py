"""One request with several prompts or ``n`` choices as single sequences, and their responses as one again.

Choice ``j`` of prompt ``i`` has index ``i * n + j``, as in OpenAI's API.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvmesh.protocol.errors import bad_request
from kvmesh.protocol.openai.requests import ChatCompletionRequest, CompletionRequest, PromptInput
from kvmesh.protocol.openai.responses import Usage, usage
from kvmesh.protocol.openai.sampling import resolve_seed

__all__ = [
    "MAX_SEQUENCES",
    "SequenceSpec",
    "fan_out",
    "merge_responses",
    "merge_usage",
    "prompts_of",
    "single_request",
]

MAX_SEQUENCES = 2048
"""Prompts times ``n`` of one request: a limit that keeps one request from filling every queue."""


class SequenceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence of a request."""

    index: int
    """The choice's index in the client's response."""
    prompt_index: int
    seed: int


def prompts_of(prompt: PromptInput) -> list[str | list[int]]:
    """The prompts of a completions request, each a text or token ids.

    Raises:
        ApiError: 400 when the list is empty or mixes forms.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("'prompt' is empty; send a text or token ids.", param="prompt", code="empty_array")
    if isinstance(prompt[0], int):
        return [[_int(item, index) for index, item in enumerate(prompt)]]
    found: list[str | list[int]] = []
    for index, item in enumerate(prompt):
        if isinstance(item, int) or type(item) is not type(prompt[0]):
            raise _mixed(index)
        if item == []:
            raise bad_request("A prompt of token ids is empty.", param=f"prompt[{index}]", code="empty_array")
        found.append(item)
    return found


def fan_out(request: CompletionRequest | ChatCompletionRequest) -> list[SequenceSpec]:
    """The sequences of a checked request, in the order of their choice indexes, each with its resolved seed.

    Raises:
        ApiError: 400 when the prompts are malformed or there are more than :data:`MAX_SEQUENCES` sequences.
    """
    num_prompts = len(prompts_of(request.prompt)) if isinstance(request, CompletionRequest) else 1
    n = request.n or 1
    if num_prompts * n > MAX_SEQUENCES:
        raise bad_request(
            f"{num_prompts} prompts with n={n} are more than {MAX_SEQUENCES} sequences; send several requests.",
            param="n" if num_prompts == 1 else "prompt",
        )
    return [
        SequenceSpec(index=prompt * n + choice, prompt_index=prompt, seed=resolve_seed(request.seed, choice))
        for prompt in range(num_prompts)
        for choice in range(n)
    ]


def single_request(
    request: CompletionRequest | ChatCompletionRequest,
    sequence: SequenceSpec,
    *,
    prompt_token_ids: list[int],
    max_tokens: int | None,
    request_id: str,
) -> CompletionRequest | ChatCompletionRequest:
    """The request of one sequence, everything that the router resolves being resolved; the original is not changed.

    ``max_tokens`` of None leaves the limit to the worker. A conversation goes on in one sequence, the first.
    """
    conversation = request.conversation_params if sequence.index == 0 else None
    if isinstance(request, ChatCompletionRequest):
        return msgspec.structs.replace(
            request,
            n=None,
            seed=sequence.seed,
            prompt_token_ids=prompt_token_ids,
            max_tokens=max_tokens,
            max_completion_tokens=None,
            request_id=request_id,
            conversation_params=conversation,
        )
    return msgspec.structs.replace(
        request,
        n=None,
        best_of=None,
        seed=sequence.seed,
        prompt=list(prompt_token_ids),
        max_tokens=max_tokens,
        request_id=request_id,
        conversation_params=conversation,
    )


def merge_usage(parts: Sequence[tuple[int, Usage]]) -> Usage:
    """Usage of the whole from ``(prompt_index, usage)`` of each sequence.

    A prompt counts once however many choices it has; its cached tokens are those of its first sequence, the only one
    that can find the cache cold. Completion tokens add up.
    """
    prompts: dict[int, Usage] = {}
    for prompt_index, part in parts:
        prompts.setdefault(prompt_index, part)
    return usage(
        sum(part.prompt_tokens for part in prompts.values()),
        sum(part.completion_tokens for _, part in parts),
        sum(part.prompt_tokens_details.cached_tokens for part in prompts.values()),
    )


def merge_responses(responses: Sequence[tuple[SequenceSpec, dict[str, Any]]], *, id: str) -> dict[str, Any]:
    """One response from those of single sequences (decoded JSON, so that fields of other engines survive).

    Args:
        responses: the sequences in index order, each with its worker's response of exactly one choice.
        id: the merged response's id.
    """
    first = responses[0][1]
    choices = [{**response["choices"][0], "index": sequence.index} for sequence, response in responses]
    parts = [(sequence.prompt_index, msgspec.convert(response["usage"], Usage)) for sequence, response in responses]
    return {**first, "id": id, "choices": choices, "usage": msgspec.to_builtins(merge_usage(parts))}


def _int(item: str | int | list[int], index: int) -> int:
    if not isinstance(item, int):
        raise _mixed(index)
    return item


def _mixed(index: int) -> Exception:
    return bad_request(
        "'prompt' must be a text, a list of texts, a list of token ids or a list of lists of token ids, not a mixture.",
        param=f"prompt[{index}]",
    )
