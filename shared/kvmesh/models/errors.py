"""The one error of this package: a checkpoint that is missing, damaged or not supported."""

from __future__ import annotations

__all__ = ["ModelError"]


class ModelError(ValueError):
    """A model cannot be used; the message is one sentence that says what is wrong and what to do."""
