"""Configurations of both formats, and the sentences for what is not supported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvmesh.models.config import ModelConfig, read_config
from kvmesh.models.errors import ModelError
from kvmesh.models.store import ModelSource

LLAMA_32 = {  # Llama 3.2 1B as published, transformers 4 spelling
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


GEMMA_2 = {  # Gemma 2 27B as published, transformers 4 spelling
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 128,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 4608,
    "intermediate_size": 36864,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 32,
    "num_hidden_layers": 46,
    "num_key_value_heads": 16,
    "query_pre_attn_scalar": 144,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "float32",
    "vocab_size": 256000,
}
GEMMA_3 = {  # the text part of Gemma 3 4B as a causal model, transformers 4 spelling
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "max_position_embeddings": 131072,
    "model_type": "gemma3_text",
    "num_attention_heads": 8,
    "num_hidden_layers": 34,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "rope_theta": 1000000.0,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262208,
}


def read(directory: Path, values: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return read_config(ModelSource("m", directory, "huggingface"))


def test_a_published_config(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA_32)
    assert config.architecture == "llama"
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (16, 32, 8, 64)
    assert (config.q_size, config.kv_size) == (2048, 512)
    assert config.rope.kind == "llama3"
    assert (config.rope.theta, config.rope.factor, config.rope.original_max_seq_len) == (500000.0, 32.0, 8192)
    assert config.windows == (None,) * 16
    assert config.eos_token_ids == {128001, 128008, 128009}
    assert config.dtype == "bfloat16"


def test_gemma2_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA_2)
    assert config.windows == (4096, None) * 23
    assert config.attention_scale == 144**-0.5
    assert (config.attention_soft_cap, config.logits_soft_cap) == (50.0, 30.0)
    assert (config.activation, config.tie_word_embeddings, config.local_rope) == ("gelu_tanh", True, None)


def test_gemma3_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA_3)
    assert config.windows == ((1024,) * 5 + (None,)) * 5 + (1024,) * 4
    assert config.attention_scale == 256**-0.5
    assert (config.attention_soft_cap, config.logits_soft_cap) == (0.0, 0.0)
    assert (config.rope.theta, config.rope.kind, config.rope.factor) == (1e6, "linear", 8.0)
    assert config.local_rope is not None
    assert (config.local_rope.theta, config.local_rope.kind) == (1e4, "default")
    assert [config.rope_of_layer(layer) == config.rope for layer in (4, 5, 6)] == [False, True, False]


def test_gemma3_in_both_spellings(tmp_path: Path) -> None:
    old = read(tmp_path, GEMMA_3)
    gone = ("rope_scaling", "rope_theta", "rope_local_base_freq", "sliding_window_pattern")
    new = {key: value for key, value in GEMMA_3.items() if key not in gone}
    new["layer_types"] = (["sliding_attention"] * 5 + ["full_attention"]) * 5 + ["sliding_attention"] * 4
    new["rope_parameters"] = {
        "full_attention": {"factor": 8.0, "rope_type": "linear", "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    assert read(tmp_path, new) == old


def test_what_gemma_leaves_to_its_class(tmp_path: Path) -> None:
    """Left out is the class's default; null switches a cap off."""
    config = read(tmp_path, {key: value for key, value in GEMMA_2.items() if "softcapping" not in key})
    assert (config.attention_soft_cap, config.logits_soft_cap) == (50.0, 30.0)
    config = read(tmp_path, {**GEMMA_2, "attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (config.attention_soft_cap, config.logits_soft_cap) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("change", "window"), [({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 9}, 9)]
)
def test_windows_of_mistral(change: dict[str, Any], window: int | None, tmp_path: Path) -> None:
    """Left out is the class's 4096; null is full attention."""
    assert read(tmp_path, {**LLAMA_32, "architectures": ["MistralForCausalLM"], **change}).windows == (window,) * 16


def test_llama_has_no_windows(tmp_path: Path) -> None:
    assert read(tmp_path, {**LLAMA_32, "sliding_window": 9}).windows == (None,) * 16


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"sliding_window": None}, "lacks 'sliding_window'"),
        ({"sliding_window": 0}, "unusable 'sliding_window'"),
        ({"sliding_window_pattern": 0}, "unusable 'sliding_window_pattern'"),
        ({"layer_types": ["full_attention"]}, "each of its 34 layers"),
        ({"layer_types": ["chunked_attention"] * 34}, "each of its 34 layers"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_activation": "gelu"}, "activation 'gelu'"),
    ],
)
def test_refusals_of_gemma(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=sentence):
        read(tmp_path, {**GEMMA_3, **change})


def test_generation_config_wins_for_eos(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA_32, {"eos_token_id": 5}).eos_token_ids == {5}


def test_both_spellings_of_rope_agree(tmp_path: Path) -> None:
    old = read(tmp_path, LLAMA_32)
    new = {key: value for key, value in LLAMA_32.items() if key not in ("rope_scaling", "rope_theta")}
    new["rope_parameters"] = {**LLAMA_32["rope_scaling"], "rope_theta": 500000.0}
    assert read(tmp_path, new) == old


def test_the_built_in_model(default_source: ModelSource) -> None:
    config = read_config(default_source)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.hidden_size, config.ffn_size, config.vocab_size) == (576, 1536, 49152)
    assert (config.rope.theta, config.max_seq_len, config.tie_word_embeddings) == (100000.0, 8192, True)
    assert config.eos_token_ids == {2}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture 'MambaForCausalLM' is not supported yet"),
        ({"architectures": None}, "not supported yet"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "Rotary scaling 'yarn' is not supported yet"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"hidden_size": "wide"}, "unusable 'hidden_size'"),
        ({"num_key_value_heads": 5}, "5 KV heads do not divide"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'"),
    ],
)
def test_refusals(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=sentence):
        read(tmp_path, {**LLAMA_32, **change})


def test_broken_json(tmp_path: Path) -> None:
    for text in ("{", "[1]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=r"config\.json"):
            read_config(ModelSource("m", tmp_path, "huggingface"))


def test_router_side_modules_never_import_torch() -> None:
    modules = ("store", "config", "tokenizer", "architectures", "progress")
    code = "import sys; " + "; ".join(f"import kvmesh.models.{name}" for name in modules)
    code += "; sys.exit(any(name in sys.modules for name in ('torch', 'safetensors', 'transformers', 'gguf')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
