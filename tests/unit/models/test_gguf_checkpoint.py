"""GGUF checkpoints: written with the gguf package in every block format, they compute what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from kvmesh.kernels import ops
from kvmesh.models.config import read_config
from kvmesh.models.errors import ModelError
from kvmesh.models.registry import load_model
from kvmesh.models.store import resolve_model

Q = gguf.GGMLQuantizationType
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


def gguf_name(name: str, names: dict[str, str]) -> str:
    fixed = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in fixed or name == "lm_head.weight":
        return fixed.get(name, "output.weight")
    _, _, layer, rest = name.split(".", 3)
    block, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{names[block]}.{kind}"


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's convert_hf_to_gguf.py orders q and k."""
    shape = values.shape
    return values.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def write_gguf(path: Path, model: Any, kind: Q, *, divisors: np.ndarray | None = None, **changes: Any) -> None:
    """Write ``model``; its weights become what the quantised file means, so that logits can be compared."""
    config = model.config
    gemma = config.model_type.startswith("gemma")
    writer = gguf.GGUFWriter(path, config.model_type.removesuffix("_text"))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    writer.add_eos_token_id(3)
    if gemma:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
    for add in changes.get("settings", ()):
        add(writer)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors)
    drop, extra = changes.get("drop", ()), changes.get("extra", {})
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if gemma and "norm" in name:
            values = values + 1  # as the conversion does
        if values.ndim == 2:
            rows = gguf.quants.quantize(values, kind)
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(rows, kind).astype(np.float32)))
            stored = rows
        else:
            stored = values.astype(np.float32)
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name and not gemma:
                stored = permuted(stored, heads)
        if name not in drop:
            writer.add_tensor(
                gguf_name(name, GEMMA_NAMES if gemma else NAMES),
                np.ascontiguousarray(stored),
                raw_dtype=kind if values.ndim == 2 else None,
            )
    for name, values in extra.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check(path: Path, reference: Any, runner: Any) -> None:
    many = ops.quantized_linear_max_tokens() + 8
    ids = torch.randint(0, 160, (many + 7,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    run = runner(load_model(resolve_model(str(path))))
    # Many rows use the dense matrices, the single rows that follow the quantised blocks.
    torch.testing.assert_close(run.step({"a": ids[:many]}, rows=range(many)), expected[:many], atol=1e-4, rtol=0)
    for position in range(many, len(ids)):
        torch.testing.assert_close(run.step({"a": [ids[position]]})[0], expected[position], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q8_0], ids=lambda kind: kind.name)
def test_every_format(kind: Q, tiny_llama: Any, cache_dir: Path, tmp_path: Path, runner: Any) -> None:
    reference = tiny_llama(num_hidden_layers=1)
    write_gguf(tmp_path / "tiny.gguf", reference, kind)
    check(tmp_path / "tiny.gguf", reference, runner)


@pytest.mark.parametrize("tied", [False, True])
def test_biases_and_ties(tied: bool, tiny_llama: Any, cache_dir: Path, tmp_path: Path, runner: Any) -> None:
    reference = tiny_llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=tied)
    write_gguf(tmp_path / "tiny.gguf", reference, Q.Q8_0)
    assert read_config(resolve_model(str(tmp_path / "tiny.gguf"))).tie_word_embeddings is tied
    check(tmp_path / "tiny.gguf", reference, runner)


def test_rope_divisors(tiny_llama: Any, cache_dir: Path, tmp_path: Path, runner: Any) -> None:
    """GGUF stores Llama 3.1's scaling as one divisor per frequency."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    reference = tiny_llama(rope_parameters={**scaling, "rope_theta": 500.0, "original_max_position_embeddings": 32})
    plain_rope = tiny_llama(rope_parameters={"rope_type": "default", "rope_theta": 500.0}).model.rotary_emb
    divisors = (plain_rope.inv_freq / reference.model.rotary_emb.inv_freq).numpy()
    write_gguf(tmp_path / "tiny.gguf", reference, Q.Q8_0, divisors=divisors)
    assert read_config(resolve_model(str(tmp_path / "tiny.gguf"))).rope.kind == "divisors"
    check(tmp_path / "tiny.gguf", reference, runner)


def settings_of_gemma2(writer: gguf.GGUFWriter) -> None:
    writer.add_attn_logit_softcapping(2.0)
    writer.add_final_logit_softcapping(5.0)


def test_gemma2(tiny_model: Any, cache_dir: Path, tmp_path: Path, runner: Any) -> None:
    """Norms with 1 added, no permuted rows, windows on every other layer."""
    reference = tiny_model("gemma2", query_pre_attn_scalar=24, hidden_size=96)
    write_gguf(tmp_path / "tiny.gguf", reference, Q.Q8_0, settings=[settings_of_gemma2])
    assert read_config(resolve_model(str(tmp_path / "tiny.gguf"))).windows == (7, None, 7)
    check(tmp_path / "tiny.gguf", reference, runner)


GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


@pytest.mark.parametrize(
    ("pattern", "settings"),
    [
        (6, []),
        (3, [lambda writer: writer.add_sliding_window_pattern(3)]),
        (2, [lambda writer: writer.add_sliding_window_pattern([True, False, True, False, True, False, True])]),
    ],
)
def test_gemma3(
    pattern: int, settings: list[Any], tiny_model: Any, cache_dir: Path, tmp_path: Path, runner: Any
) -> None:
    """Normed heads, and a rotation of its own for the layers with a window."""
    reference = tiny_model(
        "gemma3", query_pre_attn_scalar=24, sliding_window_pattern=pattern, rope_parameters=GEMMA3_ROPE
    )
    write_gguf(tmp_path / "tiny.gguf", reference, Q.Q8_0, settings=settings)
    check(tmp_path / "tiny.gguf", reference, runner)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ([lambda writer: writer.add_sliding_window_pattern(0)], "unusable 'gemma3.attention.sliding_window_pattern'"),
        ([lambda writer: writer.add_sliding_window_pattern([True])], "unusable 'gemma3.attention.sliding_window_pat"),
        ([lambda writer: writer.add_value_length(48)], "keys of 24 and values of 48"),
    ],
)
def test_what_gemma_cannot_have(
    settings: list[Any], sentence: str, tiny_model: Any, cache_dir: Path, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_model("gemma3"), Q.Q8_0, settings=settings)
    with pytest.raises(ModelError, match=sentence):
        read_config(resolve_model(str(tmp_path / "tiny.gguf")))


def test_the_sizes_with_wide_queries(tiny_model: Any, cache_dir: Path, tmp_path: Path) -> None:
    """Gemma 2 27B (46 layers) and Gemma 3 27B (62) divide scores by the root of hidden / heads; no key says so."""
    for family, layers in (("gemma2", 46), ("gemma3", 62)):
        path = tmp_path / f"{family}.gguf"
        write_gguf(path, tiny_model(family, num_hidden_layers=layers), Q.Q8_0)
        assert read_config(resolve_model(str(path))).attention_scale == (64 / 4) ** -0.5


def test_missing_and_unexpected_tensors_are_named(tiny_llama: Any, cache_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_llama(), Q.Q8_0, drop=("model.layers.1.mlp.up_proj.weight",))
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(resolve_model(str(path)))
    write_gguf(
        path.with_stem("other"), tiny_llama(), Q.Q8_0, extra={"blk.0.attn_q_norm.weight": np.ones(4, np.float32)}
    )
    with pytest.raises(ModelError, match=r"tensors that its architecture does not: blk\.0\.attn_q_norm\.weight"):
        load_model(resolve_model(str(path.with_stem("other"))))


def test_dequantised_weights_are_made_once(tiny_llama: Any, cache_dir: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(), Q.Q8_0)
    load_model(resolve_model(str(tmp_path / "tiny.gguf")))
    (shared,) = cache_dir.glob("derived/tiny-*/model.safetensors")
    made = shared.stat()
    load_model(resolve_model(str(tmp_path / "tiny.gguf")))
    assert (shared.stat().st_ino, shared.stat().st_mtime_ns) == (made.st_ino, made.st_mtime_ns)
    other = tiny_llama(num_hidden_layers=1)
    (tmp_path / "tiny.gguf").unlink()
    write_gguf(tmp_path / "tiny.gguf", other, Q.Q8_0)  # the same name with other content gets a file of its own
    load_model(resolve_model(str(tmp_path / "tiny.gguf")))
    assert len([*cache_dir.glob("derived/tiny-*/model.safetensors")]) == 2


@pytest.mark.parametrize("trouble", ["full disk", "read-only cache"])
def test_weights_that_cannot_be_shared_are_private(
    trouble: str, tiny_llama: Any, cache_dir: Path, tmp_path: Path, runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if trouble == "full disk":
        monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 0}))
    else:
        cache_dir.write_text("not a directory")
    reference = tiny_llama()
    write_gguf(tmp_path / "tiny.gguf", reference, Q.Q4_1)
    check(tmp_path / "tiny.gguf", reference, runner)
    assert not [*cache_dir.glob("derived/*/*.safetensors")]
