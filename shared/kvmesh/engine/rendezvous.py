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

MAX_PARENT_BYTES = 60
"""A socket's path has at most 107 bytes, of which ours take up to 45."""


@contextmanager
def rendezvous() -> Iterator[str]:
    """The ZMQ endpoint to meet at; nobody else can read its directory."""
    with private_directory() as directory:
        yield f"ipc://{directory / 'engine.sock'}"


@contextmanager
def private_directory() -> Iterator[Path]:
    """A directory that nobody else can read; it goes with this process, or is swept when that was killed.

    It is in the directory for temporary files, or in ``/tmp`` where that one's name is too long for sockets.
    """
    parent = Path(tempfile.gettempdir())
    if len(os.fsencode(parent)) > MAX_PARENT_BYTES:
        parent = Path("/tmp")  # noqa: S108 - only this user can read the directory that is made in it
    sweep(parent)
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent) as directory:
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
