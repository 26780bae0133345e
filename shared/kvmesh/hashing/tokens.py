"""The one form in which tokens travel inside a process: a contiguous one-dimensional int32 array."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvmesh.kernels import _native

__all__ = ["TokenIds", "as_token_ids"]

TokenIds = NDArray[np.int32]


def as_token_ids(tokens: TokenIds | Sequence[int] | bytes) -> TokenIds:
    """Tokens as a contiguous int32 array; an array that already is one is returned as it is.

    Bytes are read as little-endian int32. Lists are for edges and tests: converting one costs as much as hashing it.

    Raises:
        TypeError: a list holds something else than integers.
        ValueError: the input is not one-dimensional, or the bytes are not whole tokens.
        OverflowError: a number in a list does not fit 32 bits.
    """
    if isinstance(tokens, bytes):
        return np.frombuffer(tokens, dtype="<i4")
    if isinstance(tokens, list):
        filled = np.empty(len(tokens), dtype=np.int32)
        _native.fill_int32(tokens, filled)
        return filled
    array = np.ascontiguousarray(tokens, dtype=np.int32)
    if np.ndim(tokens) != 1:
        raise ValueError(f"tokens must be one-dimensional, not {np.ndim(tokens)}-dimensional")
    return array
