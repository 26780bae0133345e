"""Streams of tokens from a router, and when two of the same request agree (decisions 13)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from kvmesh.models.store import DEFAULT_MODEL
from meshes.by_hand import Mesh

__all__ = ["Stream", "ask", "body", "certain"]

SAFE_MARGIN = 1e-3
"""Below it, rounding alone may swap the two best tokens."""


class Stream(NamedTuple):
    """What came of one request."""

    tokens: list[int]
    margins: list[float]
    """Each token's lead over the second best, in log probability."""


def body(prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """A request for exactly so many greedy tokens."""
    return {
        "model": DEFAULT_MODEL,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "logprobs": 2,
    }


def ask(mesh: Mesh, body: dict[str, Any]) -> Stream:
    """Ask the router; anything but a whole answer is an error."""
    status, events = mesh["router"].post("/v1/completions", body, timeout_s=200.0)
    assert status == 200, events
    assert events.pop() == "[DONE]"
    stream = Stream([], [])
    finish = []
    for event in events:
        [choice] = msgspec.json.decode(event)["choices"]
        stream.tokens.extend(choice.get("token_ids") or [])
        for top in (choice.get("logprobs") or {}).get("top_logprobs") or []:
            best, *others = sorted(top.values(), reverse=True)
            stream.margins.append(best - others[0] if others else 0.0)
        finish += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert finish == ["length"]
    assert len(stream.tokens) == len(stream.margins) == body["max_tokens"]
    return stream


def certain(alone: Sequence[Stream], answers: Sequence[Stream]) -> float:
    """Require that answers agree with those given alone, up to the first token that was a coin toss there.

    Returns:
        The share of tokens that was compared.
    """
    compared = 0
    for solo, answer in zip(alone, answers, strict=True):
        sure = next((i for i, margin in enumerate(solo.margins) if margin < SAFE_MARGIN), len(solo.margins))
        assert answer.tokens[:sure] == solo.tokens[:sure]
        compared += sure
    return compared / sum(len(solo.tokens) for solo in alone)
