"""What a request says about the cache: retention (§3.1) and conversation (§1.3), checked and in the engine's form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvmesh.protocol.disagg import DisaggregatedParams
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.openai.cache import ConversationParams, conversation_id_of, retention_of
from kvmesh.protocol.openai.requests import decode_request
from kvmesh.protocol.openai.validate import validate_request
from kvmesh.protocol.retention import RetentionConfig, TokenRangeRetention

BODIES = {
    "completions": {"model": "m", "prompt": "hello"},
    "chat": {"model": "m", "messages": [{"role": "user", "content": "hello"}]},
}
RANGE = {"token_start": 0, "priority": 50}
RANGES = "kv_cache_retention_config.token_range_retention_configs"


def retention(kind: str, config: Any) -> RetentionConfig | None:
    request = decode_request(kind, json.dumps({**BODIES[kind], "kv_cache_retention_config": config}).encode())
    validate_request(request)
    return retention_of(request.kv_cache_retention_config)


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_every_field_of_tensorrt_llm_s_form(kind: str) -> None:
    config = {
        "token_range_retention_configs": [
            {"token_start": 0, "token_end": 17, "priority": 100, "duration_ms": 30_000},
            {"token_start": 17, "token_end": None, "priority": 0, "duration_ms": None},
        ],
        "decode_retention_priority": 20,
        "decode_duration_ms": 500,
        "transfer_mode": "DRAM",
        "directory": "",
    }
    assert retention(kind, config) == RetentionConfig(
        token_range_retention_configs=(
            TokenRangeRetention(token_start=0, token_end=17, priority=100, duration_ms=30_000),
            TokenRangeRetention(token_start=17, priority=0),
        ),
        decode_retention_priority=20,
        decode_duration_ms=500,
    )


def test_nothing_said_is_the_default_and_absent_is_none() -> None:
    assert retention("chat", {}) == RetentionConfig()
    assert retention("chat", {"token_range_retention_configs": None, "transfer_mode": None}) == RetentionConfig()
    assert retention("chat", None) is None


@pytest.mark.parametrize(
    ("config", "param"),
    [
        ({"token_range_retention_configs": [{**RANGE, "priority": 101}]}, f"{RANGES}[0].priority"),
        ({"token_range_retention_configs": [RANGE, {**RANGE, "priority": -1}]}, f"{RANGES}[1].priority"),
        ({"token_range_retention_configs": [{**RANGE, "priority": 1.5}]}, f"{RANGES}[0].priority"),
        ({"token_range_retention_configs": [{**RANGE, "priority": True}]}, f"{RANGES}[0].priority"),
        ({"token_range_retention_configs": [{"token_start": 0}]}, f"{RANGES}[0].priority"),
        ({"token_range_retention_configs": [{"priority": 5}]}, f"{RANGES}[0].token_start"),
        ({"token_range_retention_configs": [{**RANGE, "token_start": -1}]}, f"{RANGES}[0].token_start"),
        ({"token_range_retention_configs": [{**RANGE, "token_start": 2**31}]}, f"{RANGES}[0].token_start"),
        ({"token_range_retention_configs": [{**RANGE, "token_end": 0}]}, f"{RANGES}[0].token_end"),
        ({"token_range_retention_configs": [{**RANGE, "token_end": 2**70}]}, f"{RANGES}[0].token_end"),
        ({"token_range_retention_configs": [{**RANGE, "duration_ms": 0}]}, f"{RANGES}[0].duration_ms"),
        ({"token_range_retention_configs": [{**RANGE, "duration_ms": 10**12 + 1}]}, f"{RANGES}[0].duration_ms"),
        ({"token_range_retention_configs": [{**RANGE, "prio": 1}]}, f"{RANGES}[0].prio"),
        ({"token_range_retention_configs": [5]}, f"{RANGES}[0]"),
        ({"token_range_retention_configs": {}}, RANGES),
        ({"token_range_retention_configs": [RANGE] * 257}, RANGES),
        ({"decode_retention_priority": 101}, "kv_cache_retention_config.decode_retention_priority"),
        ({"decode_retention_priority": "35"}, "kv_cache_retention_config.decode_retention_priority"),
        ({"decode_duration_ms": -5}, "kv_cache_retention_config.decode_duration_ms"),
        ({"decode_duration_ms": 10**400}, "kv_cache_retention_config.decode_duration_ms"),
        ({"transfer_mode": "GDS"}, "kv_cache_retention_config.transfer_mode"),
        ({"directory": "/tmp"}, "kv_cache_retention_config.directory"),
        ({"decode_priority": 5}, "kv_cache_retention_config.decode_priority"),
    ],
)
@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_what_is_wrong_is_named(kind: str, config: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        retention(kind, config)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert len(caught.value.message) < 400


def test_debugging_options_say_why_they_are_refused() -> None:
    with pytest.raises(ApiError, match=r"debugging only.*Leave it out") as caught:
        retention("chat", {"transfer_mode": "POSIX_DEBUG_FALLBACK"})
    assert caught.value.code == "unsupported_parameter"


def conversation(newer: str | None, older: str | None) -> str | None:
    params = DisaggregatedParams(request_type="context_and_generation", conversation_id=older)
    return conversation_id_of(ConversationParams(conversation_id=newer), params)


@pytest.mark.parametrize(
    ("newer", "older", "found"),
    [
        (" chat-1 ", None, "chat-1"),
        (None, "\tchat-1\n", "chat-1"),
        ("chat-1", " chat-1", "chat-1"),
        ("", None, None),
        ("  ", "", None),
        (None, None, None),
    ],
)
def test_conversation_ids_are_stripped_and_empty_ones_are_none(
    newer: str | None, older: str | None, found: str | None
) -> None:
    """§1.3: conversation id is stripped; empty -> none."""
    assert conversation(newer, older) == found
    assert conversation_id_of(None, None) is None


@pytest.mark.parametrize(("newer", "older"), [("a", "b"), ("x" * 513, None), (None, "x" * 513)])
def test_conversation_ids_that_differ_or_are_too_long_are_refused(newer: str | None, older: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        conversation(newer, older)
    assert caught.value.status == 400
