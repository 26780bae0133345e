"""Storages of a few small pages, and their content."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, PageLayout
from kvmesh.cache.storage import Storage

PAGE_BYTES = (512, 1024)
"""Of the pools of :func:`two_pools`."""


def two_pools() -> PageLayout:
    """A layout of two pools of small pages."""
    specs = (
        LayerCacheSpec(layer_index=0, num_kv_heads=1, head_dim=16, dtype="float32"),
        LayerCacheSpec(layer_index=1, num_kv_heads=2, head_dim=16, dtype="float32", window=8),
    )
    return PageLayout.build(CacheRequirements(specs), 4)


def slots(*numbers: int) -> NDArray[np.int32]:
    """Slots as the storage takes them."""
    return np.array(numbers, dtype=np.int32)


def content(storage: Storage, pool: int = 0) -> NDArray[np.uint8]:
    """The device pages of a pool, ``[pages, page_bytes]``, to read and write."""
    return storage.pools[pool].array.reshape(-1, PAGE_BYTES[pool])


def fill(storage: Storage, pool: int = 0, seed: int = 0) -> NDArray[np.uint8]:
    """Give every device page of a pool random bytes; returns a copy of them."""
    pages = content(storage, pool)
    pages[:] = np.random.default_rng(seed).integers(0, 256, pages.shape, dtype=np.uint8)
    return pages.copy()
