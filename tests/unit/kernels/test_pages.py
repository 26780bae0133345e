"""Page movement and checksums."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.kernels import ops


def pool(pages, stride, seed=0):
    return np.random.default_rng(seed).integers(0, 256, pages * stride, dtype=np.uint8)


@given(data=st.data(), page_bytes=st.integers(1, 5000), padding=st.integers(0, 100), pages=st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_gather_then_scatter_is_the_identity(data, page_bytes, padding, pages):
    ids = np.array(data.draw(st.lists(st.integers(0, pages - 1), unique=True)), dtype=np.int32)
    stride = page_bytes + padding
    source, target = pool(pages, stride), pool(pages, stride, seed=1)
    untouched = target.copy()
    run = np.zeros(max(1, len(ids)) * page_bytes, dtype=np.uint8)
    ops.gather_pages(run.ctypes.data, source.ctypes.data, ids, page_bytes, stride)
    ops.scatter_pages(target.ctypes.data, run.ctypes.data, ids, page_bytes, stride)
    for page in range(pages):
        origin = source if page in ids else untouched
        place = slice(page * stride, page * stride + page_bytes)
        rest = slice(page * stride + page_bytes, (page + 1) * stride)
        assert np.array_equal(target[place], origin[place])
        assert np.array_equal(target[rest], untouched[rest])


@pytest.mark.parametrize("page_bytes", [64, 300_001, 1 << 20])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_large_moves_in_parallel(page_bytes, threads):
    ops.set_num_threads(threads)
    ids = np.random.default_rng(2).permutation(9)[:7].astype(np.int32)
    source = pool(9, page_bytes)
    run = np.empty(7 * page_bytes, dtype=np.uint8)
    ops.gather_pages(run.ctypes.data, source.ctypes.data, ids, page_bytes)
    assert np.array_equal(run.reshape(7, -1), source.reshape(9, -1)[ids])


def test_copy_pages():
    source, target = pool(8, 4096), pool(8, 4096, seed=1)
    expected = target.reshape(8, -1).copy()
    to, origin = np.array([7, 0, 3], dtype=np.int32), np.array([1, 1, 5], dtype=np.int32)
    expected[to] = source.reshape(8, -1)[origin]
    ops.copy_pages(target.ctypes.data, to, source.ctypes.data, origin, 4096)
    assert np.array_equal(target.reshape(8, -1), expected)


@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize("page_bytes", [1, 4095, 4096, 4161, 16_384, 65_536, 300_001])
@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("threads", [1, 3])
def test_large_copies_past_the_caches(page_bytes, offset, threads):
    ops.set_num_threads(threads)
    count = (1 << 20) // page_bytes + 3
    source, memory = pool(count, page_bytes), pool(1, count * page_bytes + 128, seed=1)
    begin = (offset - memory.ctypes.data) % 64
    target = memory[begin : begin + count * page_bytes]
    before = memory.copy()
    order = np.random.default_rng(3)
    to, origin = (order.permutation(count)[: count - 1].astype(np.int32) for _ in range(2))
    expected = target.reshape(count, -1).copy()
    expected[to] = source.reshape(count, -1)[origin]
    ops.copy_pages(target.ctypes.data, to, source.ctypes.data, origin, page_bytes)
    assert np.array_equal(target.reshape(count, -1), expected)
    assert np.array_equal(memory[:begin], before[:begin])
    assert np.array_equal(memory[begin + count * page_bytes :], before[begin + count * page_bytes :])


@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize("page_bytes", [1, 16, 100, 200, 240, 241, 1024, 1025, 4096, 200_000])
def test_checksums_are_xxh3_of_each_page(page_bytes):
    source = pool(6, page_bytes + 3)
    ids = np.array([5, 0, 2], dtype=np.int32)
    sums = ops.checksum_pages(source.ctypes.data, ids, page_bytes, page_bytes + 3)
    pages = source.reshape(6, -1)[ids, :page_bytes]
    assert sums.tolist() == [xxhash.xxh3_64_intdigest(page.tobytes()) for page in pages]


@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize("page_bytes", [1, 240, 241, 1024, 1025, 4096, 64 * 1029, 300_001])
@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("threads", [1, 3])
def test_copies_with_checksums(page_bytes, offset, threads):
    ops.set_num_threads(threads)
    source, memory = pool(9, page_bytes), pool(9, page_bytes + 64)
    begin = offset - memory.ctypes.data % 64 + 64
    target = memory[begin : begin + 9 * page_bytes]
    before = memory.copy()
    to, origin = np.array([7, 0, 3, 8, 1], np.int32), np.array([1, 1, 5, 8, 0], np.int32)
    sums = ops.copy_pages_checksummed(target.ctypes.data, to, source.ctypes.data, origin, page_bytes)
    expected = before[begin : begin + 9 * page_bytes].reshape(9, -1).copy()
    expected[to] = source.reshape(9, -1)[origin]
    assert np.array_equal(target.reshape(9, -1), expected)
    assert sums.tolist() == [xxhash.xxh3_64_intdigest(page.tobytes()) for page in expected[to]]
    assert np.array_equal(memory[:begin], before[:begin])
    assert np.array_equal(memory[begin + 9 * page_bytes :], before[begin + 9 * page_bytes :])


@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize("page_bytes", [241, 4096, 65_600, 100_003])
@pytest.mark.parametrize("threads", [1, 2, 9])
def test_many_pages_are_summed_side_by_side(page_bytes, threads):
    ops.set_num_threads(threads)
    source, target = pool(19, page_bytes), pool(19, page_bytes, seed=1)
    to, origin = (np.random.default_rng(seed).permutation(19).astype(np.int32) for seed in (2, 3))
    sums = ops.copy_pages_checksummed(target.ctypes.data, to, source.ctypes.data, origin, page_bytes)
    pages = source.reshape(19, -1)[origin]
    assert np.array_equal(target.reshape(19, -1)[to], pages)
    expected = [xxhash.xxh3_64_intdigest(page.tobytes()) for page in pages]
    assert sums.tolist() == expected == ops.checksum_pages(source.ctypes.data, origin, page_bytes).tolist()


@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize(
    ("count", "piece_bytes", "to_stride", "from_stride"),
    [(3, 100, 300, 250), (900, 2048, 8192, 4096), (40, 65_536, 262_144, 65_600), (5, 300_001, 300_100, 700_000)],
)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_piece_of_each_page_goes_to_another_place_of_another_page(
    count, piece_bytes, to_stride, from_stride, threads
):
    ops.set_num_threads(threads)
    source, target = pool(count, from_stride), pool(count, to_stride, seed=1)
    summed = target.copy()
    to, origin = (np.random.default_rng(seed).permutation(count).astype(np.int32) for seed in (2, 3))
    to_offset, from_offset = to_stride - piece_bytes, (from_stride - piece_bytes) // 2
    expected = target.reshape(count, -1).copy()
    pieces = source.reshape(count, -1)[origin, from_offset : from_offset + piece_bytes]
    expected[to, to_offset:] = pieces
    places = (to, source.ctypes.data + from_offset, origin, piece_bytes, to_stride, from_stride)
    ops.copy_pages(target.ctypes.data + to_offset, *places)
    sums = ops.copy_pages_checksummed(summed.ctypes.data + to_offset, *places)
    assert np.array_equal(target.reshape(count, -1), expected)
    assert np.array_equal(summed.reshape(count, -1), expected)
    assert sums.tolist() == [xxhash.xxh3_64_intdigest(piece.tobytes()) for piece in pieces]


def test_wrong_ids_are_refused():
    source = pool(2, 64)
    with pytest.raises(ops.KernelError, match="int32"):
        ops.gather_pages(source.ctypes.data, source.ctypes.data, np.array([0]), 64)
    with pytest.raises(ops.KernelError, match="length"):
        ops.copy_pages(0, np.zeros(1, np.int32), 0, np.zeros(2, np.int32), 64)
    with pytest.raises(ops.KernelError, match="length"):
        ops.copy_pages_checksummed(0, np.zeros(1, np.int32), 0, np.zeros(2, np.int32), 64)
    with pytest.raises(ops.KernelError, match="shapes"):
        ops.copy_pages_checksummed(0, np.zeros(1, np.int32), 0, np.zeros(1, np.int32), 0)
    with pytest.raises(ops.KernelError, match="shapes"):
        ops.checksum_pages(source.ctypes.data, np.zeros(1, np.int32), 0)
