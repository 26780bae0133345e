"""Several prompts and ``n`` choices as single sequences, and back."""

from __future__ import annotations

import msgspec
import pytest

from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.openai.fanout import fan_out, merge_responses, merge_usage, prompts_of, single_request
from kvmesh.protocol.openai.requests import ChatCompletionRequest, ChatMessage, CompletionRequest
from kvmesh.protocol.openai.responses import usage


def completion(prompt: object, **fields: object) -> CompletionRequest:
    return CompletionRequest(model="m", prompt=prompt, **fields)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompt_forms(prompt: object, expected: list[object]) -> None:
    assert prompts_of(prompt) == expected


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        (["a", 1], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        ([[1], "a"], "prompt[1]"),
        ([[1], []], "prompt[1]"),
    ],
)
def test_mixed_or_empty_prompts(prompt: object, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        prompts_of(prompt)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_fan_out_order_and_seeds() -> None:
    specs = fan_out(completion(["a", "b"], n=2, seed=10))
    assert [(spec.index, spec.prompt_index, spec.seed) for spec in specs] == [
        (0, 0, 10),
        (1, 0, 11),
        (2, 1, 10),
        (3, 1, 11),
    ]
    unseeded = fan_out(completion("a", n=3))
    assert len({spec.seed for spec in unseeded}) == 3


def test_too_many_sequences() -> None:
    with pytest.raises(ApiError):
        fan_out(completion(["a"] * 100, n=100))


def test_single_request_keeps_the_rest() -> None:
    request = ChatCompletionRequest(
        model="m", messages=[ChatMessage(role="user", content="x")], n=3, temperature=0.5, max_completion_tokens=9
    )
    single = single_request(request, fan_out(request)[1], prompt_token_ids=[1, 2], max_tokens=9, request_id="r-1")
    assert (single.n, single.prompt_token_ids, single.max_tokens, single.request_id) == (None, [1, 2], 9, "r-1")
    assert single.temperature == 0.5
    assert request.n == 3
    text = completion("hello", best_of=2, n=2)
    ids = single_request(text, fan_out(text)[0], prompt_token_ids=[4], max_tokens=None, request_id="r")
    assert (ids.prompt, ids.best_of, ids.prompt_token_ids) == ([4], None, None)


def test_merge_usage_counts_each_prompt_once() -> None:
    total = merge_usage([(0, usage(10, 3, 2)), (0, usage(10, 4, 10)), (1, usage(5, 1, 0))])
    assert (total.prompt_tokens, total.completion_tokens, total.total_tokens) == (15, 8, 23)
    assert total.prompt_tokens_details.cached_tokens == 2


def test_merge_responses() -> None:
    request = completion(["a", "b"])
    parts = [
        (
            spec,
            {
                "id": f"cmpl-{spec.index}",
                "created": 1,
                "choices": [{"index": 0, "text": str(spec.index), "extra": True}],
                "usage": msgspec.to_builtins(usage(2, 1)),
            },
        )
        for spec in fan_out(request)
    ]
    merged = merge_responses(parts, id="cmpl-x")
    assert merged["id"] == "cmpl-x"
    assert [(choice["index"], choice["text"], choice["extra"]) for choice in merged["choices"]] == [
        (0, "0", True),
        (1, "1", True),
    ]
    assert merged["usage"]["total_tokens"] == 6
