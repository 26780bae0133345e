"""The bytes of a snapshot: frames with checksums around what the native index writes of itself.

``magic | version u16 | frame...``, a frame is ``length u32 | payload | checksum u64``, numbers little-endian. A
checksum is XXH3-64 of the payload, seeded with the checksum before it: frames that are missing, doubled or swapped are
noticed. The first payload is msgpack, the list of sources; the others are the native index's, see
``csrc/ext/index_snapshot.h``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from kvmesh.events.index.scope import Scope
from kvmesh.kernels import _native

__all__ = ["SnapshotError", "SnapshotReader", "SourceHeader", "snapshot_chunks"]

_MAGIC = b"KVMESH-INDEX"
_VERSION = 1
_MAX_FRAME_BYTES = 1 << 28
_LENGTH_BYTES = 4
_CHECKSUM_BYTES = 8


class SnapshotError(ValueError):
    """Bytes that are not a whole snapshot of a version that can be read."""


class SourceHeader(msgspec.Struct, array_like=True, frozen=True):
    """One source of a snapshot."""

    instance_id: str
    dp_rank: int
    base: Scope
    single_group: bool
    hidden: bool
    watermark: bytes


def snapshot_chunks(
    core: _native.PrefixCore, headers: list[SourceHeader], streams: list[int], now_tick: int
) -> Iterator[bytes]:
    """The chunks of a snapshot.

    Args:
        core: the native index.
        headers: of its sources.
        streams: their numbers in ``core``.
        now_tick: from which the ends of predicted blocks are counted.

    Raises:
        RuntimeError: the index was changed between two chunks.
    """
    number = core.begin_snapshot(streams, now_tick)
    chunk, checksum = _frame(msgspec.msgpack.encode(headers), 0)
    yield _MAGIC + _VERSION.to_bytes(2, "little") + chunk
    while (part := core.next_part(number)) is not None:
        chunk, checksum = _frame(part, checksum)
        yield chunk


class SnapshotReader:
    """Reads the sources at once, and the rest when asked.

    Args:
        chunks: the snapshot's bytes, cut in any way.

    Raises:
        SnapshotError: the beginning is damaged, or of another version.
    """

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._bytes = _Bytes(chunks)
        if self._bytes.take(len(_MAGIC)) != _MAGIC:
            raise SnapshotError("this is no snapshot of a prefix index")
        version = int.from_bytes(self._bytes.take(2), "little")
        if version != _VERSION:
            raise SnapshotError(f"the snapshot has version {version}; only version {_VERSION} can be read")
        self._checksum = 0
        try:
            self.sources = msgspec.msgpack.decode(self._payload(), type=list[SourceHeader])
        except msgspec.DecodeError as error:
            raise SnapshotError(f"the snapshot's list of sources cannot be read: {error}") from error

    def restore(self, core: _native.PrefixCore, streams: list[int], now_tick: int) -> int:
        """Fill an empty native index; returns the blocks held, over all sources and tiers.

        Args:
            core: whose sources have been admitted.
            streams: their numbers in ``core``, in the order of :attr:`sources`.
            now_tick: from which the ends of predicted blocks are counted.

        Raises:
            SnapshotError: the rest is damaged; ``core`` is of no use any more.
        """
        try:
            return core.restore(self._parts(), streams, now_tick)
        except SnapshotError:
            raise
        except ValueError as error:
            raise SnapshotError(str(error)) from error

    def _parts(self) -> Iterator[bytes]:
        while not self._bytes.at_end():
            yield self._payload()

    def _payload(self) -> bytes:
        length = int.from_bytes(self._bytes.take(_LENGTH_BYTES), "little")
        if length > _MAX_FRAME_BYTES:
            raise SnapshotError("the snapshot is damaged: a frame is too long")
        payload = self._bytes.take(length)
        self._checksum = _native.xxh3_64(payload, self._checksum)
        if int.from_bytes(self._bytes.take(_CHECKSUM_BYTES), "little") != self._checksum:
            raise SnapshotError("the snapshot is damaged: a checksum does not match")
        return payload


class _Bytes:
    """Takes so many bytes from chunks that are cut otherwise."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._buffer = bytearray()

    def take(self, count: int) -> bytes:
        while len(self._buffer) < count:
            chunk = next(self._chunks, None)
            if chunk is None:
                raise SnapshotError("the snapshot ends too early")
            self._buffer += chunk
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    def at_end(self) -> bool:
        while not self._buffer:
            chunk = next(self._chunks, None)
            if chunk is None:
                return True
            self._buffer += chunk
        return False


def _frame(payload: bytes, before: int) -> tuple[bytes, int]:
    checksum = _native.xxh3_64(payload, before)
    frame = len(payload).to_bytes(_LENGTH_BYTES, "little") + payload + checksum.to_bytes(_CHECKSUM_BYTES, "little")
    return frame, checksum
