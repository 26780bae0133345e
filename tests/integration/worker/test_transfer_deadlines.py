"""``kv_transfer_timeout_ms`` at engine level, with peers that stand still: what fails, what waits; nothing is lost.

The three waits: an offer that nobody fetches, a fetch that nobody serves, and an offer whose reader stands still. Times
are judged with room to spare: no deadline fires early, and nothing waits much longer.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from freezing import freeze
from soaks import soak_only

pytestmark = pytest.mark.slow

Make = Callable[..., Any]
TIMEOUT_MS = 2500
LATE_S = 20.0
"""What the deadline may take at most on a busy machine."""
PAST_S = 1.5
"""Well past the deadline, and the cancel that follows it."""
PROMPT = [1000 + 37 * i for i in range(70)]
PAGES = 3


@pytest.fixture
def pair(settings_of: Make, serve: Make) -> Make:
    def make(backend: str, faults: tuple[str, str] = ("", "")) -> Any:
        roles = (settings_of(role, backend=backend, timeout_ms=TIMEOUT_MS) for role in ("context", "generation"))
        return serve(*roles, faults=faults)

    return make


@pytest.mark.parametrize("backend", ["DEFAULT", pytest.param("NIXL", marks=soak_only)])
async def test_an_offer_that_nobody_fetches(pair: Make, backend: str) -> None:
    async with pair(backend) as (context, generation):
        started_s = time.monotonic()
        handoff = await context.prefill(PROMPT, 11)
        await context.wait_stats(
            "the offer pins its pages", timeout_s=0.9 * TIMEOUT_MS / 1000, pages_pinned=PAGES, in_transfer=1
        )
        await context.wait_stats("the deadline", transfers_timed_out_total=1)
        assert TIMEOUT_MS / 1000 <= time.monotonic() - started_s + 0.25 < LATE_S
        await context.wait_whole()
        # Whoever comes now is told at once.
        started_s = time.monotonic()
        status, answer = await generation.decode(PROMPT, handoff)
        assert status >= 400, answer
        assert answer["error"]["code"]
        assert time.monotonic() - started_s < LATE_S
        await generation.wait_whole()
        await check_works(context, generation, 12)


@pytest.mark.parametrize(
    ("backend", "ending"),
    [
        ("DEFAULT", "continues"),
        ("NIXL", "dies"),
        pytest.param("DEFAULT", "dies", marks=soak_only),
        pytest.param("NIXL", "continues", marks=soak_only),
    ],
)
async def test_a_fetch_that_nobody_serves(pair: Make, backend: str, ending: str) -> None:
    async with pair(backend) as (context, generation):
        await check_works(context, generation, 20)
        prompt = [token + 1 for token in PROMPT]
        handoff = await context.prefill(prompt, 21)
        freeze(context.engine_pid)
        started_s = time.monotonic()
        status, answer = await generation.decode(prompt, handoff)
        assert (status, answer["error"]["code"]) == (503, "kv_transfer_timeout")
        assert TIMEOUT_MS / 1000 <= time.monotonic() - started_s < LATE_S
        if backend == "NIXL":
            # The peer writes: until it says that it will not, or is dead, the pages belong to nobody else.
            await generation.wait_stats("quarantine", pages_quarantined=PAGES, transfers_timed_out_total=1)
        else:
            # The receiver pulls: once it has stopped, nobody writes.
            await generation.wait_whole()
        if ending == "continues":
            context.signal(signal.SIGCONT)
            await generation.wait_whole()
            await context.wait_whole()
            await check_works(context, generation, 22)
        else:
            context.signal(signal.SIGKILL)
            await generation.wait_whole()


@pytest.mark.parametrize("ending", ["continues", "dies"])
async def test_an_offer_whose_reader_stands_still(pair: Make, ending: str) -> None:
    """The deadline passes, yet the pages stay pinned: the reader might go on reading them."""
    async with pair("DEFAULT", ("", "transceiver.during_transfer=stop")) as (context, generation):
        handoff = await context.prefill(PROMPT, 31)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(quietly, generation, PROMPT, handoff)
            await generation.wait_stopped()
            await context.wait_stats("the deadline", transfers_timed_out_total=1)
            since_s = time.monotonic()
            while time.monotonic() - since_s < PAST_S:
                stats = await context.stats()
                assert stats["pages_pinned"] + stats["pages_quarantined"] == PAGES
                assert stats["transfers_completed_total"] == 0
                await anyio.sleep(0.1)
            if ending == "dies":
                generation.signal(signal.SIGKILL)
                await context.wait_whole()
            else:
                # It stops again at each page run; every time it goes on.
                with anyio.fail_after(LATE_S):
                    while (await context.stats())["in_transfer"]:
                        generation.signal(signal.SIGCONT)
                        await anyio.sleep(0.05)
                await context.wait_whole()
                generation.signal(signal.SIGCONT)
                await generation.wait_whole()


async def quietly(generation: Any, prompt: list[int], handoff: dict[str, Any]) -> None:
    """A leg whose outcome is not the point."""
    status, answer = await generation.decode(prompt, handoff)
    assert status in (200, 503, 504), answer


async def check_works(context: Any, generation: Any, transfer_id: int) -> None:
    """A whole request of two legs."""
    status, answer = await generation.decode(PROMPT, await context.prefill(PROMPT, transfer_id))
    assert status == 200, answer
    assert len(answer["choices"][0]["token_ids"]) == 8
    await context.wait_whole()
    await generation.wait_whole()
