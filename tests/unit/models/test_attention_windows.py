"""Attention windows: the override, tiled and clamped, and what attention then sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvmesh.cache.layout import PageLayout
from kvmesh.config.kv_cache_rules import RECURRENT_STATES_WINDOW
from kvmesh.models.attention_windows import effective_windows, mask_windows
from kvmesh.models.errors import ModelError
from kvmesh.models.registry import load_model
from kvmesh.models.store import resolve_model


@pytest.mark.parametrize(
    ("model", "override", "expected"),
    [
        ([None] * 5, [4096, 256], (4096, 256, 4096, 256, 4096)),  # CHECK of section 2
        ([None] * 3, None, (None, None, None)),
        ([512, 512, None], None, (512, 512, None)),  # derived from the layers' own
        ([9000, 8192, 8191], None, (None, None, 8191)),
        ([None] * 2, [8192], (None, None)),  # the sequence length, or more, is full attention
        ([None] * 2, [10**6, 8191], (None, 8191)),
        ([512, None], [8192], (None, None)),  # the override counts, not the model
        ([512, None], [64, 128, 256], (64, 128)),
    ],
)
def test_effective_windows(
    model: list[int | None], override: list[int] | None, expected: tuple[int | None, ...]
) -> None:
    """§2 max_attention_window."""
    assert effective_windows(model, override, 8192) == expected


def test_a_recurrent_marker_is_refused_for_attention() -> None:
    with pytest.raises(ModelError, match="layer 1, which is an attention layer"):
        effective_windows([None, None], [64, RECURRENT_STATES_WINDOW], 8192)


def test_masks_are_never_wider_than_the_model() -> None:
    assert mask_windows([512, 512, None, None], [64, None, 64, None]) == (64, 512, 64, None)


def tokens(length: int) -> list[int]:
    return torch.randint(0, 160, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def reference_logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize(
    ("family", "override"), [("mistral", [5]), ("gemma2", [5, 128]), ("gemma3", [5, 5, 5, 5, 5, 128])]
)
def test_a_smaller_window_is_really_used(
    family: str, override: list[int], tiny_model: Any, tmp_path: Path, runner: Any
) -> None:
    """§2: the same logits as transformers with that ``sliding_window``, whole and token by token."""
    tiny_model(family, sliding_window=20).save_pretrained(tmp_path)
    reference = tiny_model(family, sliding_window=5)
    model = load_model(resolve_model(str(tmp_path)), max_attention_window=override)
    assert {layer.window for layer in model.cache_requirements().layers} <= {5, None}
    ids = tokens(40)
    expected = reference_logits(reference, ids)
    run = runner(model)
    logits = torch.cat([run.step({"a": ids[:31]}, rows=range(31)), *(run.step({"a": [token]}) for token in ids[31:])])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_a_larger_window_keeps_more_and_computes_the_same(tiny_model: Any, tmp_path: Path, runner: Any) -> None:
    """One group of pages that all stay, and still the model's own attention."""
    reference = tiny_model("gemma3")
    reference.save_pretrained(tmp_path)
    source = resolve_model(str(tmp_path))
    model = load_model(source, max_attention_window=[128])
    assert len(PageLayout.build(load_model(source).cache_requirements(), 8).groups) == 2
    assert len(PageLayout.build(model.cache_requirements(), 8).groups) == 1
    ids = tokens(33)
    logits = runner(model).step({"a": ids}, rows=range(len(ids)))
    torch.testing.assert_close(logits, reference_logits(reference, ids), atol=1e-4, rtol=0)


def test_one_group_for_each_window(tiny_model: Any, tmp_path: Path) -> None:
    """§2: layer groups in order of first occurrence."""
    tiny_model("llama", num_hidden_layers=5).save_pretrained(tmp_path)
    model = load_model(resolve_model(str(tmp_path)), max_attention_window=[16, 8])
    groups = PageLayout.build(model.cache_requirements(), 8).groups
    assert [(group.window, group.layers) for group in groups] == [(16, (0, 2, 4)), (8, (1, 3))]


def test_windows_of_the_sequence_length_are_full_attention(tiny_model: Any, tmp_path: Path) -> None:
    tiny_model("mistral").save_pretrained(tmp_path)
    model = load_model(resolve_model(str(tmp_path)), max_seq_len=7)
    assert {layer.window for layer in model.cache_requirements().layers} == {None}
