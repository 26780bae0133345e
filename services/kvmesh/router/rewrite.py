"""Changes to what workers answer: the context server's usage put in, and a whole answer turned into a stream."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from kvmesh.protocol.disagg import CtxUsage
from kvmesh.protocol.openai.requests import ApiKind
from kvmesh.protocol.openai.responses import encode
from kvmesh.protocol.openai.sse import DONE, event_data, sse_event

__all__ = ["as_events", "has_usage", "rewrite_usage", "rewrite_usage_events"]

_USAGE = re.compile(rb'"usage":\s*\{')
"""A usage object; text that a model wrote cannot match, its quotes are escaped."""


def has_usage(events: bytes) -> bool:
    """Whether one of these events has a usage object."""
    return _USAGE.search(events) is not None


def rewrite_usage(body: dict[str, Any], truth: CtxUsage) -> None:
    """Set the prompt side of a response's or chunk's usage to the context server's; the completion side stays."""
    usage = body["usage"]
    usage["prompt_tokens"] = truth.prompt_tokens
    usage["total_tokens"] = truth.prompt_tokens + usage.get("completion_tokens", 0)
    details = usage.get("prompt_tokens_details")
    usage["prompt_tokens_details"] = {**(details or {}), "cached_tokens": truth.cached_tokens}


def rewrite_usage_events(events: bytes, truth: CtxUsage) -> bytes:
    """Complete events with the context server's usage; events without usage keep every byte."""
    if not has_usage(events):
        return events
    return b"".join(_rewritten(event + b"\n\n", truth) for event in events.split(b"\n\n")[:-1])


def as_events(kind: ApiKind, response: dict[str, Any], *, include_usage: bool) -> bytes:
    """The stream that says what a whole response of one choice says."""
    head = {key: value for key, value in response.items() if key not in ("choices", "usage")}
    if include_usage:
        head["usage"] = None
    [choice] = response["choices"]
    choices = [choice] if kind == "completions" else _chat_deltas(choice)
    if kind == "chat":
        head["object"] = "chat.completion.chunk"
    events = [sse_event(encode({**head, "choices": [part]})) for part in choices]
    if include_usage:
        events.append(sse_event(encode({**head, "choices": [], "usage": response["usage"]})))
    return b"".join([*events, DONE])


def _chat_deltas(choice: dict[str, Any]) -> list[dict[str, Any]]:
    message = choice["message"]
    last = {key: value for key, value in choice.items() if key not in ("message", "prompt_token_ids")}
    first: dict[str, Any] = {
        "index": choice["index"],
        "delta": {"role": message["role"], "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    if "prompt_token_ids" in choice:
        first["prompt_token_ids"] = choice["prompt_token_ids"]
    return [first, {**last, "delta": {"content": message["content"]}}]


def _rewritten(event: bytes, truth: CtxUsage) -> bytes:
    if not has_usage(event):
        return event
    try:
        body = msgspec.json.decode(event_data(event))
    except msgspec.DecodeError:
        return event
    if not isinstance(body, dict) or not isinstance(body.get("usage"), dict):
        return event
    rewrite_usage(body, truth)
    return sse_event(encode(body))
