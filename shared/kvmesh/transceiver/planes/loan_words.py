"""Loans as words in memory that owner and readers share: one word for each says that it stands, is taken, or neither.

Whoever changes the word does so in one step and learns what it was, so that a loan is read or taken back, never both,
and never read twice. A word is never used again for another loan: who stood still meanwhile finds another one. What a
reader tells of itself lies beside it; only of two that read at once the owner may hear what the other one says.
"""

from __future__ import annotations

import os
import struct
import threading
from typing import Final

import numpy as np

from kvmesh.cache.shared_memory import map_shared
from kvmesh.kernels.shared_words import compare_exchange_word, exchange_word
from kvmesh.transceiver.planes.base import PlaneError
from kvmesh.transceiver.planes.loans import Receipt

__all__ = ["SLOT_BYTES", "LoanBoard", "LoanWords"]

NUM_SLOTS: Final = 1 << 16
"""Loans at a time, far above the requests that an engine admits; memory that is never used is never allocated."""
SLOT_BYTES: Final = 64
"""A cache line, so that neighbours do not wait for each other: the word, and the three of a receipt."""

MANY_LOANS: Final = 32
"""So many are looked at faster at once than one by one."""

_WORDS: Final = SLOT_BYTES // 8
_ACCESS: Final = struct.Struct("<QQ")
_RECEIPT: Final = struct.Struct("@3Q")
_TAKEN: Final = 1 << 63


class LoanBoard:
    """The words of an owner. Thread-safe.

    Raises:
        PlaneError: the system has no memory for them.
    """

    num_pages = NUM_SLOTS
    page_bytes = SLOT_BYTES

    def __init__(self) -> None:
        try:
            self.fd, mapping = map_shared("kvmesh-loans", NUM_SLOTS * SLOT_BYTES)
        except OSError as error:
            raise PlaneError(f"no shared memory for loans: {error.strerror}") from error
        self._words = memoryview(mapping).cast("Q")
        self._standing = np.frombuffer(mapping, dtype=np.uint64)[::_WORDS]
        self._lock = threading.Lock()
        self._slots: dict[int, int] = {}
        self._transfers: dict[int, int] = {}
        self._given_back: list[int] = []
        self._num_used = 0
        self._word = 0

    def lend(self, transfer_id: int) -> bytes:
        """Put up a word for a transfer; returns where and what it is, for :class:`LoanWords`.

        Raises:
            PlaneError: there are too many loans.
        """
        with self._lock:
            self._take_back(transfer_id)
            if self._given_back:
                slot = self._given_back.pop()
            elif self._num_used < NUM_SLOTS and self.fd >= 0:
                slot = self._num_used
                self._num_used += 1
            else:
                raise PlaneError(f"{NUM_SLOTS} transfers are lent by this engine")
            self._word += 1
            self._slots[transfer_id], self._transfers[slot] = slot, transfer_id
            exchange_word(self._words, slot * _WORDS, self._word)
            return _ACCESS.pack(slot, self._word)

    def taken(self) -> list[tuple[int, Receipt]]:
        """See :meth:`Loans.taken`."""
        if not self._slots:
            return []
        with self._lock:
            found: list[tuple[int, Receipt]] = []
            for slot in self._taken_slots():
                # What no loan has put there is nobody's.
                transfer_id = self._transfers.get(slot)
                if transfer_id is not None and (receipt := self._take_back(transfer_id)) is not None:
                    found.append((transfer_id, receipt))
            return found

    def recall(self, transfer_id: int) -> Receipt | None:
        """See :meth:`Loans.recall`."""
        with self._lock:
            return self._take_back(transfer_id)

    def close(self) -> None:
        """Take every loan back and let the memory go; idempotent. Mappings of readers outlive it."""
        with self._lock:
            for transfer_id in list(self._slots):
                self._take_back(transfer_id)
            self._given_back.clear()
            self._words, self._standing = memoryview(b"").cast("Q"), np.empty(0, dtype=np.uint64)
            fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def _taken_slots(self) -> list[int]:
        if len(self._transfers) > MANY_LOANS:
            taken: list[int] = np.flatnonzero(self._standing[: self._num_used] >= _TAKEN).tolist()
            return taken
        words = self._words
        return [slot for slot in self._transfers if words[slot * _WORDS] >= _TAKEN]

    def _take_back(self, transfer_id: int) -> Receipt | None:
        slot = self._slots.pop(transfer_id, None)
        if slot is None:
            return None
        del self._transfers[slot]
        self._given_back.append(slot)
        at = slot * _WORDS
        if exchange_word(self._words, at, 0) < _TAKEN:
            return None
        return Receipt(*_RECEIPT.unpack_from(self._words, 8 * at + 8))


class LoanWords:
    """The words of an owner, as a reader has mapped them.

    Args:
        words: uint64, writable.
    """

    def __init__(self, words: memoryview[int]) -> None:
        self._words = words

    def stands(self, access: bytes) -> bool:
        """Whether a loan can be read now; False where there can be no such loan."""
        try:
            slot, word = _ACCESS.unpack(access)
        except struct.error:
            return False
        at = slot * _WORDS
        return bool(at < len(self._words) and 0 < word < _TAKEN and self._words[at] == word)

    def take(self, access: bytes, receipt: Receipt) -> bool:
        """See :meth:`Loans.take`."""
        if not self.stands(access):
            return False
        slot, word = _ACCESS.unpack(access)
        at = slot * _WORDS
        _RECEIPT.pack_into(self._words, 8 * at + 8, *receipt)
        # After the receipt, and after the last byte that was read.
        return compare_exchange_word(self._words, at, word, word | _TAKEN)
