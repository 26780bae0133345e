"""What can go wrong in the cache. Running out of pages is not here: it is a result (``False``), never an exception."""

from __future__ import annotations

__all__ = [
    "CacheBusyError",
    "CacheError",
    "CacheIntegrityError",
    "CacheStateError",
    "TierFailedError",
]


class CacheError(Exception):
    """Base of every error of the cache."""


class CacheStateError(CacheError):
    """A call that the object's state does not allow (commit after stop, release twice); the caller has a bug."""


class CacheBusyError(CacheError):
    """The whole cache cannot be cleared or closed because sequences or leases are still open."""


class CacheIntegrityError(CacheError):
    """The bookkeeping contradicts itself: a count would go negative, or a check of all pages failed."""


class TierFailedError(CacheError):
    """A tier cannot take pages (disk full, I/O error). What it holds can still be read.

    Attributes:
        level: its number, 0 being the device.
        reason: what the system said, and about which file.
    """

    def __init__(self, level: int, reason: str) -> None:
        super().__init__(f"level {level} of the cache takes no more pages: {reason}")
        self.level = level
        self.reason = reason
