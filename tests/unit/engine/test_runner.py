"""The runner over windowed caches: tables with holes, and scratch slots that all layers of a group share."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import build
from windowed_cache import FakePages, FakeSequenceCache

from kvmesh.cache.base import Scratch
from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, LayoutError, PageLayout
from kvmesh.engine.runner import BatchRunner
from kvmesh.engine.scheduler import Chunk
from kvmesh.engine.step import StepComputer
from kvmesh.engine.tables import NoPageError, StepPlaces, split_tables
from kvmesh.engine.tokens import TokenHistory
from kvmesh.models.base import CausalLM, KvPools
from kvmesh.models.registry import load_model
from kvmesh.models.store import resolve_model

BLOCK = 4
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["mistral", "gemma2", "gemma3"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, CausalLM]:
    """A model with windows of 7 tokens in transformers and here."""
    directory = tmp_path_factory.mktemp(request.param)
    reference = build(request.param, sliding_window=7)
    reference.save_pretrained(directory)
    return reference, load_model(resolve_model(str(directory)))


class Bench:
    """A runner over fake caches, fed chunk by chunk."""

    def __init__(self, model: CausalLM, *, windows: bool = True, scratch: bool = False, num_pages: int = 96) -> None:
        layout = PageLayout.build(model.cache_requirements(), BLOCK)
        self.pages = FakePages(layout, num_pages)
        windowed = [group.group_id for group in layout.groups if group.window is not None]
        self.runner = BatchRunner(
            StepComputer(
                model,
                KvPools.build(layout, self.pages.addresses),
                KvPools.build(layout, self.pages.addresses, windowed) if scratch else None,
                max_num_tokens=128,
                device=CPU,
            ),
            windows=[group.window for group in layout.groups],
            scratch_groups=windowed if scratch else (),
            tokens_per_block=BLOCK,
            max_batch_size=4,
            max_num_tokens=128,
            max_seq_len=model.max_seq_len,
        )
        self.options = {"windows": windows, "scratch": scratch}
        self.sequences: dict[str, Any] = {}

    def step(self, chunks: dict[str, tuple[list[int], int, int]]) -> torch.Tensor:
        """Compute tokens ``start .. stop - 1`` of each sequence; the logits of their last tokens."""
        made = []
        for name, (ids, start, stop) in chunks.items():
            if name not in self.sequences:
                history = TokenHistory(np.array(ids, dtype=np.int32))
                self.sequences[name] = SimpleNamespace(
                    history=history, cache=FakeSequenceCache(self.pages, **self.options)
                )
            self.sequences[name].cache.step(start, stop)
            made.append(Chunk(self.sequences[name], start, stop - start, True))
        return self.runner.run(made).clone()


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 160, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


A, B, C = prompt(60, 1), prompt(45, 2), prompt(9, 3)
STEPS: list[dict[str, tuple[list[int], int, int]]] = [
    {"a": (A, 0, 33)},  # many blocks that no window of the next step reaches
    {"a": (A, 33, 34), "b": (B, 0, 26)},
    {"c": (C, 0, 5), "b": (B, 26, 43), "a": (A, 34, 35)},
    {"a": (A, 35, 57), "b": (B, 43, 44), "c": (C, 5, 9)},
    {"a": (A, 57, 58), "b": (B, 44, 45)},
    {"a": (A, 58, 60)},
]


def run_all(bench: Bench) -> list[torch.Tensor]:
    return [bench.step(step) for step in STEPS]


def test_pages_outside_the_window_are_never_read(pair: tuple[Any, CausalLM]) -> None:
    """They hold NaN or do not exist (-1), and the logits are transformers'."""
    reference, model = pair
    with torch.inference_mode():
        expected = {name: reference(torch.tensor([ids])).logits[0] for name, ids in (("a", A), ("b", B), ("c", C))}
    bench = Bench(model)
    for step, logits in zip(STEPS, run_all(bench), strict=True):
        for row, (name, (_, _, stop)) in enumerate(step.items()):
            torch.testing.assert_close(logits[row], expected[name][stop - 1], atol=1e-4, rtol=0)
    kept = Bench(model, windows=False)
    for ours, theirs in zip(run_all(Bench(model)), run_all(kept), strict=True):
        assert torch.equal(ours, theirs)
    assert bench.pages.used < kept.pages.used


def test_scratch_slots_change_no_logits(pair: tuple[Any, CausalLM]) -> None:
    """§3.7: the same bits as with pages of their own, for several sequences at a time, and fewer pages at the peak."""
    _, model = pair
    plain, scratch = Bench(model), Bench(model, scratch=True)
    for ours, theirs in zip(run_all(scratch), run_all(plain), strict=True):
        assert torch.equal(ours, theirs)
    used = {name: sequence.cache.scratch_blocks for name, sequence in scratch.sequences.items()}
    assert used["a"] > 0
    assert used["b"] > 0
    assert used["c"] == 0
    assert scratch.pages.most_used < plain.pages.most_used


def test_a_token_without_a_page_is_an_error(pair: tuple[Any, CausalLM]) -> None:
    """A cache that counts on scratch slots must not meet a runner that does not."""
    _, model = pair
    bench = Bench(model)
    bench.options["scratch"] = True
    with pytest.raises(NoPageError, match="layer group 0: block 0 of sequence 0 of this step has no page"):
        bench.step({"a": (A, 0, 33)})


def places(chunks: list[tuple[int, int]]) -> StepPlaces:
    """Of sequences that compute the tokens ``start .. stop - 1``."""
    lengths = [stop - start for start, stop in chunks]
    return StepPlaces(
        np.repeat(np.arange(len(chunks)), lengths),
        np.concatenate([np.arange(start, stop, dtype=np.int32) for start, stop in chunks]),
        np.cumsum([0, *lengths], dtype=np.int32),
        np.array([stop for _, stop in chunks], dtype=np.int32),
        BLOCK,
    )


def test_tables_of_each_layer() -> None:
    """§3.7: slot * L + j for a page; slots[i // L] * L + i % L for a scratch block, whichever layer it is."""
    table = np.array([[5, -1, -1, -1, 7, 99], [2, 3, 99, 99, 99, 99]], dtype=np.int32)
    scratch = Scratch(1, 4, np.array([11, 6], dtype=np.int32))
    tables = split_tables(table, 2, [(0, scratch)], places([(15, 18), (6, 7)]), CPU)
    assert [layer.block_table[0, :5].tolist() for layer in tables] == [[10, 22, 23, 12, 14], [11, 22, 23, 12, 15]]
    assert [layer.block_table[1, :2].tolist() for layer in tables] == [[4, 6], [5, 7]]
    assert [layer.slot_mapping.tolist() for layer in tables] == [[51, 56, 57, 26], [51, 60, 61, 30]]
    past = split_tables(table, 2, [], places([(17, 18), (6, 7)]), CPU)
    assert [layer.block_table[0, :5].tolist() for layer in past] == [[10, -1, -1, -1, 14], [11, -1, -1, -1, 15]]


@pytest.mark.parametrize(
    ("row", "window", "chunk", "hole"),
    [
        ([4, 5, 6], None, (9, 12), None),
        ([4, 5, 6, -1], None, (9, 12), None),  # past the end
        ([-1, 5, 6], None, (9, 12), 0),
        ([-1, -1, 6], 1, (8, 12), None),
        ([-1, -1, 6], 2, (8, 12), 1),  # the first query sees the token before it
        ([-1, -1, 6], 2, (9, 12), None),
        ([-1, 5, -1], 2, (7, 12), 2),  # written to
        ([-1, 5, 6], 5, (7, 12), 0),
        ([-1, 5, 6], 4, (7, 12), None),
        ([-1, 5, 6], 100, (7, 12), 0),
    ],
)
def test_which_blocks_need_a_page(row: list[int], window: int | None, chunk: tuple[int, int], hole: int | None) -> None:
    table = np.array([[1, 2, 3, 9], [*row, 9][:4]], dtype=np.int32)
    step = places([(11, 12), chunk])
    if hole is None:
        step.require_pages(3, table, window)
    else:
        with pytest.raises(NoPageError, match=f"layer group 3: block {hole} of sequence 1 of this step"):
            step.require_pages(3, table, window)


def layers(*head_dims: int, window: int | None = 16) -> PageLayout:
    specs = (
        LayerCacheSpec(layer_index=index, num_kv_heads=1, head_dim=head_dim, dtype="float32", window=window)
        for index, head_dim in enumerate(head_dims)
    )
    return PageLayout.build(CacheRequirements(tuple(specs)), 4)


def test_a_split_group_addresses_the_same_bytes() -> None:
    """Also where rows of 20 bytes need padding to the cache line."""
    layout = layers(5, 5, 5)
    whole, split = KvPools.build(layout, [4096]), KvPools.build(layout, [4096], [0])
    assert (whole.split, split.split) == ((0,), (3,))
    assert (whole.table_of_layer, split.table_of_layer) == ((0, 0, 0), (0, 1, 2))
    for position, (ours, theirs) in enumerate(zip(split.layers, whole.layers, strict=True)):
        page = 9 * 3 + position
        for role in ("k_offset_bytes", "v_offset_bytes"):
            assert ours.base + page * ours.page_stride_bytes + getattr(
                ours, role
            ) == theirs.base + 9 * theirs.page_stride_bytes + getattr(theirs, role)


def test_layers_of_different_sizes_cannot_share_scratch_slots() -> None:
    for layout in (layers(16, 32), layers(32, 16, 32, 48)):
        with pytest.raises(LayoutError, match="enable_swa_scratch_reuse needs layers of equal size"):
            KvPools.build(layout, [0], [0])
