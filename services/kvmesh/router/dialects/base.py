"""The adapter interface: everything the router must know of an engine's HTTP protocol, and nothing else.

An adapter is pure: it builds requests and reads answers. Sending, retrying and relaying are the dispatcher's.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from kvmesh.protocol.disagg import CtxUsage, DisaggregatedParams
from kvmesh.protocol.members import Member
from kvmesh.protocol.ranks import RankWish
from kvmesh.router.work import Work

__all__ = ["Dialect", "EarlyLegs", "Outgoing", "Prefilled"]


class Outgoing(NamedTuple):
    """A POST to a worker."""

    path: str
    body: bytes


class Prefilled(NamedTuple):
    """What the context server answered."""

    finished: bool
    """The first token was also the last: there is nothing to generate."""
    handoff: DisaggregatedParams
    """What the generation server needs to go on."""
    usage: CtxUsage
    """Prompt and cached tokens as the context server counted them: the truth for the client."""
    response: dict[str, Any]
    """The answer as JSON, without what is internal to the mesh; it is the client's answer when ``finished``."""


class EarlyLegs(NamedTuple):
    """Both legs of a generation-first sequence."""

    context: Outgoing
    generation: Outgoing
    context_dp_rank: int | None
    """Attention data-parallel rank that the context leg orders, for the generation leg names its engine."""


class Dialect(Protocol):
    """One engine's way."""

    name: str
    """As members state it in ``dialect``."""
    rewrites_usage: bool
    """Whether generation servers count usage themselves, so that the router must put the context server's in."""

    def whole(self, work: Work, wish: RankWish) -> Outgoing:
        """A request that one server serves alone, on the attention data-parallel rank that is wished for."""

    def prefill(self, work: Work, transfer_id: int, wish: RankWish) -> Outgoing:
        """The first leg: compute the prompt, sample one token, keep the pages under ``transfer_id``."""

    def read_prefill(self, work: Work, body: bytes) -> Prefilled:
        """Read the first leg's answer.

        Raises:
            ApiError: 502 naming what is missing.
        """

    def decode(self, work: Work, prefilled: Prefilled, transfer_id: int, wish: RankWish) -> Outgoing:
        """The second leg: fetch the pages and generate the rest, first token included."""

    def both(
        self, work: Work, context: Member, transfer_id: int, context_wish: RankWish, generation_wish: RankWish
    ) -> EarlyLegs | None:
        """Generation first: both legs at once; None where the context server does not say where to ask for pages."""

    def abort(self, transfer_id: int) -> Outgoing | None:
        """Tell the context server that nobody will fetch the pages; None where it finds out by itself only."""
