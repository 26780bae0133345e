"""Several lists of pages in one call."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.kernels import ops

NUM_PAGES = 12


@st.composite
def shapes(draw):
    """(stride, offset, item bytes, ids) of one list."""
    item = draw(st.integers(1, 700))
    offset = draw(st.integers(0, 40))
    padding = draw(st.integers(0, 40))
    ids = draw(st.lists(st.integers(0, NUM_PAGES - 1), unique=True, max_size=NUM_PAGES))
    return offset + item + padding, offset, item, np.array(ids, dtype=np.int32)


def make(shape, seed):
    stride, offset, item, ids = shape
    memory = np.random.default_rng(seed).integers(0, 256, NUM_PAGES * stride, dtype=np.uint8)
    return memory, ops.PageList(memory.ctypes.data + offset, ids, stride, item)


def items(memory, shape):
    stride, offset, item, ids = shape
    return memory.reshape(NUM_PAGES, stride)[ids, offset : offset + item]


@given(several=st.lists(shapes(), max_size=5), checked=st.booleans())
@settings(max_examples=80, deadline=None)
def test_what_is_gathered_from_several_lists_is_scattered_to_the_same(several, checked):
    sources = [make(shape, seed) for seed, shape in enumerate(several)]
    targets = [make(shape, 100 + seed) for seed, shape in enumerate(several)]
    expected = []
    for (target, _), (source, _), shape in zip(targets, sources, several, strict=True):
        stride, offset, item, ids = shape
        wanted = target.copy().reshape(NUM_PAGES, stride)
        wanted[ids, offset : offset + item] = items(source, shape)
        expected.append(wanted.reshape(-1))
    run = np.zeros(1 + sum(len(shape[3]) * shape[2] for shape in several), dtype=np.uint8)
    ops.gather_lists(run.ctypes.data, [one for _, one in sources])
    assert run[:-1].tobytes() == b"".join(
        items(memory, shape).tobytes() for (memory, _), shape in zip(sources, several, strict=True)
    )
    assert run[-1] == 0
    if checked:
        sums = ops.scatter_lists_checksummed(run.ctypes.data, [one for _, one in targets])
        assert sums.tolist() == [
            xxhash.xxh3_64_intdigest(row.tobytes())
            for (memory, _), shape in zip(sources, several, strict=True)
            for row in items(memory, shape)
        ]
    else:
        ops.scatter_lists(run.ctypes.data, [one for _, one in targets])
    for (target, _), wanted in zip(targets, expected, strict=True):
        assert np.array_equal(target, wanted)


@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize("threads", [1, 3])
def test_large_lists_in_parallel(threads):
    ops.set_num_threads(threads)
    shape = (300_064, 64, 300_000, np.array([5, 0, 11, 3, 7, 1, 2, 10], dtype=np.int32))
    (source, gathered), (target, scattered) = make(shape, 1), make(shape, 2)
    run = np.empty(8 * 300_000, dtype=np.uint8)
    ops.gather_lists(run.ctypes.data, [gathered])
    sums = ops.scatter_lists_checksummed(run.ctypes.data, [scattered])
    assert np.array_equal(items(target, shape), items(source, shape))
    assert sums.tolist() == [xxhash.xxh3_64_intdigest(row.tobytes()) for row in items(source, shape)]
    target[:] = 0
    ops.scatter_lists(run.ctypes.data, [scattered])
    assert np.array_equal(items(target, shape), items(source, shape))


def test_what_is_refused():
    memory = np.zeros(64, dtype=np.uint8)
    with pytest.raises(ops.KernelError, match="int32"):
        ops.gather_lists(memory.ctypes.data, [ops.PageList(memory.ctypes.data, np.zeros(1, dtype=np.int64), 8, 8)])
    with pytest.raises(ops.KernelError, match="gather_lists"):
        ops.gather_lists(memory.ctypes.data, [ops.PageList(memory.ctypes.data, np.zeros(1, dtype=np.int32), 8, 0)])
    with pytest.raises(ops.KernelError, match="scatter_lists"):
        ops.scatter_lists(memory.ctypes.data, [ops.PageList(memory.ctypes.data, np.zeros(1, dtype=np.int32), 8, -1)])
