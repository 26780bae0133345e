from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.transceiver.planes.base import Part, PlaneError
from kvmesh.transceiver.planes.pieces import piece_slices


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 64)), max_size=5), st.integers(1, 256))
def test_slices_cover_every_part(shapes: list[tuple[int, int]], most_bytes: int) -> None:
    parts = [Part(0, np.zeros(n, np.int32), 0, np.zeros(n, np.int32), nbytes) for n, nbytes in shapes]
    seen = [0] * len(parts)
    for index, pieces in piece_slices(parts, most_bytes):
        assert pieces.start == seen[index]
        assert (pieces.stop - pieces.start) * parts[index].nbytes <= max(most_bytes, parts[index].nbytes)
        seen[index] = pieces.stop
    assert seen == [len(part.local) for part in parts]


@pytest.mark.parametrize("nbytes", [0, -64])
def test_pieces_without_bytes_are_refused(nbytes: int) -> None:
    ids = np.zeros(1, np.int32)
    with pytest.raises(PlaneError, match=f"pieces of {nbytes} bytes are asked for"):
        list(piece_slices([Part(0, ids, 0, ids, nbytes)], 256))
