"""Digests of what a publisher has told and not taken back, kept step by step on the engine's thread.

Two threads: the engine's tells and commits, the publisher's reads. What the engine tells is noted as it comes and added
up once a step, in arrays. Nothing is kept for a block, except for those of a scope with an adapter or a salt: a removal
does not say whose a block was.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvmesh.events.digests import Digest, DigestAnswer, DigestKey, mixed_sum
from kvmesh.events.records import LoraKey, Tier
from kvmesh.hashing import ReuseScope

__all__ = ["NOTHING_PUBLISHED", "PublishedSet"]

NOTHING_PUBLISHED = 2**64 - 1
"""Stands for the number of the last batch before there was one."""

_Scope = tuple[LoraKey, str | None]
_PLAIN = ReuseScope()


class PublishedSet:
    """What readers should hold once they have applied every batch.

    It counts what the worker has, not what arrived: a batch that was dropped is in it, so that readers see the
    difference.

    Args:
        common: adapter and salt that stand in the digests for blocks without an adapter or a salt.
    """

    def __init__(self, common: tuple[LoraKey, str | None] = (None, None)) -> None:
        self._common = common
        self._lock = threading.Lock()
        """Held for the time of an addition for each scope that a step changed, or of one copy."""
        self._sequence = NOTHING_PUBLISHED
        self._digests: dict[DigestKey, Digest] = {}
        self._scopes: dict[int, _Scope] = {}
        """By hash, of blocks outside the common scope."""
        self._gained: dict[DigestKey, list[NDArray[np.uint64]]] = {}
        self._lost: dict[DigestKey, list[NDArray[np.uint64]]] = {}

    def stored(self, tier: Tier, scope: ReuseScope, hashes: NDArray[np.uint64]) -> None:
        """Blocks are told, ``[n]``; none of them was told in any tier before."""
        of = self._common
        if scope != _PLAIN:
            of = (scope.lora_id, None if scope.salt is None else str(scope.salt))
            self._scopes.update(dict.fromkeys(hashes.tolist(), of))
        self._gained.setdefault(DigestKey(tier, *of), []).append(hashes)

    def removed(self, tier: Tier, hashes: NDArray[np.uint64]) -> None:
        """Blocks are taken back, ``[n]``."""
        for of, some in self._by_scope(hashes):
            self._lost.setdefault(DigestKey(tier, *of), []).append(some)
        if self._scopes:
            for number in hashes.tolist():
                self._scopes.pop(number, None)

    def moved(self, old: Tier, new: Tier, hashes: NDArray[np.uint64]) -> None:
        """Blocks are told in another tier, ``[n]``."""
        for of, some in self._by_scope(hashes):
            self._lost.setdefault(DigestKey(old, *of), []).append(some)
            self._gained.setdefault(DigestKey(new, *of), []).append(some)

    def commit(self, sequence: int) -> None:
        """What was told since the last commit is in batch ``sequence``."""
        changes: dict[DigestKey, Digest] = {}
        for key, gained in self._gained.items():
            changes[key] = _sum(gained)
        for key, lost in self._lost.items():
            changes[key] = changes.get(key, Digest()).minus(_sum(lost))
        self._gained.clear()
        self._lost.clear()
        with self._lock:
            self._sequence = sequence
            for key, change in changes.items():
                total = self._digests.get(key, Digest()).plus(change)
                if total == Digest():
                    self._digests.pop(key, None)
                else:
                    self._digests[key] = total

    def answer(self) -> DigestAnswer:
        """The digests as of the last commit; for any thread."""
        with self._lock:
            return DigestAnswer(self._sequence, dict(self._digests))

    def _by_scope(self, hashes: NDArray[np.uint64]) -> list[tuple[_Scope, NDArray[np.uint64]]]:
        if not self._scopes:
            return [(self._common, hashes)]
        groups: dict[_Scope, list[int]] = {}
        for number in hashes.tolist():
            groups.setdefault(self._scopes.get(number, self._common), []).append(number)
        return [(of, np.array(some, np.uint64)) for of, some in groups.items()]


def _sum(parts: Sequence[NDArray[np.uint64]]) -> Digest:
    hashes = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return Digest(len(hashes), mixed_sum(hashes))
