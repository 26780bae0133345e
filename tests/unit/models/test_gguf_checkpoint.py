"""GGUF checkpoints: written with the gguf package in every block format, they compute what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import write_gguf

from kvmesh.kernels import ops
from kvmesh.models.config import read_config
from kvmesh.models.errors import ModelError
from kvmesh.models.registry import load_model
from kvmesh.models.store import resolve_model

Q = gguf.GGMLQuantizationType


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
