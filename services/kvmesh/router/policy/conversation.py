"""``conversation``: the server that had the conversation before; else the one with the least content.

1. A request with a conversation id goes where that conversation went, while the server is there.
2. Without one, the known conversation with the longest common prefix is followed when
   ``blocks in common / blocks of the prompt >= match_threshold``.
3. Else the server with the fewest active tokens; ties take turns.

Blocks are counted in token ids with ``use_token_ids``, else in characters of the prompt's text; a prompt given as
token ids has no text and is counted in ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvmesh.router.policy.sessions import SessionMatch, SessionTable, prefix_hashes
from kvmesh.router.policy.types import Candidate, Decision, Question, Scored, take_turns

__all__ = ["Conversation", "ConversationArgs", "decide"]


class ConversationArgs(NamedTuple):
    """The policy's settings; see :class:`kvmesh.config.routing.ConversationPolicy`."""

    match_threshold: float = 0.75
    tokens_per_block: int = 128
    use_token_ids: bool = False
    hash_skip_count: int = 0
    max_sessions: int = 100_000


def decide(
    candidates: Sequence[Candidate],
    *,
    known_server: str | None,
    match: SessionMatch | None,
    num_blocks: int,
    match_threshold: float,
    turn: int,
) -> Decision:
    """Where a request goes.

    Args:
        candidates: servers that may be chosen.
        known_server: where the request's conversation id went before, if it has one.
        match: longest prefix match, for requests without an id.
        num_blocks: full blocks of the prompt.
        match_threshold: share of them that must match.
        turn: settles ties.
    """
    ordered = sorted(candidates)
    ids = {candidate.instance_id for candidate in ordered}
    costs = [float(candidate.active_tokens) for candidate in ordered]
    if known_server in ids:
        chosen, reason = known_server, "the conversation was there before"
    elif match is not None and match.instance_id in ids and match.depth / num_blocks >= match_threshold:
        chosen, reason = match.instance_id, f"{match.depth} of {num_blocks} blocks continue a conversation"
    else:
        index = take_turns(costs, turn)
        chosen, reason = ordered[index].instance_id, f"least content ({costs[index]:g} tokens)"
    return Decision(
        policy="conversation",
        chosen=chosen,
        reason=reason,
        candidates=[
            Scored(instance_id=candidate.instance_id, cost=cost, terms={"active_tokens": cost})
            for candidate, cost in zip(ordered, costs, strict=True)
        ],
    )


class Conversation:
    """:func:`decide` with its memory."""

    name = "conversation"
    needs_matches = False

    def __init__(self, args: ConversationArgs | None = None) -> None:
        self._args = args or ConversationArgs()
        self._table = SessionTable(self._args.max_sessions)
        self._implicit = itertools.count()
        self._turn = 0

    def choose(self, candidates: Sequence[Candidate], question: Question) -> Decision:
        """See :class:`kvmesh.router.policy.types.Policy`."""
        hashes = self._hashes(question)
        session = question.conversation_id
        match = self._table.longest_match(hashes) if session is None else None
        decision = decide(
            candidates,
            known_server=None if session is None else self._table.server_of(session),
            match=match,
            num_blocks=len(hashes),
            match_threshold=self._args.match_threshold,
            turn=self._turn,
        )
        self._turn += 1
        followed = match is not None and match.instance_id == decision.chosen
        if session is None and followed and match is not None:
            session = match.session
        # "\0" cannot be in a header or a JSON-named id that a client would choose: no clash with explicit ids.
        self._table.remember(session or f"\0{next(self._implicit)}", decision.chosen, hashes)
        return decision

    def forget(self, instance_id: str) -> None:
        """See :class:`kvmesh.router.policy.types.Policy`."""
        self._table.forget_server(instance_id)

    def _hashes(self, question: Question) -> tuple[int, ...]:
        by_ids = self._args.use_token_ids or question.text is None
        units = np.asarray(question.token_ids).tolist() if by_ids else question.text
        return prefix_hashes(units or (), units_per_block=self._args.tokens_per_block, skip=self._args.hash_skip_count)
