"""How far a stream was followed, in a form that outlives the process: a number, and what its batch said."""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple, Self

__all__ = ["Watermark", "payload_digest"]

_DIGEST_BYTES = 16


class Watermark(NamedTuple):
    """The last batch that was applied.

    The number alone would not do: a publisher that has started again may have reached it with other batches.
    """

    sequence: int
    digest: bytes
    """:func:`payload_digest` of the batch."""

    def encode(self) -> bytes:
        """24 bytes for a snapshot."""
        return self.sequence.to_bytes(8, "big") + self.digest

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Undo :meth:`encode`.

        Raises:
            ValueError: this is no watermark.
        """
        if len(data) != 8 + _DIGEST_BYTES:
            raise ValueError(f"a watermark has {8 + _DIGEST_BYTES} bytes, not {len(data)}")
        return cls(int.from_bytes(data[:8], "big"), data[8:])


def payload_digest(payload: bytes) -> bytes:
    """16 bytes that stand for a batch."""
    return blake2b(payload, digest_size=_DIGEST_BYTES).digest()
