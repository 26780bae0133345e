"""``MambaStateConfig``: where recurrent states are kept for reuse."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictInt

from kvmesh.config.base import StrictModel

__all__ = ["MambaStateConfig"]


class MambaStateConfig(StrictModel):
    """Positions at which a recurrent-state snapshot goes into the prefix cache."""

    periodic_snapshot_interval: Annotated[int, Field(ge=0)] = 0
    """Tokens between periodic snapshots; 0 turns them off."""
    additional_snapshot_offsets_from_start: list[Annotated[StrictInt, Field(gt=0)]] = Field(default_factory=list)
    """Snapshot after the first N prompt tokens, for each N; N beyond the prompt is ignored. Strict integers."""
    additional_snapshot_offsets_from_end: list[Annotated[StrictInt, Field(ge=0)]] = Field(default_factory=list)
    """Snapshot N tokens before the end of the prompt, for each N; 0 is the end itself. Strict integers."""
    enable_branch_snapshot: Annotated[bool, Field(exclude=True)] = False
    """Deprecated alias of ``block_reuse_config.enable_branch_snapshot``; without effect when block reuse is off."""

    @property
    def has_additional_offsets(self) -> bool:
        """Whether either list of additional offsets has entries."""
        return bool(self.additional_snapshot_offsets_from_start or self.additional_snapshot_offsets_from_end)
