"""Settings that the indexer and a router with an index of its own have in common."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvmesh.config.base import StrictModel
from kvmesh.config.service import Seconds

__all__ = ["Pause", "RouterIndexSettings"]

Pause = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""A finite duration in seconds; 0: never."""


class RouterIndexSettings(StrictModel):
    """Where the router learns who holds how much of a prompt."""

    kind: Literal["service", "in_process", "none"] = "service"
    """``service``: asks the indexer at ``indexer_match_endpoint``, where that is set. ``in_process``: follows every
    worker's events itself; needs ``coordinator_url``. ``none``: prefixes are not matched."""
    predicted_ttl_s: Pause = 5.0
    """Seconds for which a prompt counts as held by the server that it was sent to, unless its events come before; 0:
    nothing is predicted."""
    approximate_ttl_s: Seconds = 120.0
    """In process: the same for servers that tell no events."""
    max_memory_bytes: Annotated[int, Field(gt=0)] = 256 << 20
    """In process: bound of the index in bytes."""
    anti_entropy_interval_s: Pause = 10.0
    """In process: seconds between two comparisons with each worker's digest; 0: never."""
    event_key_file: str | None = None
    """In process: file of the keys by which workers with ``events.key_file`` name blocks, one a line."""
