"""Raw forward passes of the built-in model against HF transformers: same float32 weights, same threads, interleaved.

No scheduler, sampler or cache manager takes part: this is the arithmetic alone. Run with the number of threads:
``python benchmarks/engine_forward.py --threads 1``.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvmesh.cache.layout import PageLayout
from kvmesh.kernels import ops
from kvmesh.models import llama
from kvmesh.models.base import CausalLM, ForwardBatch, GroupTables, KvPools
from kvmesh.models.config import ModelConfig, read_config
from kvmesh.models.registry import load_model
from kvmesh.models.store import DEFAULT_MODEL, ModelSource, resolve_model
from kvmesh.models.weights import GgufCheckpoint

TOKENS_PER_BLOCK = 32
CASES = ((1, 512, 512), (1, 1, 512), (8, 1, 512), (1, 1, 2048))  # sequences, new tokens each, context with them


def transformers_model(source: ModelSource, config: ModelConfig) -> LlamaForCausalLM:
    """The same weights in transformers."""
    settings = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.max_seq_len,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        tie_word_embeddings=config.tie_word_embeddings,
    )
    checkpoint = GgufCheckpoint(source.path, llama.gguf_names(config))
    model = LlamaForCausalLM(settings).eval()
    model.load_state_dict({name: checkpoint.tensor(name) for name in checkpoint.names()}, strict=False)
    return model


def ours(model: CausalLM, sequences: int, new: int, context: int) -> Callable[[], Any]:
    """One step of our model over pages in random order."""
    layout = PageLayout.build(model.cache_requirements(), TOKENS_PER_BLOCK)
    blocks = -(-context // TOKENS_PER_BLOCK)
    memory = torch.zeros(sequences * blocks * layout.pools[0].page_bytes, dtype=torch.uint8)
    kv = KvPools.build(layout, [memory.data_ptr()])
    table = torch.randperm(sequences * blocks).view(sequences, blocks).int()
    positions = torch.arange(context - new, context)
    slots = table[:, positions // TOKENS_PER_BLOCK].long() * TOKENS_PER_BLOCK + positions % TOKENS_PER_BLOCK
    batch = ForwardBatch(
        token_ids=torch.randint(0, model.config.vocab_size, (sequences * new,)).int(),
        positions=positions.repeat(sequences).int(),
        query_start=torch.arange(0, sequences * new + 1, new).int(),
        context_lens=torch.full((sequences,), context).int(),
        groups=[GroupTables(table, slots.flatten())],
        logits_rows=torch.arange(new - 1, sequences * new, new),
    )

    def step(_memory: torch.Tensor = memory) -> None:  # the pages live as long as the step
        model.forward(batch, kv)

    return step


def theirs(model: LlamaForCausalLM, sequences: int, new: int, context: int) -> Callable[[], Any]:
    """The same step in transformers, over its own contiguous cache."""
    cache, past = DynamicCache(), context - new
    ids = torch.randint(0, model.config.vocab_size, (sequences, new))
    if past:
        prompt = torch.randint(0, model.config.vocab_size, (sequences, past))
        with torch.inference_mode():
            model(prompt, past_key_values=cache, logits_to_keep=1)

    @torch.inference_mode()
    def step() -> None:
        if not past:
            model(ids, past_key_values=DynamicCache(), logits_to_keep=1)
            return
        model(ids, past_key_values=cache, logits_to_keep=1)
        cache.crop(-new)  # back to where it was

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*past_key_values.*", category=FutureWarning)
    torch.set_num_threads(arguments.threads)
    ops.set_num_threads(arguments.threads)
    source = resolve_model(DEFAULT_MODEL)
    started = time.perf_counter()
    model = load_model(source)
    print(f"load {time.perf_counter() - started:.2f} s, {arguments.threads} thread(s), {ops.cpu_level()}")
    reference = transformers_model(source, read_config(source))
    for case in CASES:
        steps = (ours(model, *case), theirs(reference, *case))
        times: tuple[list[float], list[float]] = ([], [])
        for step in steps:
            step()
        for _ in range(arguments.rounds):
            for step, record in zip(steps, times, strict=True):
                started = time.perf_counter()
                step()
                record.append(time.perf_counter() - started)
        sequences, new, context = case
        mine, other = (sequences * new / statistics.median(record) for record in times)
        name = f"{'prefill' if new > 1 else 'decode'} b{sequences} x {new} at {context}"
        print(f"{name:26} {mine:8.1f} tok/s, transformers {other:8.1f} tok/s, ratio {mine / other:.2f}")


if __name__ == "__main__":
    main()
