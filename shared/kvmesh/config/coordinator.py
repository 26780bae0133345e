"""``CoordinatorSettings``: membership and the ledger of transfers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvmesh.config.endpoints import Port
from kvmesh.config.service import Seconds, ServiceSettings

__all__ = ["CoordinatorSettings"]


class CoordinatorSettings(ServiceSettings):
    """Settings of the transfer coordinator."""

    port: Port = 8400
    """Port of the HTTP face."""
    lease_s: Seconds = 10.0
    """Seconds without a heartbeat after which a member is dead."""
    ledger_max: Annotated[int, Field(gt=0)] = 100_000
    """Transfers remembered; the oldest finished ones are forgotten first."""
    history_max: Annotated[int, Field(gt=0)] = 10_000
    """Membership changes remembered for watchers; one that fell further behind gets the whole list."""
