"""The one error with which a command ends in a sentence instead of a stack trace."""

from __future__ import annotations

__all__ = ["UserError", "user_errors"]


class UserError(Exception):
    """What was asked for cannot be done as it stands; the message says what to do instead."""


def user_errors(group: BaseExceptionGroup[BaseException]) -> list[str]:
    """The sentences of a group that holds nothing but :class:`UserError`; none when it holds anything else."""
    sentences: dict[str, None] = {}
    for error in group.exceptions:
        texts = user_errors(error) if isinstance(error, BaseExceptionGroup) else []
        texts += [str(error)] if isinstance(error, UserError) else []
        if not texts:
            return []
        sentences.update(dict.fromkeys(texts))
    return list(sentences)
