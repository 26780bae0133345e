"""What engines did to their caches, apart from any way of writing it: for fixtures, and what must be read from them.

Used under other projects' interpreters, too: nothing but the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["BLOCK", "SCENARIOS", "Batch", "Event", "Removal", "Store"]

BLOCK = 4
"""Tokens per block."""

A, B, C, D, E, F = 0x8000000000000001, 0x1111111122222222, 0xFFFFFFFFFFFFFFFE, 0x0123456789ABCDEF, 5, 0x7FFFFFFFFFFFFFFF
"""Hashes: some are negative as signed numbers, some small."""


@dataclass(frozen=True)
class Store:
    """Consecutive blocks became reusable."""

    hashes: list[int]
    parent: int | None
    tokens: list[int]
    """Of the blocks, then those of the lookahead."""
    tier: str = "device"
    lora_id: int | None = None
    lora_name: str | None = None
    salt: str | None = None
    images: list[list[tuple[str, int]]] = field(default_factory=list)
    """For each block the images in it: identifier, and where it starts relative to the block."""
    lookahead: int = 0
    group: int | None = None
    kind: str | None = None


@dataclass(frozen=True)
class Removal:
    """Blocks left a tier."""

    hashes: list[int]
    tier: str = "device"
    group: int | None = None


Event = Store | Removal | None
"""None: everything was cleared."""

Batch = list[Event]


def run(first: int, count: int) -> list[int]:
    """Token ids that need one, two, three or five bytes on the wire."""
    return [(number * 37) % 120 + (0, 200, 1000, 100_000)[number % 4] for number in range(first, first + count)]


SCENARIOS: dict[str, list[Batch]] = {
    # A chain, one block more, a branch, a removal in the middle of it all, another sequence.
    "plain": [
        [Store([A, B, C], None, run(0, 12)), Store([D], C, run(12, 4))],
        [Store([E], A, run(100, 4)), Removal([D])],
        [Store([F], None, run(200, 4)), Store([A], None, run(0, 4))],
    ],
    "cleared": [[Store([A, B], None, run(0, 8))], [None, Store([C], None, run(8, 4))]],
    # Stored in host memory, too; then one block is gone from the device, another from the host.
    "tiers": [
        [Store([A, B], None, run(0, 8))],
        [Store([A, B], None, run(0, 8), tier="host"), Removal([B]), Removal([A], tier="host")],
    ],
    "salted": [
        [Store([A, B], None, run(0, 8), salt="tenant-a"), Store([C], B, run(8, 4), salt="tenant-a")],
        [Store([D], None, run(0, 4))],
    ],
    "adapter": [[Store([A, B], None, run(0, 8), lora_name="sql"), Store([C], B, run(8, 4), lora_name="sql")]],
    "numbered_adapter": [[Store([A, B], None, run(0, 8), lora_id=7), Store([C], None, run(0, 4))]],
    # Equal tokens, another image: nothing is shared from the image's block on.
    "images": [
        [Store([A, B, C], None, run(0, 12), images=[[], [("1f" * 32, 2)], [("1f" * 32, -2)]])],
        [Store([D, E, F], None, run(0, 12), images=[[], [("2e" * 32, 2)], [("2e" * 32, -2)]])],
    ],
    # Two blocks with the same tokens, told apart by what follows.
    "lookahead": [
        [Store([A, B], None, [*run(0, 8), 91], lookahead=1), Store([C], A, [*run(4, 4), 92], lookahead=1)],
        [Removal([C]), Store([D], B, [91, 92, 93, 94, 95], lookahead=1)],
    ],
    # Blocks of a sliding window say nothing about a prefix, nor do their removals.
    "groups": [
        [
            Store([A, B], None, run(0, 8), group=0, kind="full_attention"),
            Store([C, D], None, run(0, 8), group=1, kind="sliding_window"),
        ],
        [Removal([C], group=1), Removal([B], group=0)],
    ],
}
