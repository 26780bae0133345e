"""Fixtures of the model tests: the golden file, tiny checkpoints, and a page table just big enough to run a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import build
from transformers import PreTrainedModel

from kvmesh.cache.layout import PageLayout
from kvmesh.models.base import CausalLM, ForwardBatch, GroupTables, KvPools
from kvmesh.models.store import DEFAULT_MODEL, ModelSource, resolve_model

GOLDEN = Path(__file__).parents[2] / "data" / "golden" / "smollm2.json"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model cache of the test's own."""
    root = tmp_path / "model-cache"
    monkeypatch.setenv("KVMESH_MODEL_DIR", str(root))
    return root


@pytest.fixture(scope="session")
def golden() -> list[dict[str, Any]]:
    return json.loads(GOLDEN.read_text())["items"]


@pytest.fixture(scope="session")
def default_source() -> ModelSource:
    """The built-in model, from the user's own cache; fetched when it is not there yet."""
    return resolve_model(DEFAULT_MODEL)


class PagedRunner:
    """Runs a model step by step over shuffled pages."""

    def __init__(self, model: CausalLM, tokens_per_block: int = 4, num_pages: int = 64) -> None:
        self.model = model
        self._layout = PageLayout.build(model.cache_requirements(), tokens_per_block)
        self._pools = [torch.zeros(num_pages * pool.page_bytes, dtype=torch.uint8) for pool in self._layout.pools]
        self._kv = KvPools.build(self._layout, [pool.data_ptr() for pool in self._pools])
        self._free = [list(np.random.default_rng(7).permutation(num_pages)) for _ in self._layout.pools]
        self._pages: dict[tuple[Any, int], list[int]] = {}
        self._lengths: dict[Any, int] = {}

    def step(self, chunks: dict[Any, Sequence[int]], rows: Sequence[int] | None = None) -> torch.Tensor:
        """Feed each sequence's next tokens; logits of ``rows``, by default of each sequence's last token."""
        tokens, positions, starts, lengths = [], [], [0], []
        for name, ids in chunks.items():
            past = self._lengths.get(name, 0)
            tokens += list(ids)
            positions += range(past, past + len(ids))
            starts.append(len(tokens))
            lengths.append(past + len(ids))
            self._lengths[name] = past + len(ids)
        groups = [self._tables(group.group_id, group.pool, chunks, lengths) for group in self._layout.groups]
        wanted = [start - 1 for start in starts[1:]] if rows is None else list(rows)
        batch = ForwardBatch(
            token_ids=torch.tensor(tokens, dtype=torch.int32),
            positions=torch.tensor(positions, dtype=torch.int32),
            query_start=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor(lengths, dtype=torch.int32),
            groups=groups,
            logits_rows=torch.tensor(wanted, dtype=torch.int64),
        )
        return self.model.forward(batch, self._kv).clone()

    def greedy(self, prompt: Sequence[int], count: int, chunk: int = 256) -> tuple[list[int], list[torch.Tensor]]:
        for start in range(0, len(prompt), chunk):
            logits = self.step({"greedy": prompt[start : start + chunk]})
        ids, history = [], []
        for _ in range(count):
            history.append(logits[0])
            ids.append(int(logits[0].argmax()))
            logits = self.step({"greedy": ids[-1:]})
        return ids, history

    def _tables(self, group: int, pool: int, chunks: dict[Any, Sequence[int]], lengths: list[int]) -> GroupTables:
        size = self._layout.tokens_per_block
        slots: list[int] = []
        width = max(-(-length // size) for length in lengths)
        table = torch.full((len(lengths), width), -1, dtype=torch.int32)
        for row, ((name, ids), length) in enumerate(zip(chunks.items(), lengths, strict=True)):
            pages = self._pages.setdefault((name, group), [])
            while len(pages) * size < length:
                pages.append(int(self._free[pool].pop()))
            table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
            slots += [pages[p // size] * size + p % size for p in range(length - len(ids), length)]
        return GroupTables(table, torch.tensor(slots, dtype=torch.int64))


@pytest.fixture(scope="session")
def runner() -> type[PagedRunner]:
    return PagedRunner


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """:func:`tiny_models.build`: a random model of transformers."""
    return build


@pytest.fixture(scope="session")
def tiny_llama() -> Callable[..., PreTrainedModel]:
    """:func:`tiny_model` of Llama."""
    return partial(build, "llama")
