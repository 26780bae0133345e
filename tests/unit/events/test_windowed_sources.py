"""Models whose every layer has a window: their workers tell the widest group, and the index believes them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.cache.device import CpuDevice
from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, PageLayout
from kvmesh.cache.manager import KvCacheManager
from kvmesh.cache.settings import CacheSettings
from kvmesh.cache.storage import Storage
from kvmesh.events.decoding import decode_batch
from kvmesh.events.encoding import encode_batch
from kvmesh.events.index import PrefixIndex, Source
from kvmesh.events.records import Removed, Stored, Tier
from kvmesh.events.sink import StreamSink
from kvmesh.events.target import target_group
from kvmesh.hashing import ReuseScope
from kvmesh.protocol.events import EventBatch

BLOCK = 4
SCOPE = ReuseScope()
WORKER = Source("w")


class Worker:
    """A real cache of windowed layers whose events reach an index over the wire format."""

    def __init__(self, window: int, pages: int) -> None:
        layer = LayerCacheSpec(layer_index=0, num_kv_heads=1, head_dim=8, dtype="float32", window=window)
        layout = PageLayout.build(CacheRequirements((layer,)), BLOCK)
        self.sink = StreamSink(BLOCK, target_group(layout.groups))
        storage = Storage(layout, [[pages]], ("gpu",), CpuDevice(1 << 22))
        chosen = CacheSettings(max_util_for_resume=1.0)
        self.manager = KvCacheManager(layout, storage, [[pages]], chosen, self.sink)
        self.index = PrefixIndex()
        self.index.add(WORKER, model="m", single_group=True)

    def serve(self, tokens: list[int]) -> None:
        prompt = np.array(tokens, np.int32)
        sequence = self.manager.create(SCOPE, prompt, "r")
        served = sequence.resume() and sequence.resize(len(prompt))
        if served:
            sequence.commit(prompt[sequence.committed :])
        sequence.close()
        self.tell()

    def tell(self) -> None:
        payload = encode_batch(EventBatch(0.0, self.sink.take(), 0))
        self.index.apply(WORKER, decode_batch(payload).records)

    def indexed(self, tokens: list[int]) -> int:
        found = self.index.match(np.array(tokens, np.int32), model="m")
        return found[0].device_tokens if found else 0

    def cached(self, tokens: list[int]) -> int:
        """Whole blocks; one more token, so that the last block may count."""
        found = self.manager.match(SCOPE, np.array([*tokens, 99], np.int32))
        return found.num_full_blocks * BLOCK

    def close(self) -> None:
        self.manager.close()
        self.tell()
        assert self.index.num_held(WORKER) == 0


@pytest.mark.parametrize("window", [4, 8, 1000])
def test_a_prompt_that_was_served_is_found(window: int) -> None:
    worker = Worker(window, 16)
    tokens = list(range(20))
    worker.serve(tokens)
    assert worker.indexed(tokens) == worker.cached(tokens) == 20
    worker.close()


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([2, 4, 6, 8, 12]),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20), st.integers(0, 2)), min_size=1, max_size=25),
)
def test_the_index_never_promises_what_the_cache_lacks(window: int, asked: list[tuple[int, int, int]]) -> None:
    """A whole leading run of the widest group implies that the window before its end is there."""
    worker = Worker(window, 7)
    prompts = [[family] * length + [100 + tail] * 4 for family, length, tail in asked]
    for tokens in prompts:
        worker.serve(tokens)
        for other in prompts:
            assert worker.indexed(other) <= worker.cached(other)
    worker.close()


def windowed(hashes: list[int], kind: str = "sliding_window") -> Stored:
    tokens = np.repeat(np.array(hashes, np.int32), BLOCK)
    return Stored(hashes=hashes, parent=None, token_ids=tokens, block_size=BLOCK, group=0, kind=kind)


def held(index: PrefixIndex, *blocks: int) -> int:
    found = index.match(np.repeat(np.array(blocks, np.int32), BLOCK), model="m")
    return found[0].device_tokens // BLOCK if found else 0


@pytest.mark.parametrize("kind", ["sliding_window", "sliding_window_mla"])
def test_only_a_source_of_one_group_may_have_a_window(kind: str) -> None:
    """§2.5: groups with windows are not admitted; those of a worker that says it tells no other are."""
    index = PrefixIndex()
    index.add(WORKER, model="m")
    index.apply(WORKER, [windowed([1, 2], kind)])
    assert (held(index, 1, 2), index.statistics().ignored_group_blocks_total) == (0, 2)
    index.add(WORKER, model="m", single_group=True)
    index.apply(WORKER, [windowed([1, 2], kind)])
    assert held(index, 1, 2) == 2
    index.apply(WORKER, [Removed(hashes=[2], tier=Tier.DEVICE, group=0)])
    assert held(index, 1, 2) == 1
    index.clear(WORKER)
    index.apply(WORKER, [windowed([1], kind)])
    assert held(index, 1) == 1, "it is the same worker still"


def test_a_block_that_the_window_has_passed_ends_the_run() -> None:
    index = PrefixIndex()
    index.add(WORKER, model="m", single_group=True)
    index.apply(WORKER, [windowed([1, 2, 3]), Removed(hashes=[1], tier=Tier.DEVICE, group=0)])
    assert held(index, 1, 2, 3) == 0


def test_recurrent_states_never_count() -> None:
    index = PrefixIndex()
    index.add(WORKER, model="m", single_group=True)
    index.apply(WORKER, [windowed([1], "mamba")])
    assert held(index, 1) == 0
