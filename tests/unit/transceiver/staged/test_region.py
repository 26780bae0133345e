"""How large the staging buffers are."""

from __future__ import annotations

import os
import platform
import resource

import numpy as np
import pytest

from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, PageLayout
from kvmesh.transceiver.planes.base import PlaneError
from kvmesh.transceiver.staged.region import RegionSize, StagingMemory, region_size

LAYOUT = PageLayout.build(
    CacheRequirements(
        (
            LayerCacheSpec(layer_index=0, num_kv_heads=2, head_dim=64, dtype="float16"),
            LayerCacheSpec(layer_index=1, num_kv_heads=1, head_dim=64, dtype="float16", window=64),
        )
    ),
    16,
)
PAGE_BYTES = sum(LAYOUT.pools[group.pool].page_bytes for group in LAYOUT.groups)


def test_the_size_is_that_of_the_tokens_over_all_layer_groups() -> None:
    """§2b max_tokens_in_buffer."""
    assert len(LAYOUT.groups) == 2
    assert region_size(LAYOUT, 64, 1000) == RegionSize(4 * PAGE_BYTES, reserved=True)
    assert region_size(LAYOUT, 65, 1000) == RegionSize(5 * PAGE_BYTES, reserved=True)
    assert region_size(LAYOUT, None, 160) == RegionSize(10 * PAGE_BYTES, reserved=False), "the longest sequence"


def test_a_buffer_too_small_for_a_page_of_each_group_is_refused_with_both_numbers() -> None:
    with pytest.raises(PlaneError, match=f"max_tokens_in_buffer is 15, less than the 16 tokens .*{PAGE_BYTES} bytes"):
        region_size(LAYOUT, 15, 1000)


def test_the_memory_can_be_mapped_by_others_and_goes_with_its_owner() -> None:
    memory = StagingMemory(RegionSize(4096, reserved=True))
    memory.array[:] = 7
    assert memory.region.fd is not None
    assert os.pread(memory.region.fd, 4096, 0) == bytes([7]) * 4096
    assert np.all(memory.array == 7)
    memory.close()
    memory.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(memory.region.fd)


def test_memory_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(PlaneError, match=r"cannot take \d+ bytes .*max_tokens_in_buffer"):
        StagingMemory(RegionSize(1 << 55, reserved=True))


@pytest.mark.skipif(
    tuple(map(int, platform.release().split(".")[:2])) < (5, 14), reason="needs MADV_POPULATE_WRITE (Linux 5.14)"
)
def test_what_is_reserved_is_mapped_at_once() -> None:
    pages = 1024
    faults = {}
    for reserved in (False, True):
        memory = StagingMemory(RegionSize(pages * 4096, reserved=reserved))
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        memory.array[::4096] = 1
        faults[reserved] = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
        memory.close()
    assert faults[True] < pages // 10 <= faults[False]
