"""Loans between engine processes that are killed or stand still: real memory, real signals, nothing lost."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from freezing import freeze
from soaks import soak_only
from waiting import until

from kvmesh.config import CacheTransceiverConfig, KvCacheConfig, WorkerSettings
from kvmesh.engine.client import EngineClient
from kvmesh.protocol.errors import ApiError

pytestmark = [pytest.mark.asyncio, pytest.mark.slow, soak_only]

Make = Callable[..., Any]
PATIENCE_S = 60.0
SHORT_MS = 2000
"""A deadline that a test waits for."""


@asynccontextmanager
async def engines(
    model: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], *, timeout_ms: int = 600_000, faults: str = ""
) -> AsyncIterator[list[EngineClient]]:
    """An owner of pages, and receivers, in which ``faults`` are armed."""
    async with AsyncExitStack() as stack:
        clients = []
        for name in names:
            monkeypatch.setenv("KVMESH_FAULTS", "" if name == "context" else faults)
            settings = WorkerSettings(
                model=str(model),
                device="cpu",
                num_threads=1,
                instance_id=name,
                cluster_secret="secret",
                kv_cache_config=KvCacheConfig(tokens_per_block=4, max_tokens=2000),
                cache_transceiver_config=CacheTransceiverConfig(backend="DEFAULT", kv_transfer_timeout_ms=timeout_ms),
            )
            clients.append(await stack.enter_async_context(EngineClient.launch(settings)))
        yield clients


async def answer(client: EngineClient, request: Any) -> Any:
    with anyio.fail_after(PATIENCE_S):
        return [output async for output in client.generate(request)][-1]


class Legs:
    """Requests of two legs, each of a prompt of its own."""

    def __init__(self, prompt: Make, request_of: Make) -> None:
        self._prompt, self._request_of = prompt, request_of
        self._next_id = 1

    async def prefill(self, context: EngineClient) -> Callable[..., Any]:
        """What makes the request of the generation leg."""
        number, self._next_id = self._next_id, self._next_id + 1
        tokens = self._prompt(24, number)
        first = await answer(context, self._request_of(f"c{number}", tokens, kind="context", transfer_id=number))
        assert first.finish_reason == "not_finished"

        def leg() -> Any:
            legs = {"kind": "generation", "first_tokens": first.token_ids, "handoff": first.handoff}
            return self._request_of(f"g{number}", tokens, transfer_id=number, **legs)

        return leg

    async def both(self, context: EngineClient, generation: EngineClient) -> None:
        """A request that is answered: the two know each other then."""
        leg = await self.prefill(context)
        assert (await answer(generation, leg())).finish_reason == "length"
        await quiet(context)

    async def alone(self, client: EngineClient) -> Any:
        """The answer to a request that one server serves by itself."""
        return await answer(client, self._request_of("alone", self._prompt(24, 90)))


@pytest.fixture
def legs(prompt: Make, request_of: Make) -> Legs:
    return Legs(prompt, request_of)


async def quiet(*clients: EngineClient) -> None:
    """No page is kept for anybody."""
    for client in clients:
        await until(lambda one=client: one.stats.pages_pinned == 0, "pages are free")


async def test_of_a_receiver_killed_before_its_acknowledgement_the_deadline_frees_the_pages(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, legs: Legs
) -> None:
    """Without a router, whose abort would do so at once."""
    names = ["context", "killed", "another"]
    held = f"transceiver.before_ack=hold:{tmp_path}"
    async with engines(tiny_model, monkeypatch, names, timeout_ms=SHORT_MS, faults=held) as (context, killed, another):
        await legs.both(context, killed)
        leg = await legs.prefill(context)
        (tmp_path / "transceiver.before_ack.armed").write_text("1")
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                with pytest.raises(ApiError):
                    await answer(killed, leg())

            tasks.start_soon(ask)
            await until((tmp_path / "transceiver.before_ack.reached").exists, "the pages are read")
            os.kill(killed.ready.pid, signal.SIGKILL)
        await quiet(context)
        await legs.both(context, another)


async def test_an_owner_killed_before_its_loan_is_read(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, legs: Legs
) -> None:
    """Its memory outlives it where it is mapped: the answer is right, or an error; nothing stays behind."""
    async with engines(tiny_model, monkeypatch, ["context", "generation"]) as (context, generation):
        await legs.both(context, generation)
        leg = await legs.prefill(context)
        os.kill(context.ready.pid, signal.SIGKILL)
        with contextlib.suppress(ApiError):
            assert (await answer(generation, leg())).finish_reason == "length"
        await quiet(generation)
        alone = await legs.alone(generation)
        assert alone.finish_reason == "length"


async def test_a_receiver_drains_while_the_owner_of_what_it_has_read_stands_still(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, legs: Legs
) -> None:
    async with engines(tiny_model, monkeypatch, ["context", "generation"]) as (context, generation):
        await legs.both(context, generation)
        leg = await legs.prefill(context)
        freeze(context.ready.pid)
        try:
            assert (await answer(generation, leg())).finish_reason == "length"
            with anyio.fail_after(PATIENCE_S):
                await generation.drain(10 * PATIENCE_S)
        finally:
            os.kill(context.ready.pid, signal.SIGCONT)
        await quiet(context)
        assert context.stats.transfers_refused_total == 0


async def test_an_expired_ticket_is_refused_by_an_owner_that_stood_still(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, legs: Legs
) -> None:
    names = ["context", "generation"]
    async with engines(tiny_model, monkeypatch, names, timeout_ms=SHORT_MS) as (context, generation):
        await legs.both(context, generation)
        leg = await legs.prefill(context)
        freeze(context.ready.pid)
        try:
            await anyio.sleep(1.5 * SHORT_MS / 1e3)  # Nothing but the clock says that a ticket has expired.
            with pytest.raises(ApiError):
                await answer(generation, leg())
        finally:
            os.kill(context.ready.pid, signal.SIGCONT)
        await quiet(context, generation)
        assert generation.stats.transfers_borrowed_total == 0
