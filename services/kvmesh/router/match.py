"""What a router knows of who holds how much of a prompt: the interface of what answers that, and the answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import anyio
import numpy as np
from anyio.abc import TaskStatus

from kvmesh.protocol.match import WorkerMatch
from kvmesh.protocol.members import MemberEvent
from kvmesh.router.policy.kv_cache_aware import tier_credit

__all__ = ["MatchState", "Matcher", "Matches", "NoMatcher", "Route", "best_ranks"]

MatchState = Literal["answered", "off", "timed_out", "unreachable", "resting"]
"""``off``: no index is configured; ``resting``: left alone after failures."""


class Matches(NamedTuple):
    """What is known of one prompt."""

    state: MatchState
    by_server: Mapping[str, WorkerMatch] = {}
    """By instance id; the best rank of each server."""


class Route(NamedTuple):
    """A prompt that has just been sent to a server."""

    instance_id: str
    dp_rank: int
    model: str
    token_ids: np.ndarray
    """int32 ``[n]``."""
    block_size: int
    """Tokens per block of that server."""
    cache_salt: str | None = None


class Matcher:
    """Interface of what answers for prefixes."""

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Be there until cancelled; nothing to do by default."""
        task_status.started()

    def hear(self, event: MemberEvent) -> None:
        """A change of the membership; of no interest by default."""

    async def match(
        self, model: str, token_ids: np.ndarray, *, lora_id: int | None = None, cache_salt: str | None = None
    ) -> Matches:
        """Matches of an int32 ``[n]`` prompt; returns within the bound, never raises for the indexer's sake."""
        raise NotImplementedError

    def routed(self, route: Route) -> None:
        """A prompt was sent to a server, which will soon hold it; never waits. Of no interest by default."""

    def statistics(self) -> dict[str, float]:
        """Counters by outcome."""
        return {}


class NoMatcher(Matcher):
    """No index: every prompt is new to everyone."""

    async def match(
        self, model: str, token_ids: np.ndarray, *, lora_id: int | None = None, cache_salt: str | None = None
    ) -> Matches:
        """See :class:`Matcher`."""
        del model, token_ids, lora_id, cache_salt
        return Matches("off")


def best_ranks(matches: Iterable[WorkerMatch]) -> dict[str, WorkerMatch]:
    """The match of each server's best rank; of equal ones the first."""
    best: dict[str, WorkerMatch] = {}
    for match in matches:
        known = best.get(match.instance_id)
        if known is None or _worth(match) > _worth(known):
            best[match.instance_id] = match
    return best


def _worth(match: WorkerMatch) -> float:
    return tier_credit(match.device_tokens, match.host_tokens, match.disk_tokens)
