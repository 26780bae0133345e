"""Finding the key that a person probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["nearest_key", "unknown_key_message"]

_SIMILARITY_CUTOFF = 0.6
"""Below this ratio a suggestion is more confusing than none (difflib's own default)."""

_RESEMBLANCE_CUTOFF = 0.3
"""For a list of keys to look at, where none is near enough to be meant."""

_MAX_NAMED = 5


def nearest_key(key: str, known: Iterable[str], cutoff: float = _SIMILARITY_CUTOFF) -> str | None:
    """The member of ``known`` most similar to ``key``, case and dashes aside, or None when nothing is similar."""
    by_folded = {_fold(name): name for name in known}
    matches = difflib.get_close_matches(_fold(key), by_folded, n=1, cutoff=cutoff)
    return by_folded[matches[0]] if matches else None


def unknown_key_message(key: str, known: Iterable[str]) -> str:
    """One sentence for a key that nobody knows, naming the nearest right one, or the few that come near."""
    names = sorted(known)
    nearest = nearest_key(key, names)
    if nearest is not None:
        return f"unknown key {key!r}; did you mean {nearest!r}?"
    if len(names) <= _MAX_NAMED:
        return f"unknown key {key!r}; known keys: {', '.join(names)}"
    by_folded = {_fold(name): name for name in names}
    near = difflib.get_close_matches(_fold(key), by_folded, n=_MAX_NAMED, cutoff=_RESEMBLANCE_CUTOFF)
    named = f"; the nearest are {', '.join(by_folded[name] for name in near)}" if near else ""
    return f"unknown key {key!r}{named}; see docs/configuration.md"


def _fold(key: str) -> str:
    return key.lower().replace("-", "_")
