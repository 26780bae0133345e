"""The borders of error isolation: what one peer makes go wrong ends its own transfer or connection, and is counted.

Whatever is counted is a defect of this code: what can go wrong otherwise has an error of its own.
"""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["isolated", "isolated_errors_total"]


class _Count:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.value = 0


_count = _Count()


def isolated(log: Any, event: str, **fields: object) -> None:
    """Log the exception that is being handled, with its traceback, and count it."""
    with _count.lock:
        _count.value += 1
    log.exception(event, **fields)


def isolated_errors_total() -> int:
    """Of this process, since it began."""
    return _count.value
