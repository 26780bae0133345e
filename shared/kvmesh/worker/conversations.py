"""Conversations with a turn under way: one at a time each, as the ``per_conversation`` reuse policy needs it.

An id names a conversation among requests with the same ``cache_salt``: what another salt calls so is another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvmesh.telemetry import get_logger
from kvmesh.worker.plans import Plan

__all__ = ["ActiveConversations"]

_log = get_logger("worker.conversations")


class ActiveConversations:
    """Lets a conversation's id through to the engine for one request at a time."""

    def __init__(self) -> None:
        self._active: set[tuple[str | None, str]] = set()
        """By salt and id."""

    def __len__(self) -> int:
        return len(self._active)

    @contextmanager
    def turn(self, plan: Plan) -> Iterator[None]:
        """The life of a planned request that has not begun yet.

        Where the conversation that it names has a turn under way, the request is served as one without a conversation.
        """
        request = plan.sequences[0].run.request  # only the first choice goes on with a conversation
        named = request.conversation_id
        if named is None:
            yield
            return
        conversation = (request.cache_salt, named)
        if conversation in self._active:
            _log.warning(
                "this conversation has a request under way; another one is served without it",
                conversation_id=named,
                request_id=plan.request_id,
            )
            request.conversation_id = None
            yield
        else:
            self._active.add(conversation)
            try:
                yield
            finally:
                self._active.discard(conversation)
