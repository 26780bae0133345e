"""How much of a transfer a client waits for: a prompt sent slice by slice, against one sent when it is computed.

Three engine processes on this machine: two context engines, one with ``enable_pipelined_transfer`` and one without,
and a generation engine, all over NIXL and generation first. Rounds alternate between the two, with a new random prompt
each.
The exposed transfer time is the time to first token minus the prefill time: from the moment that the context engine
has sampled the first token to that at which the generation engine gives it out. The last line is JSON: medians of the
exposed time of both in milliseconds, the ratio (pipelined / whole; below 1 the copy is hidden), and how long prefill
and transfer took.

    python benchmarks/pipelined.py [--rounds 7] [--tokens 4096] [--chunk 512] [--no-checksums]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import anyio
import numpy as np

from kvmesh.config import CacheTransceiverConfig, KvCacheConfig, WorkerSettings
from kvmesh.engine.client import EngineClient
from kvmesh.models.store import DEFAULT_MODEL
from kvmesh.protocol.engine import Generate, RequestTimings, TokenOutput
from kvmesh.protocol.sampling import SamplingParams

WAYS = ("whole", "pipelined")
OUTPUT_TOKENS = 2
TIMEOUT_MS = 600_000
BYTES_PER_TOKEN = 64 << 10
"""More than a token of the default model takes."""


class Round(NamedTuple):
    """Milliseconds of one request."""

    prefill: float
    transfer: float
    """From the last slice to the end, or of all of it."""
    exposed: float
    ttft: float


def settings(name: str, options: argparse.Namespace, *, pipelined: bool = False) -> WorkerSettings:
    """An engine with room for two prompts."""
    return WorkerSettings(
        model=options.model,
        instance_id=name,
        num_threads=1,
        device="cpu",
        cluster_secret="of this benchmark",
        device_memory_bytes=2 * (options.tokens + 64) * BYTES_PER_TOKEN,
        max_seq_len=options.tokens + 64,
        max_num_tokens=options.chunk,
        transfer_checksums=options.checksums,
        kv_cache_config=KvCacheConfig(enable_block_reuse=True),
        cache_transceiver_config=CacheTransceiverConfig(
            backend="NIXL",
            transceiver_runtime="PYTHON",
            enable_pipelined_transfer=pipelined,
            kv_transfer_timeout_ms=TIMEOUT_MS,  # a receiver's runs while the prompt is computed
        ),
    )


async def last_of(outputs: AsyncIterator[TokenOutput]) -> RequestTimings:
    """The timings of a request, at its end."""
    timings = RequestTimings()
    async for output in outputs:
        timings = output.timings or timings
    return timings


async def measure(context: EngineClient, generation: EngineClient, transfer_id: int, prompt: bytes) -> Round:
    """Both legs of one request."""
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    legs: dict[str, Any] = {
        "prompt_token_ids": prompt,
        "sampling": sampling,
        "transfer_id": transfer_id,
        "generation_first": True,
    }
    found: dict[str, RequestTimings] = {}

    async def run(name: str, engine: EngineClient, request: Generate) -> None:
        found[name] = await last_of(engine.generate(request))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(
            run,
            "generation",
            generation,
            Generate(request_id=f"g{transfer_id}", kind="generation", ctx_address=context.ready.ctx_address, **legs),
        )
        tasks.start_soon(run, "context", context, Generate(request_id=f"c{transfer_id}", kind="context", **legs))
    there, here = found["context"], found["generation"]
    return Round(
        prefill=(there.first_token_ns - there.scheduled_ns) / 1e6,
        transfer=(here.transfer_end_ns - there.first_token_ns) / 1e6,
        exposed=(here.first_token_ns - there.first_token_ns) / 1e6,
        ttft=(here.first_token_ns - here.arrived_ns) / 1e6,
    )


async def run(options: argparse.Namespace) -> None:
    """Alternate, then compare."""
    random = np.random.default_rng(0)
    rounds: dict[str, list[Round]] = {way: [] for way in WAYS}
    ids = itertools.count(1)
    async with AsyncExitStack() as stack:
        contexts = {
            way: await stack.enter_async_context(
                EngineClient.launch(settings(f"context-{way}", options, pipelined=way == "pipelined"))
            )
            for way in WAYS
        }
        generation = await stack.enter_async_context(EngineClient.launch(settings("generation", options)))
        for number in range(options.rounds + 1):
            for way in WAYS if number % 2 else WAYS[::-1]:
                prompt = random.integers(100, 40_000, options.tokens, dtype=np.int32).tobytes()
                one = await measure(contexts[way], generation, next(ids), prompt)
                if number:  # the first connects, and touches the memory
                    rounds[way].append(one)
                    print(f"{way:>9}: {'  '.join(f'{name} {value:8.1f} ms' for name, value in one._asdict().items())}")
    medians = {way: Round(*map(statistics.median, zip(*rounds[way], strict=True))) for way in WAYS}
    print(
        json.dumps(
            {
                **{f"exposed_ms_{way}": round(medians[way].exposed, 2) for way in WAYS},
                "exposed_ratio": round(medians["pipelined"].exposed / medians["whole"].exposed, 3),
                **{f"prefill_ms_{way}": round(medians[way].prefill, 1) for way in WAYS},
                **{f"ttft_ms_{way}": round(medians[way].ttft, 1) for way in WAYS},
                "prompt_tokens": options.tokens,
                "chunk_tokens": options.chunk,
                "checksums": options.checksums,
                "rounds": options.rounds,
            }
        )
    )


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--no-checksums", dest="checksums", action="store_false")
    anyio.run(run, parser.parse_args())


if __name__ == "__main__":
    main()
