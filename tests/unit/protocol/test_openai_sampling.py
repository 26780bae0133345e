"""From requests to sampling parameters: defaults, limits, seeds."""

from __future__ import annotations

import pytest

from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.openai.requests import ChatCompletionRequest, ChatMessage, CompletionRequest
from kvmesh.protocol.openai.sampling import resolve_max_tokens, resolve_seed, sampling_params


def completion(**fields: object) -> CompletionRequest:
    return CompletionRequest(model="m", prompt="x", **fields)


def chat(**fields: object) -> ChatCompletionRequest:
    return ChatCompletionRequest(model="m", messages=[ChatMessage(role="user", content="x")], **fields)


@pytest.mark.parametrize(
    ("request_", "prompt_tokens", "expected"),
    [
        (completion(), 10, 16),
        (completion(), 95, 5),
        (completion(max_tokens=90), 10, 90),
        (chat(), 10, 90),
        (chat(max_tokens=7), 10, 7),
        (chat(max_completion_tokens=8), 10, 8),
        (chat(), 99, 1),
    ],
)
def test_max_tokens(request_: CompletionRequest, prompt_tokens: int, expected: int) -> None:
    assert resolve_max_tokens(request_, prompt_tokens=prompt_tokens, max_seq_len=100) == expected


@pytest.mark.parametrize(
    ("request_", "param"), [(completion(max_tokens=91), "prompt"), (chat(max_tokens=91), "messages")]
)
def test_context_exceeded_by_asked_tokens(request_: CompletionRequest, param: str) -> None:
    with pytest.raises(ApiError, match="at most 90") as caught:
        resolve_max_tokens(request_, prompt_tokens=10, max_seq_len=100)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "context_length_exceeded", param)


def test_context_exceeded_by_prompt() -> None:
    with pytest.raises(ApiError, match="the prompt has 100") as caught:
        resolve_max_tokens(completion(), prompt_tokens=100, max_seq_len=100)
    assert caught.value.code == "context_length_exceeded"


def test_seeds() -> None:
    assert resolve_seed(7, 2) == 9
    assert resolve_seed(2**63 - 1, 1) == 0
    assert 0 <= resolve_seed(-5) < 2**63
    assert resolve_seed(-5) == resolve_seed(-5)
    assert resolve_seed(None) != resolve_seed(None)


def test_defaults_and_passing_through() -> None:
    params = sampling_params(completion(seed=1), prompt_tokens=1, max_seq_len=100)
    assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (1.0, 0, 1.0, 1.0)
    assert params.logprobs is None
    full = sampling_params(
        chat(
            temperature=0,
            top_k=-1,
            top_p=0.5,
            min_p=0.1,
            seed=3,
            logprobs=True,
            top_logprobs=4,
            stop_token_ids=[9],
            ignore_eos=True,
            min_tokens=2,
            logit_bias={5: 1.5},
            presence_penalty=0.5,
        ),
        prompt_tokens=1,
        max_seq_len=100,
        choice_index=2,
    )
    assert (full.temperature, full.top_k, full.top_p, full.min_p, full.seed) == (0, 0, 0.5, 0.1, 5)
    assert (full.logprobs, full.stop_token_ids, full.ignore_eos, full.min_tokens) == (4, [9], True, 2)
    assert (full.logit_bias, full.presence_penalty) == ({5: 1.5}, 0.5)


def test_logprobs_of_both_apis() -> None:
    assert sampling_params(chat(logprobs=True), prompt_tokens=1, max_seq_len=9).logprobs == 0
    assert sampling_params(chat(logprobs=False), prompt_tokens=1, max_seq_len=9).logprobs is None
    assert sampling_params(completion(logprobs=3), prompt_tokens=1, max_seq_len=99).logprobs == 3


def test_min_tokens_above_max_tokens() -> None:
    with pytest.raises(ApiError) as caught:
        sampling_params(completion(min_tokens=20), prompt_tokens=1, max_seq_len=100)
    assert caught.value.param == "min_tokens"
