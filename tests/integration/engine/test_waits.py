"""The three waits for transfers, between engine processes: bounded, without polling, and never deaf to the front."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from freezing import freeze
from waiting import until

from kvmesh.config import CacheTransceiverConfig, KvCacheConfig, WorkerSettings
from kvmesh.engine.client import EngineClient, TokenStream
from kvmesh.protocol.engine import Generate, TokenOutput
from kvmesh.protocol.errors import ApiError

pytestmark = pytest.mark.asyncio

Make = Callable[..., Any]
Launch = Callable[..., Any]
PATIENCE_S = 20.0
SLACK_S = 10.0
"""What a busy machine may add to a deadline."""


@pytest.fixture
def launch(tiny_model: Path) -> Launch:
    """Launches a context and a generation engine; ``transfers`` goes to both, ``tokens`` is the context's cache."""

    @asynccontextmanager
    async def both(tokens: int = 2000, **transfers: Any) -> AsyncIterator[tuple[EngineClient, EngineClient]]:
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(
                    EngineClient.launch(
                        WorkerSettings(
                            model=str(tiny_model),
                            device="cpu",
                            num_threads=1,
                            log_level="error",
                            instance_id=name,
                            cluster_secret="secret",
                            kv_cache_config=KvCacheConfig(tokens_per_block=4, max_tokens=size, host_cache_size=0),
                            cache_transceiver_config=CacheTransceiverConfig(**{"backend": "DEFAULT", **transfers}),
                        )
                    )
                )
                for name, size in (("context", tokens), ("generation", 2000))
            ]
            yield clients[0], clients[1]

    return both


async def whole(stream: TokenStream) -> list[TokenOutput]:
    with anyio.fail_after(PATIENCE_S):
        return [output async for output in stream]


async def prefill(client: EngineClient, request: Generate) -> TokenOutput:
    last = (await whole(client.generate(request)))[-1]
    assert last.finish_reason == "not_finished"
    return last


def second_leg(request_of: Make, number: int, tokens: bytes, first: TokenOutput) -> Generate:
    legs = {"kind": "generation", "transfer_id": number, "first_tokens": first.token_ids, "handoff": first.handoff}
    request: Generate = request_of(f"g{number}", tokens, **legs)
    return request


async def test_a_generation_engine_waits_for_a_frozen_peer(launch: Launch, prompt: Make, request_of: Make) -> None:
    """It neither polls nor turns a deaf ear, fails the request at the deadline, and gets its pages back."""
    async with launch(kv_transfer_timeout_ms=6000) as (context, generation):
        # The first pairs the two, the second fits a loan, the third does not.
        for number, tokens in enumerate((prompt(20), prompt(24, 7), prompt(280, 9)), 1):
            request = request_of(f"c{number}", tokens, kind="context", transfer_id=number)
            first = await prefill(context, request)
            if number == 1:
                await whole(generation.generate(second_leg(request_of, 1, tokens, first)))
            elif number == 2:
                on_loan = second_leg(request_of, 2, tokens, first)
        freeze(context.ready.pid)
        try:
            assert (await whole(generation.generate(on_loan)))[-1].finish_reason == "length"
            started_s = time.monotonic()
            stream = generation.generate(second_leg(request_of, 3, tokens, first))
            with anyio.fail_after(PATIENCE_S):
                # An engine that waits sends no statistics until something wakes it.
                while not generation.stats.in_transfer:
                    await generation.ping(PATIENCE_S)
                    await anyio.sleep(0.05)
            before = (await generation.ping(PATIENCE_S)).iteration
            await anyio.sleep(0.5)
            assert (await generation.ping(PATIENCE_S)).iteration - before < 10, "a wait is no polling"
            # A request that comes in between is served at once.
            assert len(await whole(generation.generate(request_of("local", prompt(9, 3))))) > 0
            assert time.monotonic() - started_s < 6.0, "before the deadline"
            with pytest.raises(ApiError) as caught:
                await whole(stream)
            assert (caught.value.status, caught.value.code) == (503, "kv_transfer_timeout")
            assert 5.9 < time.monotonic() - started_s < 6.0 + SLACK_S
            # The receiver reads, so that a frozen owner cannot write: its pages are free at once.
            await until(lambda: generation.stats.pages_pinned + generation.stats.pages_locked == 0)
            assert context.stats.pages_pinned > 0
        finally:
            os.kill(context.ready.pid, signal.SIGCONT)
        await until(lambda: context.stats.pages_pinned == 0)


async def test_pages_that_a_frozen_peer_may_write_are_quarantined(
    launch: Launch, prompt: Make, request_of: Make
) -> None:
    """On NIXL the owner writes: the receiver's pages are nobody's until it has answered."""
    async with launch(kv_transfer_timeout_ms=1500, backend="NIXL") as (context, generation):
        for number, tokens in ((1, prompt(20)), (2, prompt(24, 7))):
            first = await prefill(context, request_of(f"c{number}", tokens, kind="context", transfer_id=number))
            if number == 1:
                await whole(generation.generate(second_leg(request_of, number, tokens, first)))
        freeze(context.ready.pid)
        try:
            with pytest.raises(ApiError, match="kv_transfer_timeout_ms"):
                await whole(generation.generate(second_leg(request_of, 2, tokens, first)))
            await until(lambda: generation.stats.pages_quarantined == 6)
            assert (generation.stats.pages_pinned, generation.stats.pages_locked) == (0, 0)
            assert len(await whole(generation.generate(request_of("local", prompt(9, 3))))) > 0
            await until(lambda: generation.stats.pages_locked == 0)
            assert generation.stats.pages_quarantined == 6
        finally:
            os.kill(context.ready.pid, signal.SIGCONT)
        await until(lambda: generation.stats.pages_quarantined == 0)
        await until(lambda: context.stats.pages_pinned == 0)
        assert generation.stats.integrity_failures_total == 0


async def test_pages_that_nobody_fetches_return_after_the_timeout(
    launch: Launch, prompt: Make, request_of: Make
) -> None:
    """An idle engine with tracked transfers looks once in min(poll interval, timeout)."""
    async with launch(kv_transfer_timeout_ms=400) as (context, _):
        await prefill(context, request_of("c1", prompt(20), kind="context", transfer_id=1))
        started_s = time.monotonic()
        await until(lambda: context.stats.transfers_timed_out_total == 1)
        await until(lambda: context.stats.pages_pinned == 0)
        assert 0.3 < time.monotonic() - started_s < SLACK_S
        assert (await context.ping(PATIENCE_S)).iteration < 40


async def test_a_prompt_that_needs_the_pages_being_sent_starts_when_they_return(
    launch: Launch, prompt: Make, request_of: Make
) -> None:
    """The wait of the context side ends with the transfer, not with its slice."""
    async with launch(tokens=40, kv_transfer_sender_future_timeout_ms=10_000) as (context, generation):
        tokens = prompt(30)
        first = await prefill(context, request_of("c1", tokens, kind="context", transfer_id=1))
        blocked = context.generate(request_of("c2", prompt(30, 5), kind="context", transfer_id=2))
        await until(lambda: context.stats.waiting == 1)
        before = (await context.ping(PATIENCE_S)).iteration
        await anyio.sleep(0.3)
        assert (await context.ping(PATIENCE_S)).iteration - before < 10
        started_s = time.monotonic()
        await whole(generation.generate(second_leg(request_of, 1, tokens, first)))
        assert (await whole(blocked))[-1].finish_reason == "not_finished"
        assert time.monotonic() - started_s < 10.0, "before the sender has waited long enough"
