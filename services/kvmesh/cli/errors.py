"""The one error with which a command ends in a sentence instead of a stack trace."""

from __future__ import annotations

__all__ = ["UserError"]


class UserError(Exception):
    """What was asked for cannot be done as it stands; the message says what to do instead."""
