"""Files in the model cache: where it is, and how two processes fill it without stepping on each other."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvmesh.models.errors import ModelError

__all__ = ["cache_root", "exclusive"]

_LOCK_POLL_S = 0.05


def cache_root() -> Path:
    """The model cache: ``$KVMESH_MODEL_DIR``, else ``~/.cache/kvmesh/models``. It need not exist."""
    configured = os.environ.get("KVMESH_MODEL_DIR")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "kvmesh" / "models"


@contextmanager
def exclusive(lock_path: Path, timeout_s: float, doing: str) -> Iterator[None]:
    """Hold an advisory file lock, so that one process does ``doing`` and the others wait for its result.

    The lock's directory is created. The kernel drops the lock when its holder dies. The lock file stays: removing it
    would let two holders exist.

    Raises:
        ModelError: another process held the lock for all of ``timeout_s``, or the place cannot be written.
    """
    deadline_s = time.monotonic() + timeout_s
    try:
        lock_path.parent.mkdir(parents=True, exist_ok=True)
        file = lock_path.open("w")
    except OSError as error:
        raise ModelError(
            f"Cannot write to the model cache at {lock_path.parent} ({error.strerror}); set KVMESH_MODEL_DIR to a "
            "writable directory."
        ) from error
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise ModelError(
                        f"Another process has been {doing} for over {timeout_s:.0f} s; stop it, or try again later."
                    ) from None
                time.sleep(_LOCK_POLL_S)
        yield
