"""Which retention priority a new page gets: the request's own, else by the endpoint rule (semantics §1.3, §3.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvmesh.cache.layout import LayerGroupLayout
from kvmesh.cache.retention import block_priorities
from kvmesh.protocol.retention import DEFAULT_PRIORITY, RetentionConfig

__all__ = ["ENDPOINT_PRIORITY", "PagePriorities", "Priorities"]

ENDPOINT_PRIORITY = 70
"""Of windowed pages near the end of the reusable prompt, under ``swa_endpoint_rewind_tokens``."""


class Priorities(NamedTuple):
    """Priorities of some new pages of one group."""

    values: NDArray[np.uint8] | int
    """uint8 ``[n]``, or one for all."""
    durations_s: NDArray[np.float64] | None
    """float64 ``[n]`` from the first release, inf for ever; None: all for ever."""


@dataclass(frozen=True, slots=True)
class PagePriorities:
    """The rule of one sequence.

    A request's own retention settings come first. Without any, and with ``swa_endpoint_rewind_tokens`` set, windowed
    pages that overlap the last ``window + rewind`` tokens of the reusable prompt (all but the last token, which is
    always computed again) get 70 and other windowed pages 0, so that what a next turn will need goes last.
    """

    retention: RetentionConfig | None
    prompt_length: int
    tokens_per_block: int
    rewind_tokens: int = 0

    def of(self, group: LayerGroupLayout, begin: int, end: int) -> Priorities:
        """Priorities of the pages of blocks ``begin .. end - 1`` in ``group``."""
        if self.retention is not None:
            values, durations_s = block_priorities(
                self.retention, self.prompt_length, begin, end, self.tokens_per_block
            )
            return Priorities(values, durations_s if np.isfinite(durations_s).any() else None)
        if not self.rewind_tokens or group.window is None or group.kind != "attention":
            return Priorities(DEFAULT_PRIORITY, None)
        last = self.prompt_length - 1
        first = max(0, last - group.window - self.rewind_tokens)
        blocks = np.arange(begin, end)
        size = self.tokens_per_block
        near = (blocks * size < last) & ((blocks + 1) * size > first)
        return Priorities(np.where(near, ENDPOINT_PRIORITY, 0).astype(np.uint8), None)
