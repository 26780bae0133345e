"""When a request must be over, and whose fault it is that it was not."""

from __future__ import annotations

import math
from typing import NamedTuple, Self

import anyio

__all__ = ["Deadline"]

PATIENCE_S = 10.0
"""A server that says nothing for so long and until the deadline is taken to hang; one that merely has much to say is
not, nor one that a request reached late."""


class Deadline(NamedTuple):
    """The end of a request's time, in seconds of the event loop's clock."""

    at_s: float = math.inf
    patience_s: float = PATIENCE_S

    @classmethod
    def current(cls, timeout_s: float) -> Self:
        """That of the enclosing cancel scope, which was given ``timeout_s``."""
        return cls(anyio.current_effective_deadline(), min(PATIENCE_S, timeout_s / 2))

    def blames(self, silent_since_s: float) -> bool:
        """Whether a wait that is ended now was ended by the deadline, and by the fault of who has been silent since."""
        now_s = anyio.current_time()
        return now_s >= self.at_s and now_s - silent_since_s >= self.patience_s
