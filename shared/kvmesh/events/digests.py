"""Digests of what a worker has told and not taken back, so that a reader can check what it holds without a dump.

A digest is a count and a sum of mixed hashes. Both sides keep theirs block by block: storing adds, removing subtracts,
the order does not matter. A worker answers ``["", "digest"]`` on its replay endpoint with the sequence number of the
last batch that the digests cover; a reader compares them with its own as of that number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvmesh.events.records import LoraKey, Tier

__all__ = [
    "DIGEST_REQUEST",
    "Digest",
    "DigestAnswer",
    "DigestError",
    "DigestKey",
    "answer_frames",
    "differences",
    "digest_of",
    "mix",
    "mixed_sum",
    "parse_answer",
]

DIGEST_REQUEST = b"digest"
"""Second frame of the request and of its answer; a replay request has a number of 8 bytes there."""

_MASK = 2**64 - 1


class DigestError(ValueError):
    """An answer to a digest request that is none."""


class Digest(NamedTuple):
    """Of a set of blocks. Equal sets have equal digests; two that differ agree once in 2**64 times."""

    num_blocks: int = 0
    sum: int = 0
    """Sum of :func:`mix` over the blocks' unsigned 64-bit hashes on the wire, modulo 2**64."""

    def plus(self, other: Digest) -> Digest:
        """Of the union with a set that has no block in common."""
        return Digest(self.num_blocks + other.num_blocks, (self.sum + other.sum) & _MASK)

    def minus(self, other: Digest) -> Digest:
        """Of what is left without a subset."""
        return Digest(self.num_blocks - other.num_blocks, (self.sum - other.sum) & _MASK)


class DigestKey(NamedTuple):
    """Which blocks of a publisher a digest is of; every publisher is one rank of one model."""

    tier: Tier
    lora: LoraKey = None
    salt: str | None = None
    """As it stands in the events."""


class DigestAnswer(NamedTuple):
    """What a publisher says about itself."""

    sequence: int
    """Of the last batch that the digests cover, whether it was sent or dropped; 2**64 - 1 before the first."""
    digests: dict[DigestKey, Digest]
    """Those of nothing are left out."""


def mix(number: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014), a bijection on 64 bits."""
    number &= _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def mixed_sum(hashes: NDArray[np.uint64]) -> int:
    """Sum of :func:`mix` over ``[n]`` hashes, modulo 2**64."""
    mixed = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((mixed ^ (mixed >> np.uint64(31))).sum(dtype=np.uint64))


def digest_of(hashes: Iterable[int]) -> Digest:
    """Of a set of hashes, signed or unsigned."""
    sums = [mix(number) for number in hashes]
    return Digest(len(sums), sum(sums) & _MASK)


def answer_frames(sequence: int, digests: Mapping[DigestKey, Digest]) -> list[bytes]:
    """The frames after the client's identity: ``["", "digest", sequence, payload]``.

    The payload is msgpack ``[[tier, lora_id | nil, lora_name | nil, salt | nil, num_blocks, sum], ...]``; tiers are
    numbered 0 device, 1 host, 2 disk, and scopes without blocks are left out.
    """
    rows = []
    for (tier, lora, salt), digest in digests.items():
        if digest.num_blocks or digest.sum:
            by_name = isinstance(lora, str)
            rows.append([int(tier), None if by_name else lora, lora if by_name else None, salt, *digest])
    return [b"", DIGEST_REQUEST, sequence.to_bytes(8, "big"), msgspec.msgpack.encode(rows)]


def parse_answer(frames: list[bytes]) -> DigestAnswer | None:
    """What :func:`answer_frames` made; None for an answer to something else, such as the end of a replay.

    Raises:
        DigestError: it says that it is a digest, and is not.
    """
    if len(frames) != 4 or frames[0] or frames[1] != DIGEST_REQUEST:
        return None
    if len(frames[2]) != 8:
        raise DigestError("the sequence number does not have 8 bytes")
    digests: dict[DigestKey, Digest] = {}
    try:
        for tier, lora_id, lora_name, salt, num_blocks, total in _rows.decode(frames[3]):
            key = DigestKey(Tier(tier), lora_id if lora_name is None else lora_name, salt)
            digests[key] = digests.get(key, Digest()).plus(Digest(num_blocks, total))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise DigestError(f"not a list of digests: {error}") from error
    return DigestAnswer(int.from_bytes(frames[2], "big"), digests)


def differences(told: Mapping[DigestKey, Digest], held: Mapping[DigestKey, Digest]) -> dict[DigestKey, int]:
    """Where a reader is wrong: its blocks more (or less, negative) than the publisher's; 0: as many, but others."""
    empty = Digest()
    return {
        key: held.get(key, empty).num_blocks - told.get(key, empty).num_blocks
        for key in told.keys() | held.keys()
        if told.get(key, empty) != held.get(key, empty)
    }


_rows: msgspec.msgpack.Decoder[list[tuple[int, int | None, str | None, str | None, int, int]]] = (
    msgspec.msgpack.Decoder(list[tuple[int, int | None, str | None, str | None, int, int]])
)
