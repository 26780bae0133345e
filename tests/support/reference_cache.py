"""What a KV cache should contain and match, told the simplest way: prefixes of tokens in dictionaries, and no pages.

:class:`ReferenceCache` is an event sink: it knows what is stored because it was told, and finds the longest reusable
prefix by trying every length (semantics §3.4), with none of the shortcuts of the cache under test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from event_checks import CheckedEvents
from numpy.typing import NDArray

from kvmesh.cache.events import StoredBlocks
from kvmesh.cache.layout import PageLayout
from kvmesh.hashing import ReuseScope, as_token_ids, v2_block_keys, v2_root

__all__ = ["ReferenceCache", "Stored", "fingerprints", "is_stale"]

Prefix = tuple[ReuseScope, tuple[int, ...]]

_MODULUS = (1 << 61) - 1
_MANY_CHILDREN = 32


@lru_cache(maxsize=1 << 16)
def fingerprints(scope: ReuseScope, tokens: tuple[int, ...]) -> NDArray[np.uint64]:
    """One number per token that depends on the scope and on everything before it, uint64 ``[len(tokens)]``."""
    value = hash(scope) % _MODULUS or 1
    values = np.empty(len(tokens), dtype=np.uint64)
    for i, token in enumerate(tokens):
        value = (value * 1_000_003 + token + 17) % _MODULUS
        values[i] = value + 1
    return values


def is_stale(block: int, history: int, tokens_per_block: int, window: int | None) -> bool:
    """Whether the token at ``history``, which attends to itself and ``window - 1`` before it, sees none of a block."""
    return window is not None and (block + 1) * tokens_per_block <= history + 1 - window


@dataclass
class Stored:
    """One block in one layer group."""

    prefix: Prefix
    covered: int
    """Tokens of the block that the page holds."""
    level: int
    priority: int


class ReferenceCache:
    """What is stored, by layer group and key, and what a prompt would find.

    Args:
        layout: of the cache under test.
        partial: whether it matches parts of blocks.
        threshold: least priority of a page that may move to a colder level unless ``needed``.
        needed: whether somebody uses the page of a key in a group; asked while a move is told.
    """

    def __init__(
        self, layout: PageLayout, *, partial: bool, threshold: int, needed: Callable[[int, bytes], bool]
    ) -> None:
        self.stored: list[dict[bytes, Stored]] = [{} for _ in layout.groups]
        self.checked = CheckedEvents(layout)
        self.partial = partial
        self.moves: list[tuple[int, int, int]] = []
        """Group, old and new level of every block that moved."""
        self._prefixes: dict[bytes, Prefix] = {}
        self._layout = layout
        self._size = layout.tokens_per_block
        self._threshold = threshold
        self._needed = needed

    def learn(self, scope: ReuseScope, tokens: Sequence[int]) -> None:
        """Know the keys of a sequence's full blocks: those that a window leaves without pages are never told."""
        keys = v2_block_keys(as_token_ids(tokens), self._size, v2_root(scope))
        for number, key in enumerate(keys, start=1):
            self._prefixes.setdefault(key, (scope, tuple(tokens[: number * self._size])))

    def on_created(self, tiers: Sequence[str], num_pages: Sequence[Sequence[int]]) -> None:
        assert tiers[0] == "gpu"
        self.checked.on_created(tiers, num_pages)

    def on_stored(self, group: int, blocks: StoredBlocks) -> None:
        self.checked.on_stored(group, blocks)
        parent: tuple[int, ...] = ()
        if blocks.parent_key is not None:
            scope, parent = self._prefixes[blocks.parent_key]
            assert scope == blocks.scope
        rows = blocks.token_ids.tolist()
        for key, row, priority in zip(blocks.keys, rows, blocks.priorities.tolist(), strict=True):
            assert key not in self.stored[group], "stored twice"
            assert len(parent) % self._size == 0, "a partial block is continued"
            parent = (*parent, *row)
            assert self._prefixes.setdefault(key, (blocks.scope, parent)) == (blocks.scope, parent)
            covered = len(row) if blocks.covered_tokens is None else blocks.covered_tokens
            assert 0 < covered <= len(row)
            self.stored[group][key] = Stored(self._prefixes[key], covered, blocks.level, priority)

    def on_removed(self, group: int, keys: Sequence[bytes], level: int) -> None:
        self.checked.on_removed(group, keys, level)
        for key in keys:
            assert self.stored[group].pop(key).level == level

    def on_moved(self, group: int, keys: Sequence[bytes], old_level: int, new_level: int) -> None:
        self.checked.on_moved(group, keys, old_level, new_level)
        for key in keys:
            block = self.stored[group][key]
            assert block.level == old_level != new_level
            block.level = new_level
            if new_level > old_level:
                assert block.priority >= self._threshold or self._needed(group, key), "moved instead of dropped"
            self.moves.append((group, old_level, new_level))

    def on_priority(self, group: int, keys: Sequence[bytes], old: int, new: int) -> None:
        self.checked.on_priority(group, keys, old, new)
        for key in keys:
            assert self.stored[group][key].priority == old != new
            self.stored[group][key].priority = new

    def nodes(self) -> set[Prefix]:
        """Every stored prefix, and the whole blocks before it."""
        nodes: set[Prefix] = set()
        for group in self.stored:
            for block in group.values():
                scope, prefix = block.prefix
                nodes.add(block.prefix)
                nodes.update((scope, prefix[:end]) for end in range(self._size, len(prefix), self._size))
        return nodes

    def match(self, scope: ReuseScope, tokens: Sequence[int], most: int | None = None) -> set[int]:
        """Reusable tokens of a prompt; several where blocks that match equally long could be chosen.

        The last token of the prompt never counts: it must be computed. ``most`` limits the result further.
        """
        size, prompt = self._size, tuple(tokens)
        limit = len(tokens) - 1 if most is None else min(most, len(tokens) - 1)
        nodes = self.nodes()
        chain: list[Prefix] = []
        while (len(chain) + 1) * size <= len(prompt) and (scope, prompt[: (len(chain) + 1) * size]) in nodes:
            chain.append((scope, prompt[: (len(chain) + 1) * size]))
        walked = len(chain) * size
        candidates: list[tuple[int, Prefix | None]] = [(min(walked, limit), None)]
        if self.partial and walked < limit:
            children = [
                node
                for node in nodes
                if node[0] == scope and walked < len(node[1]) <= walked + size and node[1][:walked] == prompt[:walked]
            ]
            shared = [_common(child[1], prompt[:limit]) for child in children]
            if children and len(children) < _MANY_CHILDREN and max(shared) > walked:
                candidates = [(n, child) for n, child in zip(shared, children, strict=True) if n == max(shared)]
        return {self._longest(length, chain if child is None else [*chain, child]) for length, child in candidates}

    def _longest(self, limit: int, chain: list[Prefix]) -> int:
        covered = [{block.prefix: block.covered for block in group.values()} for group in self.stored]
        for length in range(limit, 0, -1):
            if not self.partial and length % self._size:
                continue
            if all(
                coverage.get(chain[block], 0) >= min(self._size, length - block * self._size)
                for group, coverage in zip(self._layout.groups, covered, strict=True)
                for block in range(-(-length // self._size))
                if not is_stale(block, length, self._size, group.window)
            ):
                return length
        return 0


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count
