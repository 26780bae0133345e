"""The engine core against Hugging Face transformers: same weights, same threads, interleaved.

Both run the built-in model in float32 arithmetic over the dequantised GGUF values. The engine is the whole executor
(scheduler, paged cache, sampler, commits), without its process and HTTP; transformers is the bare model with its own
cache. Each round times transformers, then the engine; the ratio (engine / transformers, above 1 the engine is faster)
is the median of the rounds' own ratios, given with the lowest and the highest. The last line is JSON.

    python benchmarks/engine.py [--threads 2] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvmesh.config import KvCacheConfig, WorkerSettings
from kvmesh.engine.build import Engine
from kvmesh.models.store import DEFAULT_MODEL, resolve_model
from kvmesh.net.clock import SystemClock
from kvmesh.net.doorbell import Doorbell
from kvmesh.protocol.engine import FromEngine, Generate, RequestFailed, ToEngine, TokenBatch
from kvmesh.protocol.sampling import SamplingParams

CONTEXT = 512
"""Prompt length in tokens: of the prefill, and in front of each decode."""
DECODE_STEPS = 24


class EngineCore:
    """The engine's side: an executor without a process."""

    def __init__(self, threads: int) -> None:
        settings = WorkerSettings(
            device="cpu",
            num_threads=threads,
            max_num_tokens=CONTEXT,
            device_memory_bytes=2 << 30,
            log_level="warning",
            # Every prompt is computed: what is timed must not come from the prefix tree.
            kv_cache_config=KvCacheConfig(enable_block_reuse=False),
        )
        self._tokens: dict[str, int] = {}
        self.bell = Doorbell()
        self._engine = Engine.build(settings, self, epoch=1, clock=SystemClock())
        self._count = 0

    def prefill(self, prompt: np.ndarray) -> float:
        """Tokens per second of one prompt, up to its first sampled token."""
        name = self._submit(prompt, 1)
        started_s = time.perf_counter()
        while not self._tokens.get(name):
            self._engine.executor.step()
        return prompt.size / (time.perf_counter() - started_s)

    def decode(self, prompts: list[np.ndarray]) -> float:
        """Tokens per second of decoding all prompts together."""
        names = [self._submit(prompt, DECODE_STEPS + len(prompts) + 1) for prompt in prompts]
        while not all(self._tokens.get(name) for name in names):
            self._engine.executor.step()
        started_s = time.perf_counter()
        for _ in range(DECODE_STEPS):
            self._engine.executor.step()
        rate = len(prompts) * DECODE_STEPS / (time.perf_counter() - started_s)
        for name in names:
            self._engine.executor.abort(name)
        return rate

    def close(self) -> None:
        """Free the memory."""
        self._engine.close()

    def _submit(self, prompt: np.ndarray, max_tokens: int) -> str:
        self._count += 1
        name = f"r{self._count}"
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self._engine.executor.submit(
            Generate(request_id=name, prompt_token_ids=prompt.astype("<i4").tobytes(), sampling=params)
        )
        return name

    # The engine's channel: it is stepped by hand, so that nothing waits.

    def wait(self, timeout_s: float) -> bool:  # noqa: ARG002 - the signature is given
        """There is nothing to wait for."""
        return False

    def receive(self) -> list[ToEngine]:
        """Requests are submitted by hand too."""
        return []

    def send(self, message: FromEngine) -> None:
        """Count tokens."""
        if isinstance(message, TokenBatch):
            for output in message.outputs:
                self._tokens[output.request_id] = self._tokens.get(output.request_id, 0) + len(output.token_ids)
        elif isinstance(message, RequestFailed):
            raise RuntimeError(message.message)


class Transformers:
    """The peer: transformers' own Llama over the same GGUF, dequantised to float32."""

    def __init__(self) -> None:
        path = resolve_model(DEFAULT_MODEL).path
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=torch.float32
        ).eval()

    @torch.inference_mode()
    def prefill(self, prompt: np.ndarray) -> float:
        """Tokens per second of one prompt, up to its first sampled token."""
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        started_s = time.perf_counter()
        self._model(ids, past_key_values=DynamicCache(), logits_to_keep=1).logits.argmax(-1).item()
        return prompt.size / (time.perf_counter() - started_s)

    @torch.inference_mode()
    def decode(self, prompts: list[np.ndarray]) -> float:
        """Tokens per second of decoding all prompts together."""
        ids = torch.from_numpy(np.stack(prompts).astype(np.int64))
        cache = DynamicCache()
        token = self._model(ids, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
        started_s = time.perf_counter()
        for _ in range(DECODE_STEPS):
            token = self._model(token, past_key_values=cache).logits.argmax(-1)
            token.tolist()
        return len(prompts) * DECODE_STEPS / (time.perf_counter() - started_s)


def measure(peer: Transformers, core: EngineCore, rounds: int) -> dict[str, dict[str, float]]:
    """Interleaved rounds, after one of warm-up."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(100, 40_000, CONTEXT, dtype=np.int32) for _ in range(8)]
    cases: dict[str, Callable[[Any], float]] = {
        "prefill_512": lambda side: side.prefill(prompts[0]),
        "decode_b1": lambda side: side.decode(prompts[:1]),
        "decode_b8": lambda side: side.decode(prompts),
    }
    results = {}
    for name, run in cases.items():
        rates: dict[str, list[float]] = {"transformers": [], "engine": []}
        for round_number in range(rounds + 1):
            for side, subject in (("transformers", peer), ("engine", core)):
                rate = run(subject)
                if round_number:
                    rates[side].append(rate)
        medians = {side: statistics.median(values) for side, values in rates.items()}
        # Pairs that ran next to each other share the machine's mood of the moment; medians of each side need not.
        ratios = [mine / theirs for mine, theirs in zip(rates["engine"], rates["transformers"], strict=True)]
        results[name] = {
            "transformers_tokens_per_s": round(medians["transformers"], 2),
            "engine_tokens_per_s": round(medians["engine"], 2),
            "ratio": round(statistics.median(ratios), 3),
            "lowest_ratio": round(min(ratios), 3),
            "highest_ratio": round(max(ratios), 3),
        }
        print(
            f"{name:12} transformers {medians['transformers']:8.1f} tok/s   engine {medians['engine']:8.1f} tok/s   "
            f"ratio {statistics.median(ratios):5.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="threads of both sides (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each case (default: 5)")
    options = parser.parse_args()
    core = EngineCore(options.threads)
    torch.set_num_threads(options.threads)
    results = measure(Transformers(), core, options.rounds)
    core.close()
    print(json.dumps({"benchmark": "engine", "threads": options.threads, "rounds": options.rounds, **results}))


if __name__ == "__main__":
    main()
