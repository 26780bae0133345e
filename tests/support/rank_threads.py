"""All ranks of a model in threads of one process; together they look like one model."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from kvmesh.cache.layout import CacheRequirements, PageLayout
from kvmesh.cache.sharding import shard_requirements
from kvmesh.engine.ranks.leader import INTERFACE_VARIABLE
from kvmesh.engine.ranks.links import StepLinks
from kvmesh.models.base import CausalLM, ForwardBatch, KvPools
from kvmesh.models.config import read_config
from kvmesh.models.registry import load_model
from kvmesh.models.sharding import shard_of
from kvmesh.models.store import ModelSource

__all__ = ["RankThreads"]

TIMEOUT_S = 20.0


class RankThreads:
    """A :class:`kvmesh.models.base.CausalLM` of ``tp_size * pp_size`` ranks.

    Args:
        source: the checkpoint.
        tp_size: tensor ranks.
        pp_size: stages.
        directory: where they meet.
        dtype: of the model; None: the default.
    """

    def __init__(
        self, source: ModelSource, tp_size: int, pp_size: int, directory: Path, dtype: torch.dtype | None = None
    ) -> None:
        self._sizes = (tp_size, pp_size)
        self.config = read_config(source)
        shards = [shard_of(self.config, tp_size, pp_size, rank) for rank in range(tp_size * pp_size)]
        self.links = [StepLinks(self.config, shard, TIMEOUT_S) for shard in shards]
        self.models: list[CausalLM] = [
            load_model(source, "cpu", dtype, shard=shard, links=link)
            for shard, link in zip(shards, self.links, strict=True)
        ]
        self.max_seq_len = self.models[0].max_seq_len
        self._threads = ThreadPoolExecutor(len(shards))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(INTERFACE_VARIABLE, "lo")
            point = directory / f"ranks-{tp_size}-{pp_size}"
            joins = [self._threads.submit(link.join, point, TIMEOUT_S, dtype or torch.float32) for link in self.links]
            for join in joins:
                join.result(TIMEOUT_S)
        self._views: list[KvPools] = []

    def cache_requirements(self) -> CacheRequirements:
        """Of all ranks."""
        return shard_requirements(self.models[0].cache_requirements(), *self._sizes)

    def attach(self, layout: PageLayout, addresses: list[int]) -> None:
        """The pages, before the first step."""
        self._views = [KvPools.build(layout, addresses, rank=rank) for rank in range(len(self.models))]

    def start(self, batch: ForwardBatch) -> list[Future[torch.Tensor]]:
        """Begin a step on all ranks; ``batch`` has the tables of all layer groups."""
        sizes = (batch.token_ids.shape[0], batch.logits_rows.shape[0])
        started = []
        for model, links, view in zip(self.models, self.links, self._views, strict=True):
            part = replace(batch, groups=[batch.groups[group] for group in view.groups])
            started.append(self._threads.submit(links.run, *sizes, partial(model.forward, part, view)))
        return started

    def forward(self, batch: ForwardBatch, kv: KvPools) -> torch.Tensor:
        """See :class:`kvmesh.models.base.CausalLM`."""
        assert kv.groups == self._views[0].groups
        results = [future.result(2 * TIMEOUT_S) for future in self.start(batch)]
        assert all(result.shape == (0, self.config.vocab_size) for result in results[1:])
        return results[0]

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()
