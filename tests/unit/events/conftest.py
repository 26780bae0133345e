"""Blocks to tell a sink of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from kvmesh.cache.events import StoredBlocks
from kvmesh.hashing import ReuseScope

MakeBlocks = Callable[..., StoredBlocks]


@pytest.fixture
def make_blocks() -> MakeBlocks:
    """Blocks with the given keys, or whose keys begin with the given numbers (8 bytes, big-endian)."""

    def make(
        keys: Sequence[int | bytes],
        tokens: Sequence[Sequence[int]] | None = None,
        *,
        parent: int | bytes | None = None,
        scope: ReuseScope | None = None,
        level: int = 0,
        priority: int = 35,
        covered: int | None = None,
    ) -> StoredBlocks:
        rows = [[key if isinstance(key, int) else 0] for key in keys] if tokens is None else tokens
        return StoredBlocks(
            ReuseScope() if scope is None else scope,
            None if parent is None else key_of(parent),
            [key_of(key) for key in keys],
            np.array(rows, np.int32),
            level,
            np.full(len(keys), priority, np.uint8),
            covered,
        )

    return make


def key_of(key: int | bytes) -> bytes:
    return key if isinstance(key, bytes) else key.to_bytes(8, "big") + bytes(24)
