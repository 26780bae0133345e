"""Decoding and checking request bodies: what is refused names the field at fault, in OpenAI's shape."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.openai.chat import template_messages
from kvmesh.protocol.openai.requests import ChatCompletionRequest, CompletionRequest, decode_request
from kvmesh.protocol.openai.validate import request_type_of, validate_request
from kvmesh.worker.disagg import leg_of

COMPLETION = {"model": "m", "prompt": "hello"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def check(kind: str, body: dict[str, Any] | bytes, **kwargs: Any) -> CompletionRequest | ChatCompletionRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = decode_request(kind, raw)
    validate_request(request, **kwargs)
    return request


def refused(kind: str, body: dict[str, Any] | bytes, **kwargs: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        check(kind, body, **kwargs)
    error = caught.value
    assert error.status == 400
    assert set(error.body()["error"]) == {"message", "type", "param", "code"}
    assert error.type == "invalid_request_error"
    assert error.code, "docs/api.md: every 400 has a code"
    return error


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 10**30}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"temperature": 100.5}, "temperature"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty"),
        ({"repetition_penalty": 100.5}, "repetition_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"request_id": "a b"}, "request_id"),
        ({"model": ""}, "model"),
        ({"disaggregated_params": {"request_type": "everything"}}, "disaggregated_params.request_type"),
        ({"disaggregated_params": {"first_gen_tokens": [1]}}, "disaggregated_params.request_type"),
        ({"disaggregated_params": {"conversation_id": "c", "ctx_request_id": 5}}, "disaggregated_params.request_type"),
        ({"disaggregated_params": {"schedule_style": 1}}, "disaggregated_params.request_type"),
        ({"kv_cache_retention_config": []}, "kv_cache_retention_config"),
        ({"conversation_params": {"conversation_id": 5}}, "conversation_params.conversation_id"),
        ({"conversation_params": {"turn": 5}}, "conversation_params.turn"),
        ({"lora_request": {}}, "lora_request"),
        ({"guided_json": {}}, "guided_json"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"temprature": 1}, "temprature"),
    ],
)
@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_refuses_naming_the_field(kind: str, extra: dict[str, Any], param: str) -> None:
    error = refused(kind, {**(COMPLETION if kind == "completions" else CHAT), **extra})
    assert error.param == param
    assert param.rpartition(".")[2].partition("[")[0] in error.message


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"tools": []}, "tools"),
    ],
)
def test_completion_refuses(extra: dict[str, Any], param: str) -> None:
    assert refused("completions", {**COMPLETION, **extra}).param == param


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"chat_template": "x"}, "chat_template"),
    ],
)
def test_chat_refuses(extra: dict[str, Any], param: str) -> None:
    assert refused("chat", {**CHAT, **extra}).param == param


@pytest.mark.parametrize(
    "extra",
    [
        {"tools": [], "tool_choice": "none", "functions": [], "response_format": {"type": "text"}},
        {"tools": None, "temperature": None, "stop": None, "n": None, "stream": None, "logit_bias": None},
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "s"},
        {"logprobs": True, "top_logprobs": 20, "max_completion_tokens": 5, "max_tokens": 5},
        {"temperature": 3.5, "top_k": -1, "min_p": 0, "ignore_eos": True, "stop_token_ids": [0]},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
        {"disaggregated_params": {"request_type": "Context_And_Generation", "conversation_id": "c"}},
        {"logit_bias": {"5": -100, "6": 100.0}, "seed": -(2**63)},
    ],
)
def test_chat_accepts(extra: dict[str, Any]) -> None:
    check("chat", {**CHAT, **extra})


def test_unknown_field_hints_at_the_nearest() -> None:
    assert "Did you mean 'temperature'?" in refused("completions", {**COMPLETION, "temprature": 1}).message
    assert "Did you mean" not in refused("completions", {**COMPLETION, "zzz": 1}).message


@pytest.mark.parametrize(
    ("extra", "param", "nearest"),
    [
        (
            {"kv_cache_retention_config": {"decode_retention_prio": 1}},
            "kv_cache_retention_config.decode_retention_prio",
            "decode_retention_priority",
        ),
        (
            {"kv_cache_retention_config": {"token_range_retention_configs": [{"token_strt": 0, "priority": 1}]}},
            "kv_cache_retention_config.token_range_retention_configs[0].token_strt",
            "token_start",
        ),
        ({"conversation_params": {"conversation": "c"}}, "conversation_params.conversation", "conversation_id"),
        ({"stream": True, "stream_options": {"includ_usage": True}}, "stream_options.includ_usage", "include_usage"),
    ],
)
def test_unknown_fields_of_nested_objects_hint_too(extra: dict[str, Any], param: str, nearest: str) -> None:
    for kind, body in (("completions", COMPLETION), ("chat", CHAT)):
        error = refused(kind, {**body, **extra})
        assert (error.param, error.code) == (param, "unknown_parameter")
        assert error.message.endswith(f"Did you mean '{nearest}'?")


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"cache_salt": ""}, "cache_salt"),
        ({"conversation_params": {"conversation_id": "c" * 513}}, "conversation_params.conversation_id"),
        ({"disaggregated_params": {"request_type": "everything"}}, "disaggregated_params.request_type"),
    ],
)
def test_values_that_mean_nothing_have_a_code(extra: dict[str, Any], param: str) -> None:
    error = refused("completions", {**COMPLETION, **extra})
    assert (error.param, error.code) == (param, "invalid_value")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"model":"\xff"}', b"{" * 100_000, b'{"a":' + b"[" * 100_000]
)
def test_malformed_bodies(body: bytes) -> None:
    refused("completions", body)


def test_missing_fields_are_named() -> None:
    assert refused("completions", {"prompt": "x"}).param == "model"
    assert refused("completions", {"model": "m"}).param == "prompt"
    assert refused("chat", {"model": "m"}).param == "messages"


def test_vocabulary_bounds_ids() -> None:
    assert refused("chat", {**CHAT, "logit_bias": {"100": 1}}, vocab_size=100).param == "logit_bias"
    assert refused("chat", {**CHAT, "stop_token_ids": [100]}, vocab_size=100).param == "stop_token_ids"
    check("chat", {**CHAT, "logit_bias": {"99": 1}}, vocab_size=100)


@pytest.mark.parametrize("text", ["context_only", "CONTEXT_ONLY", "Context_Only"])
def test_request_type_ignores_case(text: str) -> None:
    request = check("chat", {**CHAT, "disaggregated_params": {"request_type": text}})
    assert request_type_of(request.disaggregated_params) == "context_only"


@pytest.mark.parametrize("params", [{}, {"conversation_id": "c"}, {"request_type": None, "conversation_id": "c"}])
def test_a_request_without_type_and_leg_is_whole(params: dict[str, Any]) -> None:
    """§5.1: ``request_type`` says which leg; what belongs to none needs no type, at the router or at a worker."""
    request = check("chat", {**CHAT, "disaggregated_params": params})
    assert request_type_of(request.disaggregated_params) == "context_and_generation"
    assert leg_of(request.disaggregated_params, "both").kind == "aggregated"
    with pytest.raises(ApiError, match="Send whole requests to the router"):
        leg_of(request.disaggregated_params, "context")


def test_template_messages_are_plain() -> None:
    request = check(
        "chat",
        {
            "model": "m",
            "messages": [
                {"role": "developer", "content": "be brief"},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                    "name": "x",
                },
            ],
        },
    )
    assert isinstance(request, ChatCompletionRequest)
    assert template_messages(request) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "x"},
    ]


@pytest.mark.parametrize(("kind", "body"), [("completions", COMPLETION), ("chat", CHAT)])
def test_stop_ids_must_leave_a_token_for_min_tokens(kind: str, body: dict[str, Any]) -> None:
    everything = {**body, "stop_token_ids": [0, 1, 2, 3]}
    assert refused(kind, {**everything, "min_tokens": 1}, vocab_size=4).param == "stop_token_ids"
    check(kind, everything, vocab_size=4)
    check(kind, {**everything, "min_tokens": 1}, vocab_size=5)


@pytest.mark.parametrize("extra", [{"temperature": 1e-46}, {"temperature": 100}, {"repetition_penalty": 0.01}])
def test_extreme_but_usable_values_pass(extra: dict[str, float]) -> None:
    check("completions", {**COMPLETION, **extra})
