"""Attention data-parallel ranks: which of a server's engines one is, and how the mesh names it.

A member of the mesh is a server. Each of its ranks is an engine of its own, with its own cache, transceiver and event
ports; what transfers and the ledger know is the rank's name.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ALONE", "DpSeat", "RankWish", "rank_instance_id", "rank_instance_ids", "server_of"]

_SEPARATOR = "/"
"""No member's id has one: the coordinator refuses it."""


class DpSeat(NamedTuple):
    """The place of one engine among the attention data-parallel ranks of its server."""

    rank: int = 0
    size: int = 1


ALONE = DpSeat()
"""The engine of a server without attention data parallelism."""


class RankWish(NamedTuple):
    """Which rank of a server a request is to go to; nothing is asked for by default."""

    rank: int | None = None
    matched_tokens: int | None = None
    """Leading prompt tokens that the rank holds, as far as the asker knows: then the server weighs the rank against its
    ranks' load. None: the rank is an order."""


def rank_instance_id(instance_id: str, seat: DpSeat) -> str:
    """The id of a rank's engine: its server's own where it is alone, else ``SERVER/RANK``."""
    return instance_id if seat.size == 1 else f"{instance_id}{_SEPARATOR}{seat.rank}"


def rank_instance_ids(instance_id: str, size: int) -> list[str]:
    """The ids of all engines of a server with ``size`` ranks: what is said of the server holds for each of them."""
    return [rank_instance_id(instance_id, DpSeat(rank, size)) for rank in range(size)]


def server_of(engine_id: str) -> str:
    """The member whose engine has this id."""
    return engine_id.partition(_SEPARATOR)[0]
