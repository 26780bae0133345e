"""Where a front and its engine meet: a socket in a private directory, which goes when they have parted.

A front that was killed leaves its directory behind; the next one sweeps it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["private_directory", "rendezvous", "sweep"]

_PREFIX = "kvmesh-engine-"


@contextmanager
def rendezvous() -> Iterator[str]:
    """The ZMQ endpoint to meet at; nobody else can read its directory."""
    with private_directory() as directory:
        yield f"ipc://{directory / 'engine.sock'}"


@contextmanager
def private_directory() -> Iterator[Path]:
    """A directory that nobody else can read; it goes with this process, or is swept when that was killed."""
    sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-") as directory:
        yield Path(directory)


def sweep(parent: Path) -> list[Path]:
    """Remove this user's directories of fronts that do not run any more; gives those that were removed."""
    removed = []
    for directory in parent.glob(f"{_PREFIX}*-*"):
        owner = directory.name.removeprefix(_PREFIX).partition("-")[0]
        try:
            dead = owner.isdecimal() and directory.stat().st_uid == os.getuid() and not Path(f"/proc/{owner}").exists()
        except FileNotFoundError:
            continue  # another front was quicker
        if dead:
            shutil.rmtree(directory, ignore_errors=True)
            removed.append(directory)
    return removed
