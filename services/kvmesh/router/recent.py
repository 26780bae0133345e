"""Where this router has just sent prompts: what a choice must know that no event, and no indexer, can tell yet.

A burst of prompts with a common beginning is matched before the first of them has been sent. Each choice therefore adds
what the choices before it will bring about, in the same turn of the event loop, and notes its own.
"""

from __future__ import annotations

from kvmesh.events.index import PrefixIndex, Source
from kvmesh.net.clock import Clock
from kvmesh.protocol.members import Member
from kvmesh.protocol.ranks import RankWish
from kvmesh.router.match import Matcher, Matches, Route, best_ranks
from kvmesh.router.work import Work

__all__ = ["RecentRoutes"]

MAX_MEMORY_BYTES = 32 << 20
"""Of the latest prompts; a hundred thousand blocks."""


class RecentRoutes:
    """An index of predictions alone, and the one who is told of each.

    Args:
        matcher: whom other routers may share.
        clock: of the predictions' end.
        ttl_s: how long a prompt counts as held by the server that it was sent to; 0: nothing is predicted.
    """

    def __init__(self, matcher: Matcher, clock: Clock, ttl_s: float) -> None:
        self._matcher = matcher
        self._ttl_s = ttl_s
        self._index = PrefixIndex(MAX_MEMORY_BYTES, clock=clock)
        self._models: dict[Source, str] = {}

    def look(self, work: Work) -> None:
        """Add what is predicted to what was found: of both, what is more."""
        if not self._models:
            return
        self._index.expire()
        request = work.request
        predicted = self._index.match(work.prompt.ids, model=request.model, cache_salt=request.cache_salt)
        if predicted:
            found = work.matches
            work.matches = Matches(found.state, best_ranks([*found.by_server.values(), *predicted]))

    def sent(self, work: Work, member: Member, wish: RankWish) -> None:
        """A prompt is on its way to a server that will compute, or fetch, all of it.

        Of a server with several ranks only one that was asked to use a certain rank: else nobody knows which it takes.
        """
        if not self._ttl_s or not member.tokens_per_block or (member.dp_size > 1 and wish.rank is None):
            return
        route = Route(
            member.instance_id,
            wish.rank or 0,
            work.request.model,
            work.prompt.ids,
            member.tokens_per_block,
            work.request.cache_salt,
        )
        self._note(route)
        self._matcher.routed(route)

    def forget(self, instance_id: str) -> None:
        """A server has left, or another life of it has begun."""
        for source in [source for source in self._models if source.instance_id == instance_id]:
            del self._models[source]
            self._index.remove(source)

    def statistics(self) -> dict[str, float]:
        """Size of the memory."""
        return {"predicted_blocks": self._index.statistics().residencies}

    def _note(self, route: Route) -> None:
        source = Source(route.instance_id, route.dp_rank)
        if self._models.get(source) != route.model:
            self._models[source] = route.model
            self._index.add(source, model=route.model)
        self._index.predict(
            source,
            route.token_ids,
            model=route.model,
            cache_salt=route.cache_salt,
            block_size=route.block_size,
            ttl_s=self._ttl_s,
        )
