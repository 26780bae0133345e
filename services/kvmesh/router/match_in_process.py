"""The router's own index: it follows every worker's events itself, with the indexer's library, and asks nobody."""

from __future__ import annotations

import anyio
import numpy as np
from anyio.abc import TaskStatus

from kvmesh.events.feeds import Feeds
from kvmesh.events.index import PrefixIndex, Source
from kvmesh.events.keyed import KeyRing
from kvmesh.events.keyed_lookup import lookup_of
from kvmesh.events.sockets import make_context
from kvmesh.net.clock import Clock
from kvmesh.net.curve import CurveSecurity
from kvmesh.protocol.members import MemberEvent
from kvmesh.router.match import Matcher, Matches, Route, best_ranks

__all__ = ["InProcessMatcher"]


class InProcessMatcher(Matcher):
    """An index in this process. Run :meth:`run` in a task group for as long as it is used.

    Args:
        clock: of predictions.
        max_memory_bytes: bound of the index.
        predicted_ttl_s: how long a prompt counts as held by the server that it was sent to, unless its events come.
        approximate_ttl_s: the same for servers that tell no events.
        anti_entropy_interval_s: how often each publisher is asked for its digest; 0: never.
        security: keys of the publishers; None: they are plain.
        keys: of workers that tell keyed names instead of tokens.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        max_memory_bytes: int,
        predicted_ttl_s: float,
        approximate_ttl_s: float,
        anti_entropy_interval_s: float,
        security: CurveSecurity | None = None,
        keys: KeyRing | None = None,
    ) -> None:
        self._clock = clock
        self._index = PrefixIndex(max_memory_bytes, clock=clock)
        self._keys = keys
        self._match = lookup_of(self._index, keys)
        self._predicted_ttl_s = predicted_ttl_s
        self._approximate_ttl_s = approximate_ttl_s
        self._anti_entropy_interval_s = anti_entropy_interval_s
        self._security = security
        self._feeds: Feeds | None = None
        self._unheard: list[MemberEvent] = []
        self._answered = 0

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Follow until cancelled."""
        context = make_context()
        try:
            async with anyio.create_task_group() as tasks:
                feeds = self._feeds = Feeds(
                    self._index,
                    tasks,
                    context,
                    clock=self._clock,
                    security=self._security,
                    keys=self._keys,
                    approximate_ttl_s=self._approximate_ttl_s,
                    anti_entropy_interval_s=self._anti_entropy_interval_s,
                )
                for event in self._unheard:
                    feeds.hear(event)
                self._unheard.clear()
                task_status.started()
                await feeds.upkeep()
        finally:
            self._feeds = None
            context.destroy(linger=0)  # term() would wait for a socket that a failure has left open

    def hear(self, event: MemberEvent) -> None:
        """See :class:`Matcher`."""
        if self._feeds is None:
            self._unheard.append(event)
        else:
            self._feeds.hear(event)

    async def match(
        self, model: str, token_ids: np.ndarray, *, lora_id: int | None = None, cache_salt: str | None = None
    ) -> Matches:
        """See :class:`Matcher`."""
        self._answered += 1
        return Matches("answered", best_ranks(self._match(token_ids, model=model, lora=lora_id, cache_salt=cache_salt)))

    def routed(self, route: Route) -> None:
        """See :class:`Matcher`."""
        if self._feeds is not None and self._predicted_ttl_s:
            self._feeds.predictions.predict(
                self._feeds.feed(Source(route.instance_id, route.dp_rank)),
                route.token_ids,
                model=route.model,
                cache_salt=route.cache_salt,
                ttl_s=self._predicted_ttl_s,
            )

    def statistics(self) -> dict[str, float]:
        """Questions answered, the index's memory and the feeds' numbers."""
        index = self._index.statistics()
        return {
            "match_answered_total": self._answered,
            "index_blocks": index.blocks,
            "index_memory_bytes": self._index.memory_bytes,
            **({} if self._feeds is None else {f"index_{k}": v for k, v in self._feeds.statistics().items()}),
        }
