"""The errors inside an exception group: task groups nest, people want the causes."""

from __future__ import annotations

__all__ = ["leaves"]


def leaves(group: ExceptionGroup[Exception]) -> list[Exception]:
    """Every error of a group that is not a group itself, in order."""
    found: list[Exception] = []
    for error in group.exceptions:
        found += leaves(error) if isinstance(error, ExceptionGroup) else [error]
    return found
