"""Grants as words in memory that receivers of the same host map: who has copied can tell if it was still allowed to.

Such a receiver copies without its owner's help, and may stand still meanwhile, for so long that it is taken for dead
and the pages go to another request. The owner takes the word of a grant away before that; the receiver looks at it
after its last copy. There is one word for each grant, never used again for another.
"""

from __future__ import annotations

import os
import struct
import threading
from typing import Final

import numpy as np

from kvmesh.cache.shared_memory import map_shared
from kvmesh.transceiver.planes.base import PlaneError

__all__ = ["GRANT_BYTES", "GrantBoard", "check_grant"]

_GRANT: Final = struct.Struct("<QQ")
GRANT_BYTES: Final = _GRANT.size
_WORD_BYTES: Final = 8
NUM_SLOTS: Final = 1 << 16
"""Grants at a time, far above the requests that an engine admits; memory that is never used is never allocated."""


class GrantBoard:
    """The words of an owner. Thread-safe.

    Raises:
        PlaneError: the system has no memory for them.
    """

    num_pages = NUM_SLOTS
    page_bytes = _WORD_BYTES

    def __init__(self) -> None:
        nbytes = NUM_SLOTS * _WORD_BYTES
        try:
            self.fd, mapping = map_shared("kvmesh-grants", nbytes)
        except OSError as error:
            raise PlaneError(f"no shared memory for grants: {error.strerror}") from error
        self._words = np.frombuffer(mapping, dtype="<u8")
        self._lock = threading.Lock()
        self._slots: dict[tuple[int, int], int] = {}
        self._given_back: list[int] = []
        self._num_used = 0
        self._word = 0

    def grant(self, transfer_id: int, session: int) -> bytes:
        """Put up a word for a session; returns where and what it is, for :func:`check_grant`.

        Raises:
            PlaneError: there are too many grants.
        """
        self.revoke(transfer_id, session)
        with self._lock:
            if self._given_back:
                slot = self._given_back.pop()
            elif self._num_used < NUM_SLOTS:
                slot = self._num_used
                self._num_used += 1
            else:
                raise PlaneError(f"{NUM_SLOTS} transfers are being read from this engine")
            self._word += 1
            self._slots[transfer_id, session] = slot
            self._words[slot] = self._word
            return _GRANT.pack(slot, self._word)

    def revoke(self, transfer_id: int, session: int) -> None:
        """Take the word of a session away; unknown ones are ignored."""
        with self._lock:
            slot = self._slots.pop((transfer_id, session), None)
            if slot is not None:
                self._words[slot] = 0
                self._given_back.append(slot)

    def close(self) -> None:
        """Take every word away and let the memory go; idempotent. Mappings of receivers outlive it."""
        with self._lock:
            self._words[:] = 0
            self._slots.clear()
            self._words = np.empty(0, dtype="<u8")
            fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def check_grant(words: memoryview[int], access: bytes) -> None:
    """Check that a grant still stood when this was called, and so during all that was copied before.

    Args:
        words: the owner's, uint64, as they are mapped here.
        access: what :meth:`GrantBoard.grant` gave.

    Raises:
        PlaneError: it does not, or never did.
    """
    if len(access) != GRANT_BYTES:
        raise PlaneError("the owner's grant cannot be read")
    slot, word = _GRANT.unpack(access)
    if slot >= len(words):
        raise PlaneError(f"grant {slot} of {len(words)} is referred to")
    if words[slot] != word:
        raise PlaneError("the owner has taken its pages back, which it took for abandoned, while they were being read")
