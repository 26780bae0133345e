"""§5.3, §6.5: both legs at once between real processes, and what happens to one when the other fails."""

from __future__ import annotations

import base64
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from kvmesh.config.transfer_backend import installed_backends
from kvmesh.worker import server

pytestmark = pytest.mark.slow

Make = Callable[..., Any]
PROMPT = [1000 + 37 * i for i in range(200)]
"""Seven chunks of the context server."""
CHUNK = 32
ROWS = ["whole", "pipelined"]


class Legs:
    """Two workers, and both legs of requests to them."""

    def __init__(self, context: Any, generation: Any, address: str) -> None:
        self.context = context
        self.generation = generation
        self._address = address

    async def context_leg(self, transfer_id: int, prompt: list[int] = PROMPT, **options: Any) -> tuple[int, Any]:
        params = {"request_type": "context_only", "disagg_request_id": transfer_id, "schedule_style": 1}
        return await self.context.complete(prompt, disaggregated_params=params, **options)

    async def generation_leg(self, transfer_id: int, prompt: list[int] = PROMPT, **options: Any) -> tuple[int, Any]:
        params = {
            "request_type": "generation_only",
            "disagg_request_id": transfer_id,
            "ctx_request_id": transfer_id,
            "schedule_style": 1,
            "encoded_opaque_state": self._address,
        }
        return await self.generation.complete(prompt, disaggregated_params=params, **options)

    async def both(self, transfer_id: int, prompt: list[int] = PROMPT, **options: Any) -> dict[str, tuple[int, Any]]:
        """Status and body of both, by name."""
        found: dict[str, tuple[int, Any]] = {}

        async def run(name: str, leg: Callable[..., Awaitable[tuple[int, Any]]]) -> None:
            found[name] = await leg(transfer_id, prompt, **options)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, "context", self.context_leg)
            tasks.start_soon(run, "generation", self.generation_leg)
        return found

    async def check_works(self, transfer_id: int) -> None:
        """A whole request of two legs, and every page comes back."""
        prompt = [token + transfer_id for token in PROMPT]
        found = await self.both(transfer_id, prompt)
        assert {name: status for name, (status, _) in found.items()} == {"context": 200, "generation": 200}, found
        first = found["context"][1]["choices"][0]["token_ids"]
        assert found["generation"][1]["choices"][0]["token_ids"][:1] == first
        await self.context.wait_whole()
        await self.generation.wait_whole()


@pytest.fixture
def legs(settings_of: Make, serve: Make) -> Make:
    """``async with legs(row, faults=...) as legs``."""

    @asynccontextmanager
    async def start(row: str, *, timeout_ms: int = 60_000, faults: tuple[str, str] = ("", "")) -> AsyncIterator[Legs]:
        backend = "NIXL" if row == "pipelined" else "DEFAULT"
        if backend not in (installed_backends() | {"DEFAULT"}):
            pytest.skip("needs kvmesh[engine] (NIXL)")
        context = settings_of("context", backend=backend, timeout_ms=timeout_ms)
        transfers = context.cache_transceiver_config.model_copy(
            update={"enable_pipelined_transfer": row == "pipelined"}
        )
        context = context.model_copy(update={"cache_transceiver_config": transfers, "max_num_tokens": CHUNK})
        generation = settings_of("generation", backend=backend, timeout_ms=timeout_ms)
        async with serve(context, generation, faults=faults) as (ctx, gen):
            info = await ctx.get("/server_info")
            [address] = info["ctx_addresses"]
            assert base64.b64decode(address)
            yield Legs(ctx, gen, address)

    return start


@pytest.mark.parametrize("row", ROWS)
async def test_both_legs(legs: Make, row: str) -> None:
    async with legs(row) as pair:
        found = await pair.both(1)
        status, answer = found["generation"]
        assert status == 200, answer
        assert answer["usage"] == {
            "prompt_tokens": 200,
            "completion_tokens": 8,
            "total_tokens": 208,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        status, first = found["context"]
        assert status == 200
        [choice] = first["choices"]
        assert (choice["finish_reason"], choice["disaggregated_params"]["schedule_style"]) == ("not_finished", 1)
        assert choice["token_ids"] == answer["choices"][0]["token_ids"][:1]
        # The context server's cached tokens are told, not the generation server's own.
        again = (await pair.both(2))["generation"][1]["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert again == 199
        await pair.check_works(3)
        records = {record["disagg_request_id"]: record for record in await pair.generation.get("/perf_metrics")}
        assert records[1]["transfer_pages"] == 7
        assert records[2]["transfer_pages"] == 1


@pytest.mark.parametrize("row", ROWS)
async def test_answers_of_every_kind_and_legs_that_are_left_alone(legs: Make, row: str) -> None:
    async with legs(row) as pair:
        plain = (await pair.both(1, logprobs=2))["generation"][1]["choices"][0]
        assert len(plain["logprobs"]["token_logprobs"]) == 8
        assert len(plain["logprobs"]["top_logprobs"][0]) >= 2
        one = await pair.both(2, max_tokens=1)
        assert [body["choices"][0]["finish_reason"] for _, body in one.values()] == ["length"] * 2
        assert len({tuple(body["choices"][0]["token_ids"]) for _, body in one.values()}) == 1
        stopped = await pair.both(3, stop_token_ids=plain["token_ids"][:1])
        assert [body["choices"][0]["finish_reason"] for _, body in stopped.values()] == ["stop"] * 2
        for number, leaves in enumerate(("context", "generation")):
            await check_leaving(pair, 10 + number, leaves)
        await pair.check_works(20)


async def check_leaving(pair: Legs, transfer_id: int, leaves: str) -> None:
    """A client leaves one leg; the other ends, and every page comes back."""
    found: list[tuple[int, Any]] = []
    of = {"context": pair.context_leg, "generation": pair.generation_leg}
    prompt = [token + transfer_id for token in PROMPT]

    async def stay() -> None:
        found.append(await of["generation" if leaves == "context" else "context"](transfer_id, prompt))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stay)
            with anyio.move_on_after(0.2):
                await of[leaves](transfer_id, prompt)
    [(status, answer)] = found
    if status != 200:  # on a fast machine it was over before
        assert (status, answer["error"]["code"]) == (503, "kv_transfer_cancelled")
    await pair.context.wait_whole()
    await pair.generation.wait_whole()


@pytest.mark.parametrize("row", ROWS)
async def test_a_leg_whose_partner_never_comes_fails_in_time(legs: Make, row: str) -> None:
    async with legs(row, timeout_ms=2000) as pair:
        for number, (leg, codes) in enumerate(
            (
                (pair.context_leg, {"kv_receiver_timeout"}),
                (pair.generation_leg, {"kv_transfer_timeout", "kv_context_timeout"}),
            )
        ):
            with anyio.fail_after(60):
                status, answer = await leg(1 + number)
            assert status == 503
            assert answer["error"]["code"] in codes
        await pair.context.wait_whole()
        await pair.generation.wait_whole()


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("dies", ["context", "generation"])
async def test_the_death_of_an_engine_fails_the_other_leg(
    legs: Make, row: str, dies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the prompt is computed, and slices of it are on their way."""
    monkeypatch.setattr(server, "FAILURE_GRACE_S", 600.0)  # the front of the dead lives in this process
    hold = "engine.batch=pause:1"
    async with legs(row, faults=(hold, "")) as pair:
        victim = pair.context if dies == "context" else pair.generation
        survivor = pair.generation if dies == "context" else pair.context
        found: dict[str, tuple[int, Any]] = {}

        async def run(name: str, leg: Callable[..., Awaitable[tuple[int, Any]]]) -> None:
            found[name] = await leg(1)

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run, "context", pair.context_leg)
                tasks.start_soon(run, "generation", pair.generation_leg)
                await pair.context.wait_stats("it computes", running=1)
                victim.signal(signal.SIGKILL)
        assert {status for status, _ in found.values()} == {503}, found
        await survivor.wait_whole()
