"""Safetensors directories: single, sharded, 16-bit, damaged; and the file in which processes share weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from kvmesh.models.checkpoint import fingerprint
from kvmesh.models.errors import ModelError
from kvmesh.models.registry import default_dtype, load_model
from kvmesh.models.store import resolve_model
from kvmesh.models.weights import SafetensorsCheckpoint

IDS = [5, 6, 7, 8, 9]


def logits(path: Path, runner: Any) -> torch.Tensor:
    return runner(load_model(resolve_model(str(path)))).step({"a": IDS})


def test_shards_equal_a_single_file(tiny_llama: Any, tmp_path: Path, runner: Any) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path / "single")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    assert len([*(tmp_path / "sharded").glob("*.safetensors")]) > 1
    assert torch.equal(logits(tmp_path / "single", runner), logits(tmp_path / "sharded", runner))


def test_sixteen_bit_weights_compute_in_float32(tiny_llama: Any, tmp_path: Path, cache_dir: Path, runner: Any) -> None:
    tiny_llama().to(torch.bfloat16).save_pretrained(tmp_path / "half")
    reference = LlamaForCausalLM.from_pretrained(tmp_path / "half", dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([IDS])).logits[0, -1]
    torch.testing.assert_close(logits(tmp_path / "half", runner)[0], expected, atol=1e-4, rtol=0)
    assert len([*cache_dir.glob("derived/half-*/model.safetensors")]) == 1


def edit(path: Path, change: Any) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_wrong_tensors_are_named(tiny_llama: Any, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    source = resolve_model(str(tmp_path))

    edit(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    load_model(source)

    edit(tmp_path, lambda tensors: tensors.update({"model.layers.0.extra": torch.ones(8)}))
    with pytest.raises(ModelError, match=r"does not: model\.layers\.0\.extra\.$"):
        load_model(source)

    edit(tmp_path, lambda tensors: tensors.pop("model.layers.0.extra"))
    edit(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(9)}))
    with pytest.raises(ModelError, match=r"norm\.weight has shape \(9,\), but the configuration implies \(64,\)"):
        load_model(source)

    edit(tmp_path, lambda tensors: [tensors.pop(name) for name in [*tensors] if "layers.1" in name])
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\..* and \d+ more\.$"):
        load_model(source)


def test_broken_directories(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no \*\.safetensors file"):
        SafetensorsCheckpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ModelError, match="Cannot read the weights"):
        SafetensorsCheckpoint(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(ModelError, match="no weight_map"):
        SafetensorsCheckpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "model-00001.safetensors", "b": "model-00002.safetensors"}}))
    with pytest.raises(ModelError, match="Cannot read the weights"):
        SafetensorsCheckpoint(tmp_path)
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001.safetensors")
    save_file({"c": torch.ones(2)}, tmp_path / "model-00002.safetensors")
    with pytest.raises(ModelError, match="lack b, which their index lists"):
        SafetensorsCheckpoint(tmp_path)


def test_fingerprint_follows_content_not_place(tiny_llama: Any, tmp_path: Path) -> None:
    for name in ("one", "two"):
        tiny_llama().save_pretrained(tmp_path / name)
    assert fingerprint(tmp_path / "one") == fingerprint(tmp_path / "two")
    edit(tmp_path / "two", lambda tensors: tensors["model.norm.weight"].add_(1))
    assert fingerprint(tmp_path / "one") != fingerprint(tmp_path / "two")
    with pytest.raises(ModelError, match="Cannot read the model files"):
        fingerprint(tmp_path / "three")


def test_default_dtypes(tiny_llama: Any, tmp_path: Path) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    config = load_model(resolve_model(str(tmp_path))).config
    assert default_dtype(config, torch.device("cpu")) == torch.float32
    assert default_dtype(config, torch.device("cuda")) == torch.bfloat16
