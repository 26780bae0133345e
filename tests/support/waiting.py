"""How a test waits for what another task or process brings about: there is no event to wait for, only a bound."""

from __future__ import annotations

from collections.abc import Callable

import anyio

__all__ = ["until"]

POLL_S = 0.01


async def until(condition: Callable[[], object], what: str = "", timeout_s: float = 60.0) -> None:
    """Wait until ``condition`` holds; ``what`` it is, for the failure."""
    with anyio.move_on_after(timeout_s) as scope:
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await anyio.sleep(POLL_S)
    assert not scope.cancelled_caught, f"not within {timeout_s:g} s: {what or condition}"
