"""What native calls learn of an array of page ids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.kernels import _native, ops


@given(st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=50))
def test_bounds(values: list[int]) -> None:
    ids = np.array(values, dtype=np.int32)
    assert ops.page_bounds(ids) == ((min(values), max(values)) if values else (0, -1))
    assert _native.page_ids_address(ids) == ids.ctypes.data


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros(4, np.int64),
        np.zeros(4, np.uint32),
        np.zeros(4, np.float32),
        np.zeros((2, 2), np.int32),
        np.zeros(8, np.int32)[::2],
        3,
    ],
)
@pytest.mark.parametrize("ask", [_native.page_ids_address, _native.page_ids_bounds])
def test_other_arrays_are_refused(ask, wrong) -> None:
    with pytest.raises((TypeError, ValueError)):
        ask(wrong)


def test_what_arrived_in_a_message_is_an_array_of_ids() -> None:
    assert ops.page_bounds(np.frombuffer(np.array([3, -1], np.int32).tobytes(), "<i4")) == (-1, 3)
