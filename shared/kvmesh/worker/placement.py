"""Which attention data-parallel rank of a server gets a sequence.

In this order:

1. the rank that the request names as an order;
2. the rank where its conversation is;
3. the rank of least cost, by the router's formula for servers (``kvmesh.router.policy.kv_cache_aware``):

    cost = (blocks of the prompt - blocks that the rank holds) + sequences under way there

   Of equal ones the least loaded, and then they take turns.

What a rank holds is an estimate: the blocks of the prompts that it was given last, as many as its cache has pages, and
what a router knows of it from KV events. A wrong estimate costs a prefill, nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvmesh.hashing.local import local_hashes, sequence_hashes
from kvmesh.protocol.engine import Generate
from kvmesh.protocol.errors import bad_request

__all__ = ["PromptMemory", "RankPlacer", "RankView", "least_cost"]

MAX_CONVERSATIONS = 100_000
"""Remembered with their rank; the one that was silent for longest goes first."""
_MASK = 2**64 - 1


class RankView(NamedTuple):
    """One rank, as seen when a sequence is placed."""

    held_blocks: int
    """Leading blocks of the prompt that it holds."""
    active: int
    """Sequences under way."""


def least_cost(ranks: Sequence[RankView], num_blocks: int, turn: int) -> int:
    """The rank for a prompt of ``num_blocks`` blocks; ``turn`` settles what cost and load leave open."""
    keys = [(num_blocks - view.held_blocks + view.active, view.active) for view in ranks]
    least = min(keys)
    ties = [rank for rank, key in enumerate(keys) if key == least]
    return ties[turn % len(ties)]


class PromptMemory:
    """The latest prompts of one rank, as hashes of their prefixes.

    Args:
        capacity_blocks: most blocks remembered; the least recently used go first, the ends of prompts before their
            beginnings, as in a cache.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def held(self, prefixes: Sequence[int]) -> int:
        """How many leading blocks of a prompt are remembered."""
        blocks = self._blocks
        for position, prefix in enumerate(prefixes):
            if prefix not in blocks:
                return position
        return len(prefixes)

    def remember(self, prefixes: Sequence[int]) -> None:
        """The rank gets this prompt."""
        blocks = self._blocks
        for prefix in reversed(prefixes[: self._capacity]):
            blocks[prefix] = None
            blocks.move_to_end(prefix)
        while len(blocks) > self._capacity:
            blocks.popitem(last=False)


class RankPlacer:
    """Places sequences on the ranks of one server.

    Args:
        size: number of ranks.
        tokens_per_block: length of a cache block.
        capacity_blocks: of one rank's cache; 0 where nothing is reused.
    """

    def __init__(self, size: int, *, tokens_per_block: int, capacity_blocks: int) -> None:
        self._memories = [PromptMemory(capacity_blocks) for _ in range(size)]
        self._tokens_per_block = tokens_per_block
        self._reuses = capacity_blocks > 0
        self._conversations: OrderedDict[tuple[str | None, str], int] = OrderedDict()
        self._turn = 0

    def place(self, request: Generate, active: Sequence[int]) -> int:
        """The rank that gets a sequence; it is remembered there.

        Args:
            request: the sequence; ``dp_rank`` and ``dp_matched_tokens`` are what its sender wants and knows.
            active: sequences under way by rank.

        Raises:
            ApiError: 400, a rank is ordered that there is not; a wish for one counts for nothing.
        """
        size = len(self._memories)
        is_order = request.dp_rank is not None and request.dp_matched_tokens is None
        if is_order and not 0 <= (request.dp_rank or 0) < size:
            raise bad_request(
                f"Rank {request.dp_rank} was asked for; this server has the attention data-parallel ranks 0 to "
                f"{size - 1}.",
                param="disaggregated_params",
                code="no_such_rank",
            )
        if size == 1:
            return 0
        prefixes = self._prefixes(request)
        rank = self._ordered(request)
        if rank is None:
            rank = self._cheapest(request, prefixes, active)
        self._memories[rank].remember(prefixes)
        if request.conversation_id is not None:
            self._stay(request, request.conversation_id, rank)
        return rank

    def _ordered(self, request: Generate) -> int | None:
        if request.dp_rank is not None and request.dp_matched_tokens is None:
            return request.dp_rank
        if request.conversation_id is None:
            return None
        return self._conversations.get((request.cache_salt, request.conversation_id))

    def _cheapest(self, request: Generate, prefixes: Sequence[int], active: Sequence[int]) -> int:
        views = []
        for rank, memory in enumerate(self._memories):
            held = memory.held(prefixes)
            if rank == request.dp_rank and request.dp_matched_tokens is not None and self._reuses:
                held = max(held, min(request.dp_matched_tokens // self._tokens_per_block, len(prefixes)))
            views.append(RankView(held, active[rank]))
        self._turn += 1
        return least_cost(views, len(prefixes), self._turn - 1)

    def _stay(self, request: Generate, conversation_id: str, rank: int) -> None:
        conversation = (request.cache_salt, conversation_id)
        self._conversations[conversation] = rank
        self._conversations.move_to_end(conversation)
        if len(self._conversations) > MAX_CONVERSATIONS:
            self._conversations.popitem(last=False)

    def _prefixes(self, request: Generate) -> list[int]:
        """A hash for each prefix of full blocks; prompts of different scopes have none in common."""
        if not self._reuses:
            return []
        tokens: NDArray[np.int32] = np.frombuffer(request.prompt_token_ids, dtype="<i4")
        scope = (request.cache_salt, request.lora_id)
        root = None if scope == (None, None) else hash(scope) & _MASK
        prefixes: list[int] = sequence_hashes(local_hashes(tokens, self._tokens_per_block), root).tolist()
        return prefixes
