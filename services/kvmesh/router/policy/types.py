"""The vocabulary of routing policies: candidates and a question in, a decision with every term out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

__all__ = ["Candidate", "Decision", "Policy", "Question", "Scored", "take_turns"]

DEFAULT_TOKENS_PER_BLOCK = 32
"""Used where neither the policy nor the server states a block size."""


class Candidate(NamedTuple):
    """One server that may be chosen, as the router sees it now."""

    instance_id: str
    active_requests: int = 0
    active_tokens: int = 0
    """Tokens of the active requests: those still to be computed at a context server, those held at a generation one."""
    device_tokens: int = 0
    """Leading prompt tokens that the server holds in device memory."""
    host_tokens: int = 0
    """The same counting host memory too; never less than ``device_tokens``."""
    disk_tokens: int = 0
    """The same counting the disk too; never less than ``host_tokens``."""
    tokens_per_block: int = DEFAULT_TOKENS_PER_BLOCK


class Question(NamedTuple):
    """The request to place."""

    prompt_tokens: int
    token_ids: np.ndarray | Sequence[int] = ()
    text: str | None = None
    """The prompt's text, when it has one."""
    conversation_id: str | None = None


class Scored(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One candidate's part in a decision."""

    instance_id: str
    cost: float | None = None
    """What was compared; the least wins. None where the policy compares nothing or the server was not eligible."""
    terms: dict[str, float] = {}
    """The numbers that ``cost`` is made of."""
    excluded: str | None = None
    """Why the server could not be chosen."""


class Decision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which server, by which policy, and why; feeds metrics, logs and ``/explain``."""

    policy: str
    chosen: str
    """Instance id."""
    reason: str
    """One clause for people."""
    candidates: list[Scored]


class Policy(Protocol):
    """A policy with whatever it remembers between requests."""

    name: str
    needs_matches: bool
    """Whether the indexer is to be asked before :meth:`choose`."""

    def choose(self, candidates: Sequence[Candidate], question: Question) -> Decision:
        """Pick one of at least one candidates; remembers the choice where the policy has a memory."""

    def forget(self, instance_id: str) -> None:
        """The server left: nothing remembered may lead to it."""


def take_turns(costs: Sequence[float], turn: int) -> int:
    """Index of the least cost; of several equal ones the ``turn``-th, so that ties rotate."""
    least = min(costs)
    ties = [index for index, cost in enumerate(costs) if cost == least]
    return ties[turn % len(ties)]
