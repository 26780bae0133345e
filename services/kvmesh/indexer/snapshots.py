"""The index on disk: written a chunk at a time, with questions answered in between, and read on start."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import anyio.lowlevel
import anyio.to_thread
import msgspec

from kvmesh.config.errors import ConfigError
from kvmesh.events.feeds.gate import Gate
from kvmesh.events.index import PrefixIndex, SnapshotError, Source
from kvmesh.net.clock import Clock
from kvmesh.telemetry import get_logger

__all__ = ["SnapshotFile", "SnapshotStatistics"]

READ_BYTES = 1 << 20

MOST_TRIES = 5
"""Of one snapshot, when workers join or leave while it is written."""

_log = get_logger("indexer.snapshots")


class _InterruptedError(Exception):
    """The index did not stay as it was."""


class SnapshotStatistics(msgspec.Struct, kw_only=True):
    """What has been written and read."""

    snapshots_total: int = 0
    snapshot_failures_total: int = 0
    snapshot_bytes: int = 0
    """Size of the latest."""
    snapshot_seconds: float = 0.0
    """How long it took, the answers in between included."""
    snapshot_longest_pause_seconds: float = 0.0
    """The longest time of it in which nobody was answered."""
    snapshot_restored_blocks: int = 0
    """Blocks that this process began with."""


class SnapshotFile:
    """Writes and reads one file, which is replaced as a whole: whoever reads it sees a complete snapshot.

    Args:
        path: of the file; its directory is made where it is missing.
        index: to write and to fill.
        gate: keeps the index as it is while it is written.
        clock: of the times.
    """

    def __init__(self, path: str, index: PrefixIndex, gate: Gate, clock: Clock) -> None:
        self._path = Path(path)
        self._index = index
        self._gate = gate
        self._clock = clock
        self._writing = anyio.Lock()
        self.statistics = SnapshotStatistics()

    def prepare(self) -> None:
        """Make the directory.

        Raises:
            ConfigError: it cannot be made, or not be written to.
        """
        directory = self._path.parent
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"snapshot_path {self._path}: {directory} cannot be made: {reason}") from error
        if not os.access(directory, os.W_OK | os.X_OK):
            raise ConfigError(f"snapshot_path {self._path}: {directory} cannot be written to")

    def read(self) -> Mapping[Source, bytes]:
        """Fill the empty index; gives what :meth:`write` was given. Nothing where there is no file that can be used.

        A file that cannot be read is put aside under another name and reported: an index from nothing is right, too.
        """
        watermarks: dict[Source, bytes] = {}
        try:
            with self._path.open("rb") as file:
                blocks = self._index.restore(_chunks(file), watermarks)
        except FileNotFoundError:
            return {}
        except (OSError, SnapshotError) as error:
            aside = self._path.with_name(f"{self._path.name}.unreadable")
            _log.warning("the snapshot cannot be used; it begins with nothing", error=str(error), kept=str(aside))
            with contextlib.suppress(OSError):  # else it will be overwritten
                self._path.replace(aside)
            return {}
        self.statistics.snapshot_restored_blocks = blocks
        _log.info("snapshot restored", blocks=blocks, sources=len(watermarks))
        return watermarks

    async def write(self, watermarks: Callable[[], Mapping[Source, bytes]]) -> None:
        """Replace the file by the index as it is now. Failures are reported and leave the file that was there.

        Args:
            watermarks: opaque to the file, given back by :meth:`read`; asked for in the moment of the snapshot.
        """
        async with self._writing:
            started_s = self._clock.monotonic_s()
            temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with temporary.open("wb") as file:
                    pause_s = await self._write_whole(file, watermarks)
                    file.flush()
                    await anyio.to_thread.run_sync(os.fsync, file.fileno())
                    size = file.tell()
                temporary.replace(self._path)
            except Exception as error:
                # Without a snapshot the next start takes longer, and that is all.
                self.statistics.snapshot_failures_total += 1
                expected = isinstance(error, OSError | _InterruptedError)
                _log.warning(
                    "the snapshot could not be written",
                    path=str(self._path),
                    error=str(error),
                    exc_info=None if expected else error,
                )
                return
            finally:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
            self.statistics.snapshots_total += 1
            self.statistics.snapshot_bytes = size
            self.statistics.snapshot_seconds = self._clock.monotonic_s() - started_s
            self.statistics.snapshot_longest_pause_seconds = pause_s

    async def write_every(self, interval_s: float, watermarks: Callable[[], Mapping[Source, bytes]]) -> None:
        """Write until cancelled."""
        while True:
            await self._clock.sleep(interval_s)
            await self.write(watermarks)

    async def _write_whole(self, file: BinaryIO, watermarks: Callable[[], Mapping[Source, bytes]]) -> float:
        """Write; a worker that joins or leaves meanwhile makes it begin anew.

        Raises:
            OSError: the file cannot be written.
            _InterruptedError: that happened every time.
        """
        for _ in range(MOST_TRIES):
            file.seek(0)
            file.truncate()
            async with self._gate.closing():
                try:
                    return await self._write_chunks(file, self._index.snapshot(watermarks()))
                except RuntimeError as error:  # the index has changed
                    _log.info("the snapshot begins anew", why=str(error))
        raise _InterruptedError(f"the workers changed {MOST_TRIES} times while it was written")

    async def _write_chunks(self, file: BinaryIO, chunks: Iterator[bytes]) -> float:
        """Write, answering others after each chunk; gives the longest time of one."""
        longest_s, began_s = 0.0, self._clock.monotonic_s()
        for chunk in chunks:
            file.write(chunk)
            longest_s = max(longest_s, self._clock.monotonic_s() - began_s)
            await anyio.lowlevel.checkpoint()
            began_s = self._clock.monotonic_s()
        return longest_s


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(READ_BYTES):
        yield chunk
