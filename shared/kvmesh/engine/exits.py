"""How an engine process ends, and what its front says of it."""

from __future__ import annotations

__all__ = ["EXIT_DEFECT", "EXIT_RANK_LOST", "how_it_ended"]

EXIT_DEFECT = 70
"""``EX_SOFTWARE`` of sysexits.h."""

EXIT_RANK_LOST = 71
"""Another rank of the engine is gone or does not answer; the engine's log names it."""

_MEANINGS = {EXIT_RANK_LOST: ": one of its ranks was lost, its log says which"}


def how_it_ended(code: int) -> str:
    """A process's end in words.

    Args:
        code: its exit status, or minus the signal that killed it.
    """
    return f"killed by signal {-code}" if code < 0 else f"exit status {code}{_MEANINGS.get(code, '')}"
