"""Which part of a model each rank of an engine has, and which part of each parameter that is. Never imports torch.

Tensor ranks share every layer: whole heads in attention, columns in the feed-forward part, rows of the vocabulary in
the output matrix. Pipeline stages share the layers. Rank ``stage * tp_size + tensor_rank`` (semantics §6.7).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvmesh.cache.layout import LayoutError
from kvmesh.cache.sharding import HeadRange, kv_heads_of, layers_of_stage
from kvmesh.models.errors import ModelError
from kvmesh.models.model_config import ModelConfig

__all__ = ["Cut", "ModelShard", "Span", "shard_of", "spans_of_parts", "vocabulary_of"]

VOCABULARY_GRANULE = 16
"""Rows of a panel of quantised weights: a rank's part of the vocabulary is whole panels, where there are enough."""


class Span(NamedTuple):
    """Indices ``start .. stop - 1``."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """How many."""
        return self.stop - self.start

    def shifted(self, by: int) -> Span:
        """The same span further on."""
        return Span(self.start + by, self.stop + by)


class Cut(NamedTuple):
    """The part of a parameter that a rank loads."""

    source: str
    """Name of the whole parameter."""
    rows: tuple[Span, ...] = ()
    """These rows, one span after the other; none stands for all."""
    columns: Span | None = None
    """Of those rows, these columns; None: all."""


@dataclass(frozen=True, slots=True)
class ModelShard:
    """The part of a model that one rank computes."""

    tp_size: int
    tensor_rank: int
    pp_size: int
    stage: int
    layers: range
    """Of the stage."""
    num_heads: int
    """Query heads of this tensor rank, ``tensor_rank * num_heads`` and those that follow."""
    kv_heads: HeadRange
    ffn: Span
    """Columns of the feed-forward part."""
    vocabulary: Span
    """Rows of the output matrix, which the last stage has."""

    @property
    def is_whole(self) -> bool:
        """Whether there is no other rank."""
        return self.tp_size == self.pp_size == 1

    @property
    def is_first(self) -> bool:
        """Whether the stage looks tokens up."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage computes logits."""
        return self.stage == self.pp_size - 1

    @property
    def rank(self) -> int:
        """Its number in the engine."""
        return self.stage * self.tp_size + self.tensor_rank


def shard_of(config: ModelConfig, tp_size: int = 1, pp_size: int = 1, rank: int = 0) -> ModelShard:
    """The part of ``rank``.

    Raises:
        ModelError: the model's heads, feed-forward width or layers cannot be shared so; the message has the numbers.
    """
    stage, tensor_rank = divmod(rank, tp_size)
    if problems := list(_problems(config, tp_size)):
        raise ModelError(f"tensor_parallel_size {tp_size} does not fit this model: {'; '.join(problems)}.")
    try:
        layers = layers_of_stage(stage, pp_size, config.num_layers)
        kv_heads = kv_heads_of(tensor_rank, tp_size, config.num_kv_heads)
    except LayoutError as error:
        raise ModelError(f"{error}.") from error
    ffn = config.ffn_size // tp_size
    return ModelShard(
        tp_size=tp_size,
        tensor_rank=tensor_rank,
        pp_size=pp_size,
        stage=stage,
        layers=layers,
        num_heads=config.num_heads // tp_size,
        kv_heads=kv_heads,
        ffn=Span(tensor_rank * ffn, (tensor_rank + 1) * ffn),
        vocabulary=vocabulary_of(tensor_rank, tp_size, config.vocab_size),
    )


def vocabulary_of(tensor_rank: int, tp_size: int, vocab_size: int) -> Span:
    """The rows of the output matrix that a tensor rank multiplies with: about equal numbers, no rank without any."""
    granule = VOCABULARY_GRANULE if vocab_size >= VOCABULARY_GRANULE * tp_size else 1
    start, stop = (vocab_size * rank // tp_size // granule * granule for rank in (tensor_rank, tensor_rank + 1))
    return Span(start, vocab_size if tensor_rank == tp_size - 1 else stop)


def spans_of_parts(rows: Sequence[Span], lengths: Sequence[int]) -> list[tuple[int, Span]]:
    """Where rows of concatenated matrices come from, in order: the matrix, and its own rows.

    Args:
        rows: of all together; none stands for all.
        lengths: rows of each.
    """
    found = []
    for span in rows or (Span(0, sum(lengths)),):
        first = 0
        for part, length in enumerate(lengths):
            start, stop = max(span.start, first), min(span.stop, first + length)
            if start < stop:
                found.append((part, Span(start - first, stop - first)))
            first += length
    return found


def _problems(config: ModelConfig, tp_size: int) -> Iterator[str]:
    for name, number in (("query heads", config.num_heads), ("columns of the feed-forward part", config.ffn_size)):
        if number % tp_size:
            yield f"its {number} {name} cannot be divided by {tp_size}"
    heads = config.num_kv_heads
    if heads % tp_size and tp_size % heads:
        yield f"of {tp_size} and its {heads} KV heads, neither is a multiple of the other"
    if config.vocab_size < tp_size:
        yield f"its vocabulary has {config.vocab_size} tokens only"
