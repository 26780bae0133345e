"""Prompts that cross between engines of unequal ranks: the answer is that of one engine of one rank."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import build

from kvmesh.config import CacheTransceiverConfig, KvCacheConfig, WorkerSettings
from kvmesh.engine.client import EngineClient
from kvmesh.models.store import DEFAULT_MODEL
from kvmesh.protocol.engine import Generate, TokenOutput

Make = Callable[..., Any]
Sizes = tuple[int, int]

GOLDEN = Path(__file__).parents[2] / "data" / "golden" / "smollm2.json"
SAFE_MARGIN = 1e-3  # below it, rounding alone may swap the two best tokens
PATIENCE_S = 150.0
LENGTHS = (1, 21, 50)


def sizes(of: Sizes) -> dict[str, int]:
    return {"tensor_parallel_size": of[0], "pipeline_parallel_size": of[1]}


def two_legs(context: Any, generation: Any, request_of: Make, prompts: list[bytes]) -> list[list[int]]:
    """All prompts at once, prefilled by one engine and answered by the other."""
    answers = []
    for number, tokens in enumerate(prompts, 1):
        (first,) = context.run(request_of(f"c{number}", tokens, kind="context", transfer_id=number))
        legs = {"first_tokens": first.tokens, "handoff": first.last.handoff}
        generation.submit(request_of(f"g{number}", tokens, kind="generation", transfer_id=number, **legs))
        answers.append(generation.answers[f"g{number}"])
    end_s = time.monotonic() + PATIENCE_S
    while not all(answer.over for answer in answers) or context.cache.open_leases:
        assert time.monotonic() < end_s, "waited too long"
        context.step()
        generation.step()
    context.check_idle()
    generation.check_idle()
    return [answer.tokens for answer in answers]


@pytest.mark.parametrize(
    ("context", "generation", "transfers", "plane"),
    [
        ((2, 1), (1, 1), {}, "memfd"),
        ((1, 1), (2, 1), {}, "tcp"),
        ((1, 2), (1, 1), {}, "memfd"),
        ((2, 1), (1, 2), {}, "tcp"),
        ((2, 1), (2, 1), {}, "memfd"),
        ((1, 2), (4, 1), {"transceiver_runtime": "CPP"}, "auto"),
    ],
    ids=["tp2-1", "1-tp2", "pp2-1", "tp2-pp2", "tp2-tp2", "pp2-tp4-staged"],
)
def test_unequal_ranks(
    context: Sizes,
    generation: Sizes,
    transfers: dict[str, Any],
    plane: str,
    make_engine: Make,
    request_of: Make,
    prompt: Make,
) -> None:
    """§6.7: heads are split and merged, duplicated KV heads are filled, layers come from the stages that have them."""
    prompts = [prompt(length, length) for length in LENGTHS]
    alone = make_engine().run(*(request_of(f"r{i}", tokens) for i, tokens in enumerate(prompts)))
    options = {"transfers": {"backend": "DEFAULT", **transfers}, "transfer_plane": plane}
    got = two_legs(
        make_engine(name="context", **options, **sizes(context)),
        make_engine(name="generation", **options, **sizes(generation)),
        request_of,
        prompts,
    )
    assert got == [answer.tokens for answer in alone]


@pytest.mark.parametrize(("context", "generation"), [((2, 1), (1, 3)), ((1, 2), (2, 1))], ids=["tp2-pp3", "pp2-tp2"])
def test_unequal_ranks_with_windows(
    context: Sizes, generation: Sizes, make_engine: Make, request_of: Make, prompt: Make, tmp_path: Path
) -> None:
    build("gemma3", max_position_embeddings=256).save_pretrained(tmp_path)
    prompts = [prompt(length, length) for length in LENGTHS]
    options = {"model": str(tmp_path), "max_num_tokens": 24, "transfers": {"backend": "DEFAULT"}}
    alone = make_engine(**options).run(*(request_of(f"r{i}", tokens) for i, tokens in enumerate(prompts)))
    got = two_legs(
        make_engine(name="context", **options, **sizes(context)),
        make_engine(name="generation", **options, **sizes(generation)),
        request_of,
        prompts,
    )
    assert got == [answer.tokens for answer in alone]


@pytest.mark.slow
@pytest.mark.parametrize(("context", "generation"), [((3, 1), (1, 2)), ((1, 2), (3, 1))], ids=["tp3-pp2", "pp2-tp3"])
async def test_the_built_in_model_between_processes(context: Sizes, generation: Sizes, request_of: Make) -> None:
    """Both engines are processes, with followers of their own; the answers are the golden file's."""

    def settings(name: str, of: Sizes) -> WorkerSettings:
        return WorkerSettings(
            model=DEFAULT_MODEL,
            device="cpu",
            num_threads=1,
            log_level="warning",
            instance_id=name,
            cluster_secret="secret",
            kv_cache_config=KvCacheConfig(max_tokens=2000),
            cache_transceiver_config=CacheTransceiverConfig(backend="DEFAULT"),
            **sizes(of),
        )

    async def outputs(client: EngineClient, request: Generate) -> list[TokenOutput]:
        async with asyncio.timeout(PATIENCE_S):
            return [output async for output in client.generate(request)]

    items = json.loads(GOLDEN.read_text())["items"][:3]
    async with (
        EngineClient.launch(settings("context", context)) as sender,
        EngineClient.launch(settings("generation", generation)) as receiver,
    ):
        for number, item in enumerate(items, 1):
            tokens = np.array(item["prompt_ids"], dtype="<i4").tobytes()
            (first,) = await outputs(sender, request_of(f"c{number}", tokens, kind="context", transfer_id=number))
            legs = {"first_tokens": first.token_ids, "handoff": first.handoff, "max_tokens": 64}
            request = request_of(f"g{number}", tokens, kind="generation", transfer_id=number, **legs)
            got = [token for output in await outputs(receiver, request) for token in output.token_ids]
            unsure = next((i for i, margin in enumerate(item["top2_margin"]) if margin < SAFE_MARGIN), 64)
            assert got[:unsure] == item["greedy_ids"][:unsure]
            assert len(got) == 64
