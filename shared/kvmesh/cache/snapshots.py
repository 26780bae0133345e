"""Where reusable snapshots of a prompt are taken (semantics §1.2, §1.3); pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["branch_point", "snapshot_points"]


def branch_point(num_known_blocks: int, tokens_per_block: int, prompt_length: int) -> int | None:
    """Where a prompt leaves what the tree knows, aligned down to a block; None at its very start or end."""
    fork = num_known_blocks * tokens_per_block
    return fork if 0 < fork < prompt_length else None


def snapshot_points(
    prompt_length: int,
    *,
    interval: int,
    offsets_from_start: Iterable[int],
    offsets_from_end: Iterable[int],
    fork: int | None = None,
    branch_snapshots: bool = False,
) -> tuple[int, ...]:
    """Prompt positions, ascending, after which the recurrent state is snapshotted.

    Args:
        prompt_length: tokens.
        interval: tokens between periodic snapshots, 0 for none.
        offsets_from_start: positions; those beyond the prompt are ignored.
        offsets_from_end: tokens before the prompt's end; those that reach its start or beyond are ignored.
        fork: :func:`branch_point` of the prompt.
        branch_snapshots: with these, the prompt's end is a snapshot point when no other rule names one.
    """
    ruled = set(range(interval, prompt_length + 1, interval)) if interval else set()
    ruled.update(offset for offset in offsets_from_start if offset <= prompt_length)
    ruled.update(prompt_length - offset for offset in offsets_from_end if offset < prompt_length)
    if branch_snapshots:
        if not ruled:
            ruled.add(prompt_length)
        if fork is not None:
            ruled.add(fork)
    return tuple(sorted(ruled))
