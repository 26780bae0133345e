"""``BlockReuseConfig``: when finished blocks become reusable."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from kvmesh.config.base import StrictModel

__all__ = ["BlockReuseConfig", "BlockReusePolicy"]

BlockReusePolicy = Literal["all_reusable", "per_request", "per_conversation"]


class BlockReuseConfig(StrictModel):
    """Block reuse policies of the V2 KV cache manager."""

    policy: BlockReusePolicy = "all_reusable"
    """``all_reusable`` commits finished blocks after every context chunk, ``per_request`` after the final one,
    ``per_conversation`` like ``per_request`` and drops a conversation's older turns."""
    max_num_turns: Annotated[int, Field(gt=0)] = 1
    """``per_conversation`` only: completed turns whose window blocks and stable-boundary state are kept."""
    swa_endpoint_rewind_tokens: Annotated[int, Field(ge=0)] = 0
    """Keep sliding-window blocks that overlap the last window + this many prompt tokens longer; 0 turns it off."""
    enable_branch_snapshot: bool = False
    """Keep reusable state at the point where a prompt forks from the prefix cache."""

    @model_validator(mode="before")
    @classmethod
    def reject_renamed_policy(cls, data: Any) -> Any:
        """Name the new place of ``block_reuse_policy``."""
        if isinstance(data, dict) and "block_reuse_policy" in data:
            raise ValueError("block_reuse_policy was renamed to kv_cache_config.block_reuse_config.policy")
        return data
