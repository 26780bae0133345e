"""Routing policies: pure functions from candidates to a decision, in thin classes that hold what they remember."""

from __future__ import annotations

from kvmesh.config.routing import (
    ConversationPolicy,
    KvCacheAwarePolicy,
    LoadBalancingPolicy,
    RoundRobinPolicy,
    RoutingPolicy,
)
from kvmesh.router.policy.conversation import Conversation, ConversationArgs
from kvmesh.router.policy.kv_cache_aware import KvCacheAware, KvCacheAwareArgs
from kvmesh.router.policy.load_balancing import LoadBalancing
from kvmesh.router.policy.round_robin import RoundRobin
from kvmesh.router.policy.types import Candidate, Decision, Policy, Question, Scored

__all__ = ["Candidate", "Decision", "Policy", "Question", "Scored", "make_policy"]


def make_policy(settings: RoutingPolicy) -> Policy:
    """The policy that the settings describe, with an empty memory."""
    match settings:
        case RoundRobinPolicy():
            return RoundRobin()
        case LoadBalancingPolicy():
            return LoadBalancing(use_tokens=settings.use_tokens)
        case KvCacheAwarePolicy():
            return KvCacheAware(
                KvCacheAwareArgs(
                    use_tokens=settings.use_tokens, load_weight=settings.load_weight, load_cap=settings.load_cap
                )
            )
        case ConversationPolicy():
            return Conversation(
                ConversationArgs(
                    match_threshold=settings.match_threshold,
                    tokens_per_block=settings.tokens_per_block,
                    use_token_ids=settings.use_token_ids,
                    hash_skip_count=settings.hash_skip_count,
                    max_sessions=settings.max_sessions,
                )
            )
