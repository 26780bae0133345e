"""Models shared between ranks: the logits are those of one rank, and each rank has its part only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf_files import write_gguf
from rank_threads import RankThreads

from kvmesh.models.config import read_config
from kvmesh.models.errors import ModelError
from kvmesh.models.registry import load_model
from kvmesh.models.sharding import Span, shard_of, spans_of_parts, vocabulary_of
from kvmesh.models.store import ModelSource, resolve_model

TOLERANCE = 1e-4

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 3}),
    "biases-tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("mistral", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", {}),
}
SIZES = [(2, 1), (4, 1), (1, 2), (2, 2)]

Ranks = Callable[..., RankThreads]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    """Makes models of several ranks, over pages of a runner."""
    made: list[RankThreads] = []

    def make(source: ModelSource, tp_size: int, pp_size: int, dtype: torch.dtype | None = None) -> RankThreads:
        made.append(RankThreads(source, tp_size, pp_size, tmp_path, dtype))
        return made[-1]

    yield make
    for one in made:
        one.close()


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(3, 160, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def attached(runner: Any, model: RankThreads) -> Any:
    run = runner(model)
    model.attach(run._layout, [pool.data_ptr() for pool in run._pools])
    return run


@pytest.mark.parametrize(("tp_size", "pp_size"), SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_one_rank(
    name: str, tp_size: int, pp_size: int, tiny_model: Any, tmp_path: Path, runner: Any, ranks: Ranks
) -> None:
    """A prompt in chunks beside another one, decodes, and a step that wants no logits at all."""
    family, overrides = MODELS[name]
    tiny_model(family, **overrides).save_pretrained(tmp_path / "model")
    source = resolve_model(str(tmp_path / "model"))
    alone, shared = runner(load_model(source)), attached(runner, ranks(source, tp_size, pp_size))
    ids = prompt(30, 1)
    for chunks in ({"a": ids[:11]}, {"a": ids[11:20], "b": prompt(5, 2)}, {"a": ids[20:21], "b": [7]}, {"a": ids[21:]}):
        expected = alone.step(chunks)
        torch.testing.assert_close(shared.step(chunks), expected, atol=TOLERANCE, rtol=0)
    assert shared.step({"c": [4, 5]}, rows=[]).shape == (0, 160)


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0])
@pytest.mark.parametrize(("ffn", "in_blocks"), [(128, True), (96, False)], ids=["at-blocks", "inside-blocks"])
def test_quantised_weights_are_cut_at_blocks_or_dequantised(
    kind: gguf.GGMLQuantizationType,
    ffn: int,
    in_blocks: bool,
    tiny_llama: Any,
    cache_dir: Path,
    tmp_path: Path,
    runner: Any,
    ranks: Ranks,
) -> None:
    model = tiny_llama(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, intermediate_size=ffn)
    write_gguf(tmp_path / "model.gguf", model, kind)
    source = resolve_model(str(tmp_path / "model.gguf"))
    both = ranks(source, 2, 1)
    alone, shared = runner(load_model(source)), attached(runner, both)
    for chunks in ({"a": prompt(20, 1)}, {"a": [5]}):
        torch.testing.assert_close(shared.step(chunks), alone.step(chunks), atol=TOLERANCE, rtol=0)
    rank: Any = both.models[1]
    layer = rank._layers[0]
    assert layer.qkv._quantized.rows == (2 + 2 * 1) * 32
    assert layer.output._quantized.columns == 64
    assert (layer.down._quantized is not None) is in_blocks


def test_without_a_shared_file_a_rank_dequantises_its_part(
    tiny_llama: Any, cache_dir: Path, tmp_path: Path, runner: Any, ranks: Ranks
) -> None:
    """In 16 bits every process has weights of its own; columns are cut inside blocks here."""
    write_gguf(tmp_path / "model.gguf", tiny_llama(intermediate_size=96), gguf.GGMLQuantizationType.Q8_0)
    source = resolve_model(str(tmp_path / "model.gguf"))
    half = torch.bfloat16
    alone, shared = runner(load_model(source, "cpu", half)), attached(runner, ranks(source, 2, 1, half))
    ids = prompt(12, 1)
    assert not (cache_dir / "derived").exists()
    torch.testing.assert_close(shared.step({"a": ids}), alone.step({"a": ids}), atol=0.2, rtol=0.05)


def test_a_rank_has_its_part_only(tiny_llama: Any, tmp_path: Path) -> None:
    tiny_llama(num_hidden_layers=4).save_pretrained(tmp_path)
    source = resolve_model(str(tmp_path))
    config = read_config(source)

    def numbers(rank: int, tp_size: int, pp_size: int) -> int:
        model: Any = load_model(source, shard=shard_of(config, tp_size, pp_size, rank))
        matrices = (layer[name] for layer in model._layers for name in (3, 4, 7, 8))
        return sum(linear._weight_t.numel() for linear in matrices)

    whole = numbers(0, 1, 1)
    for sizes in ((2, 1), (1, 4), (2, 2)):
        parts = [numbers(rank, *sizes) for rank in range(sizes[0] * sizes[1])]
        assert sum(parts) == whole
        assert len(set(parts)) == 1


def test_sizes_that_do_not_fit_are_named(tiny_llama: Any, tmp_path: Path) -> None:
    tiny_llama(intermediate_size=97).save_pretrained(tmp_path)
    config = read_config(resolve_model(str(tmp_path)))
    with pytest.raises(ModelError, match="tensor_parallel_size 3 does not fit") as caught:
        shard_of(config, 3, 1, 0)
    for part in ("its 4 query heads", "its 97 columns", "of 3 and its 2 KV heads"):
        assert part in str(caught.value)
    with pytest.raises(ModelError, match="pipeline_parallel_size 3 is more than the 2 layers"):
        shard_of(config, 1, 3, 0)


@pytest.mark.parametrize(("tp_size", "vocab_size"), [(1, 49152), (3, 49152), (4, 100), (4, 5), (7, 160)])
def test_every_rank_has_rows_of_the_vocabulary(tp_size: int, vocab_size: int) -> None:
    spans = [vocabulary_of(rank, tp_size, vocab_size) for rank in range(tp_size)]
    assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == vocab_size
    assert min(span.length for span in spans) > 0
    if vocab_size >= 16 * tp_size:
        assert all(span.start % 16 == 0 for span in spans)


def test_rows_of_joined_matrices() -> None:
    assert spans_of_parts((), [4, 2]) == [(0, Span(0, 4)), (1, Span(0, 2))]
    assert spans_of_parts((Span(2, 5), Span(8, 9)), [4, 2, 3]) == [
        (0, Span(2, 4)), (1, Span(0, 1)), (2, Span(2, 3)),
    ]  # fmt: skip
