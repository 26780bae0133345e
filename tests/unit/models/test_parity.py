"""Every architecture against transformers: same logits, whatever the shape, the chunking and the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvmesh.models.base import ForwardBatch
from kvmesh.models.registry import load_model
from kvmesh.models.store import resolve_model

TOLERANCE = 1e-4
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

GEMMA3_ROPE = {
    "full_attention": {**LINEAR, "rope_theta": 100000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped": ("llama", {}),
    "one-kv-head": ("llama", {"num_key_value_heads": 1, "num_hidden_layers": 1}),
    "multi-head": ("llama", {"num_key_value_heads": 4, "num_hidden_layers": 3}),
    "nine-heads-over-three": ("llama", {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "head-dim-apart-from-hidden": ("llama", {"head_dim": 32}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "rope-linear": ("llama", {"rope_parameters": LINEAR}),
    "rope-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", {}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "gemma2": ("gemma2", {}),
    "gemma2-without-caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2-layer-types": ("gemma2", {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}),
    "gemma2-untied": ("gemma2", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma3": ("gemma3", {}),
    "gemma3-ropes": ("gemma3", {"rope_parameters": GEMMA3_ROPE, "num_attention_heads": 8, "num_key_value_heads": 1}),
    "gemma3-pattern": ("gemma3", {"sliding_window_pattern": 3}),
}


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def pair(request: pytest.FixtureRequest, tiny_model: Any, tmp_path: Path) -> tuple[Any, Any]:
    """The same weights in transformers and here."""
    family, overrides = request.param
    reference = tiny_model(family, **overrides)
    reference.save_pretrained(tmp_path)
    return reference, load_model(resolve_model(str(tmp_path)))


def reference_logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 160, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_whole_prompt(pair: Any, runner: Any) -> None:
    reference, model = pair
    ids = prompt(43, 1)
    logits = runner(model).step({"a": ids}, rows=range(len(ids)))
    torch.testing.assert_close(logits, reference_logits(reference, ids), atol=TOLERANCE, rtol=0)


def test_chunks_and_decodes_share_steps(pair: Any, runner: Any) -> None:
    """Three prompts of different lengths arrive one after the other, in chunks, while earlier ones decode."""
    reference, model = pair
    prompts = {name: prompt(length, length) for name, length in (("a", 29), ("b", 3), ("c", 40))}
    arrival, chunk = {"a": 0, "b": 1, "c": 2}, 11
    run, done = runner(model), dict.fromkeys(prompts, 0)
    expected = {name: reference_logits(reference, ids) for name, ids in prompts.items()}
    step = 0
    while any(done[name] < len(ids) for name, ids in prompts.items()):
        chunks = {}
        for name, ids in prompts.items():
            if step >= arrival[name] and done[name] < len(ids):
                # The last six tokens come one by one, as a decode's would.
                size = chunk if done[name] + chunk <= len(ids) - 6 else 1
                chunks[name] = ids[done[name] : done[name] + size]
                done[name] += size
        logits = run.step(chunks)
        for row, name in enumerate(chunks):
            torch.testing.assert_close(logits[row], expected[name][done[name] - 1], atol=TOLERANCE, rtol=0)
        step += 1


def test_greedy_continuation(pair: Any, runner: Any) -> None:
    """The same 24 tokens as ``generate``, from a prompt that is longer than the window."""
    reference, model = pair
    ids = prompt(21, 8)
    reference.generation_config.eos_token_id = None
    expected = reference.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, pad_token_id=0)
    assert runner(model).greedy(ids, 24, chunk=8)[0] == expected[0, len(ids) :].tolist()


def test_shards(tiny_model: Any, tmp_path: Path, runner: Any) -> None:
    reference = tiny_model("gemma3")
    reference.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ids = prompt(30, 9)
    logits = runner(load_model(resolve_model(str(tmp_path)))).step({"a": ids})
    torch.testing.assert_close(logits[0], reference_logits(reference, ids)[-1], atol=TOLERANCE, rtol=0)


def test_only_wanted_rows_are_computed(tiny_llama: Any, tmp_path: Path, runner: Any) -> None:
    reference = tiny_llama()
    reference.save_pretrained(tmp_path)
    model = load_model(resolve_model(str(tmp_path)))
    ids = prompt(20, 3)
    expected = reference_logits(reference, ids)
    run = runner(model)
    assert run.step({"a": ids[:8]}, rows=[]).shape == (0, 160)
    logits = run.step({"a": ids[8:]}, rows=[0, 11])
    torch.testing.assert_close(logits, expected[[8, 19]], atol=TOLERANCE, rtol=0)
    assert logits.dtype == torch.float32


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_embeddings_replace_the_lookup(
    family: str, tiny_model: Any, tmp_path: Path, runner: Any, monkeypatch: Any
) -> None:
    """What is given is what transformers' embedding layer puts out, Gemma's scale included."""
    reference = tiny_model(family)
    reference.save_pretrained(tmp_path)
    model = load_model(resolve_model(str(tmp_path)))
    ids = prompt(9, 4)
    embeddings = reference.get_input_embeddings()(torch.tensor(ids)).detach()
    forward = type(model).forward

    def with_embeddings(self: Any, batch: ForwardBatch, kv: Any) -> torch.Tensor:
        batch.embeddings = embeddings
        batch.token_ids = torch.zeros_like(batch.token_ids)
        return forward(self, batch, kv)

    monkeypatch.setattr(type(model), "forward", with_embeddings)
    logits = runner(model).step({"a": ids})
    torch.testing.assert_close(logits[0], reference_logits(reference, ids)[-1], atol=TOLERANCE, rtol=0)


def test_adapters_are_refused(tiny_llama: Any, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    model = load_model(resolve_model(str(tmp_path)))
    empty = torch.zeros(1, dtype=torch.int32)
    batch = ForwardBatch(empty, empty, empty, empty, [], empty.long(), adapter_ids=empty)
    with pytest.raises(ValueError, match="adapters"):
        model.forward(batch, None)  # type: ignore[arg-type]


def test_a_shorter_limit_makes_shorter_tables(tiny_llama: Any, tmp_path: Path, runner: Any) -> None:
    reference = tiny_llama()
    reference.save_pretrained(tmp_path)
    source = resolve_model(str(tmp_path))
    model = load_model(source, max_seq_len=16)
    assert model.max_seq_len == 16
    ids = prompt(16, 5)
    logits = runner(model).step({"a": ids})
    torch.testing.assert_close(logits[0], reference_logits(reference, ids)[-1], atol=TOLERANCE, rtol=0)
    with pytest.raises(ValueError, match="exceeds the 128 tokens"):
        load_model(source, max_seq_len=129)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])
def test_sixteen_bit_computation(family: str, tiny_model: Any, tmp_path: Path, runner: Any) -> None:
    """The code that serves GPUs, run on the CPU: the same model in bfloat16, to that format's precision."""
    reference = tiny_model(family)
    reference.save_pretrained(tmp_path)
    model = load_model(resolve_model(str(tmp_path)), dtype=torch.bfloat16)
    assert {layer.dtype for layer in model.cache_requirements().layers} == {"bfloat16"}
    ids = prompt(30, 6)
    run = runner(model)
    logits = torch.cat([run.step({"a": ids[:29]}, rows=range(29)), run.step({"a": ids[29:]})])
    assert logits.dtype == torch.float32
    expected = reference_logits(reference, ids)
    assert float((logits - expected).norm() / expected.norm()) < 0.03
