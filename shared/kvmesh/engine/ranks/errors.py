"""How a step of several ranks fails."""

from __future__ import annotations

__all__ = ["RanksLostError", "StepFailedError"]


class StepFailedError(RuntimeError):
    """A rank could not compute its part of a step. All ranks have left the step and wait for the next one."""


class RanksLostError(RuntimeError):
    """A rank is gone, or has not answered in time: nothing can be computed any more, the engine must end."""
