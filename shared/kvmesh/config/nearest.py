"""Finding the key that a person probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["nearest_key", "unknown_key_message"]

_SIMILARITY_CUTOFF = 0.6
"""Below this ratio a suggestion is more confusing than none (difflib's own default)."""


def nearest_key(key: str, known: Iterable[str], cutoff: float = _SIMILARITY_CUTOFF) -> str | None:
    """The member of ``known`` most similar to ``key``, case and dashes aside, or None when nothing is similar."""
    by_folded = {_fold(name): name for name in known}
    matches = difflib.get_close_matches(_fold(key), by_folded, n=1, cutoff=cutoff)
    return by_folded[matches[0]] if matches else None


def unknown_key_message(key: str, known: Iterable[str]) -> str:
    """One sentence for a key that nobody knows, naming the nearest right one."""
    names = sorted(known)
    nearest = nearest_key(key, names)
    if nearest is not None:
        return f"unknown key {key!r}; did you mean {nearest!r}?"
    return f"unknown key {key!r}; known keys: {', '.join(names)}"


def _fold(key: str) -> str:
    return key.lower().replace("-", "_")
