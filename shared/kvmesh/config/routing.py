"""Routing policies: how a router picks a server, with TensorRT-LLM's names and arguments."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from kvmesh.config.base import StrictModel

__all__ = [
    "POLICY_TYPES",
    "ConversationPolicy",
    "KvCacheAwarePolicy",
    "LoadBalancingPolicy",
    "RoundRobinPolicy",
    "RoutingPolicy",
]

POLICY_TYPES = ("round_robin", "load_balancing", "kv_cache_aware", "conversation")


class _ServerLimits(StrictModel):
    """Limits that TensorRT-LLM's files hand down to a policy; read so that those files load, and without effect."""

    max_batch_size: Annotated[int, Field(gt=0)] = 64
    """Requests that one server runs at a time. Without effect: servers announce their own."""
    max_num_tokens: Annotated[int, Field(gt=0)] | None = None
    """Tokens that one server computes per step. Without effect: servers announce their own."""


class RoundRobinPolicy(_ServerLimits):
    """Servers in turn."""

    type: Literal["round_robin"] = "round_robin"
    """The policy's name."""


class LoadBalancingPolicy(_ServerLimits):
    """The server with the least load; ties take turns."""

    type: Literal["load_balancing"] = "load_balancing"
    """The policy's name."""
    use_tokens: bool = False
    """Count the load in prompt tokens instead of requests."""


class KvCacheAwarePolicy(_ServerLimits):
    """The server that holds most of the prompt, less its load."""

    type: Literal["kv_cache_aware"] = "kv_cache_aware"
    """The policy's name."""
    use_tokens: bool = False
    """Count the load in prompt tokens instead of requests."""
    tokens_per_block: Annotated[int, Field(gt=1)] | None = None
    """Block size of the servers in tokens; unset: what they announce."""
    custom_tokenizer: str | None = None
    """Tokenizer to use instead of the model's."""
    load_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Blocks of matched prefix that one running request on a server outweighs."""
    load_cap: Annotated[int, Field(gt=0)] | None = None
    """Running requests above which a server is not chosen for its matches; unset: no cap."""


class ConversationPolicy(_ServerLimits):
    """The server that had the conversation before; else the one with the least load."""

    type: Literal["conversation"] = "conversation"
    """The policy's name."""
    match_threshold: Annotated[float, Field(ge=0, le=1)] = 0.75
    """Share of a prompt's blocks that must match a known conversation to follow it."""
    tokens_per_block: Annotated[int, Field(gt=0)] = 128
    """Block size, in tokens or characters, of the conversation index."""
    use_token_ids: bool = False
    """Compare token ids instead of text."""
    hash_skip_count: Annotated[int, Field(ge=0)] = 0
    """Leading tokens or characters that are left out of the comparison (a shared system prompt)."""
    max_sessions: Annotated[int, Field(gt=0)] = 100_000
    """Conversations remembered; the least recently used is forgotten first."""


def _policy_type(value: Any) -> str | None:
    """The tag of a policy; one that names no type refines the default."""
    tag = value.get("type", "kv_cache_aware") if isinstance(value, dict) else getattr(value, "type", None)
    return tag if isinstance(tag, str) else None


RoutingPolicy = Annotated[
    Annotated[RoundRobinPolicy, Tag("round_robin")]
    | Annotated[LoadBalancingPolicy, Tag("load_balancing")]
    | Annotated[KvCacheAwarePolicy, Tag("kv_cache_aware")]
    | Annotated[ConversationPolicy, Tag("conversation")],
    Discriminator(
        _policy_type,
        custom_error_type="unknown_policy",
        custom_error_message=f"unknown router type; use {', '.join(POLICY_TYPES[:-1])} or {POLICY_TYPES[-1]}",
    ),
]
"""One of the policies, told apart by ``type``."""
