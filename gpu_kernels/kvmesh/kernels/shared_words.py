"""Words of memory that processes share, changed in one step (sequentially consistent atomic operations of C11)."""

from __future__ import annotations

from kvmesh.kernels import _native

__all__ = ["compare_exchange_word", "exchange_word"]

exchange_word = _native.exchange_word
"""``exchange_word(words, index, desired)``: set a word, return what it was.

Args:
    words: contiguous, writable buffer of uint64, aligned to 8 bytes.
    index: of the word.
    desired: 0 to 2^64 - 1.

Raises:
    BufferError: the buffer cannot be written.
    IndexError: there is no such word.
    OverflowError: ``desired`` is not 64 bits.
    TypeError: its items do not have 8 bytes.
"""

compare_exchange_word = _native.compare_exchange_word
"""``compare_exchange_word(words, index, expected, desired)``: set a word if it is as expected; returns whether it was.

Arguments and errors are those of :data:`exchange_word`.
"""
