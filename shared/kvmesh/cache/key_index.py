"""Which tree node has a 32-byte block key: one compact native table, and a plain twin that says what it must do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvmesh.kernels import _native

__all__ = ["KEY_BYTES", "KeyIndex", "KeyIndexReference"]

KEY_BYTES = 32


class KeyIndex(_native.KeyIndex):
    """A map from keys to the numbers of nodes and back; about 40 bytes per node, whether used or not.

    Expected constant time per key, also when keys are chosen to collide: their place depends on a secret number. An
    error leaves the index as it was.

    Args:
        capacity: nodes are numbered ``0 .. capacity - 1``.

    Raises:
        ValueError: a key has not 32 bytes, a key or node of ``add`` is there already, or one of ``remove``, ``key`` or
            ``keys`` is not.
        IndexError: a node is not below the capacity.
        TypeError: a key is not bytes, or nodes are not a contiguous int32 array.
    """

    # The rest is native: __len__; grow(capacity), never down; find(key), -1 when absent; add(keys, nodes);
    # remove(nodes), which returns their keys in order; key(node) and keys(nodes); names(nodes), whether each has a key
    # by which it is found; nbytes(), of the whole index.
    __slots__ = ()

    def walk(self, keys: Sequence[bytes]) -> NDArray[np.int32]:
        """Nodes of the longest leading run of ``keys`` that is present, int32 of that run's length."""
        nodes = np.empty(len(keys), dtype=np.int32)
        return nodes[: self.walk_into(keys, nodes)]


class KeyIndexReference:
    """:class:`KeyIndex` in plain Python: the same calls, results and types of errors."""

    def __init__(self, capacity: int) -> None:
        self._nodes: dict[bytes, int] = {}
        self._keys: list[bytes | None] = []
        self.grow(capacity)

    def __len__(self) -> int:
        return len(self._nodes)

    def grow(self, capacity: int) -> None:
        """Make room for nodes ``0 .. capacity - 1``."""
        if not len(self._keys) <= capacity < 2**31:
            raise ValueError(f"capacity {capacity}")
        self._keys += [None] * (capacity - len(self._keys))

    def find(self, key: bytes) -> int:
        """The node with ``key``, -1 when absent."""
        return self._nodes.get(_checked(key), -1)

    def walk(self, keys: Sequence[bytes]) -> NDArray[np.int32]:
        """Nodes of the longest leading run of ``keys`` that is present."""
        found: list[int] = []
        for key in keys:
            node = self.find(key)
            if node < 0:
                break
            found.append(node)
        return np.array(found, dtype=np.int32)

    def add(self, keys: Sequence[bytes], nodes: NDArray[np.int32]) -> None:
        """Give ``nodes`` their ``keys``: all of them, or none and an error."""
        added: dict[bytes, int] = {}
        taken: set[int] = set()
        for key, node in zip(keys, nodes.tolist(), strict=True):
            absent = self.find(key) < 0 and key not in added
            if self._at(node) is not None or node in taken:
                raise ValueError(f"node {node} has a key already")
            if not absent:
                raise ValueError("a key is there already")
            added[key] = node
            taken.add(node)
        self._nodes |= added
        for key, node in added.items():
            self._keys[node] = key

    def remove(self, nodes: NDArray[np.int32]) -> list[bytes]:
        """Take their keys from ``nodes`` and return them: all of them, or none and an error."""
        keys = self.keys(nodes)
        if len(set(keys)) < len(keys):
            raise ValueError("a node is named twice")
        for key in keys:
            self._keys[self._nodes.pop(key)] = None
        return keys

    def key(self, node: int) -> bytes:
        """The key of ``node``."""
        key = self._at(node)
        if key is None:
            raise ValueError(f"node {node} has no key")
        return key

    def keys(self, nodes: NDArray[np.int32]) -> list[bytes]:
        """The keys of ``nodes``, in order."""
        return [self.key(node) for node in nodes.tolist()]

    def names(self, nodes: NDArray[np.int32]) -> bool:
        """Whether each of ``nodes`` has a key by which it is found."""
        keys = [self._at(node) for node in nodes.tolist()]
        return all(
            key is not None and self._nodes.get(key) == node for key, node in zip(keys, nodes.tolist(), strict=True)
        )

    def _at(self, node: int) -> bytes | None:
        if not 0 <= node < len(self._keys):
            raise IndexError(f"node {node}")
        return self._keys[node]


def _checked(key: bytes) -> bytes:
    if not isinstance(key, bytes):
        raise TypeError("a key must be bytes")
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key must have {KEY_BYTES} bytes")
    return key
