"""What the leader and the followers of an engine send each other, and what ranks make of a server's settings."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.cache.base import Scratch
from kvmesh.cache.events import StoredBlocks
from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, PageLayout
from kvmesh.cache.sharding import shard_requirements
from kvmesh.config import KvCacheConfig
from kvmesh.engine.ranks.codec import StepDecoder, encode_common, encode_tables
from kvmesh.engine.ranks.events import OneRankEvents, told_groups
from kvmesh.engine.ranks.limits import cache_config_of_ranks
from kvmesh.engine.ranks.wire import Kind, RankSocket
from kvmesh.engine.step import StepInputs
from kvmesh.engine.tables import StepPlaces
from kvmesh.hashing import ReuseScope

BLOCK, MAX_SEQ_LEN = 4, 64


@st.composite
def steps(draw: st.DrawFn) -> StepInputs:
    """Chunks of up to five sequences in three layer groups, some of which use scratch slots."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    starts = [draw(st.integers(0, MAX_SEQ_LEN - length)) for length in lengths]
    positions = np.concatenate([np.arange(s, s + n, dtype=np.int32) for s, n in zip(starts, lengths, strict=True)])
    query_start = np.cumsum([0, *lengths], dtype=np.int32)
    context_lens = np.array([s + n for s, n in zip(starts, lengths, strict=True)], dtype=np.int32)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    wanted = draw(st.lists(st.integers(0, len(positions) - 1), unique=True).map(sorted))
    blocks = MAX_SEQ_LEN // BLOCK
    return StepInputs(
        token_ids=random.integers(0, 99, len(positions), dtype=np.int32),
        positions=positions,
        query_start=query_start,
        context_lens=context_lens,
        logits_rows=np.array(wanted, dtype=np.int64),
        tables={group: random.integers(-1, 40, (len(lengths), blocks), dtype=np.int32) for group in range(3)},
        scratch={
            group: [(row, Scratch(row, row + 3, random.integers(0, 40, 2, dtype=np.int32)))]
            for group in draw(st.sets(st.integers(0, 2)))
            for row in [draw(st.integers(0, len(lengths) - 1))]
        },
        places=StepPlaces(rows, positions, query_start, context_lens, BLOCK),
    )


@given(st.lists(steps(), min_size=1, max_size=3), st.sampled_from([(0,), (2,), (0, 2), (0, 1, 2)]))
def test_a_step_arrives_as_it_was_sent(sent: list[StepInputs], groups: tuple[int, ...]) -> None:
    """One after the other, so that nothing of an earlier one may show through where blocks are looked at."""
    decoder = StepDecoder(groups, tokens_per_block=BLOCK, max_batch_size=5, max_seq_len=MAX_SEQ_LEN)
    for step in sent:
        got = decoder.decode(bytearray(encode_common(step) + encode_tables(step, groups)))
        for name in ("token_ids", "positions", "query_start", "context_lens", "logits_rows"):
            theirs, ours = getattr(got, name), getattr(step, name)
            assert theirs.dtype == ours.dtype
            np.testing.assert_array_equal(theirs, ours)
        assert sorted(got.tables) == list(groups)
        for group in groups:
            assert got.tables[group].shape == step.tables[group].shape
            width = step.places.width
            np.testing.assert_array_equal(got.tables[group][:, :width], step.tables[group][:, :width])
        assert sorted(got.scratch) == sorted(set(step.scratch) & set(groups))
        for group, uses in got.scratch.items():
            for (row, theirs), (our_row, ours) in zip(uses, step.scratch[group], strict=True):
                assert (row, theirs.begin, theirs.end) == (our_row, ours.begin, ours.end)
                np.testing.assert_array_equal(theirs.slots, ours.slots)
        np.testing.assert_array_equal(got.places.rows, step.places.rows)
        assert got.places.width == step.places.width


@pytest.fixture
def ends() -> Iterator[tuple[RankSocket, RankSocket]]:
    one, other = (RankSocket(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    yield one, other
    one.close()
    other.close()


def test_frames_carry_facts_descriptors_and_bytes(ends: tuple[RankSocket, RankSocket]) -> None:
    one, other = ends
    reader, writer = os.pipe()
    one.tell(Kind.POOLS, {"layout": "x" * 100_000}, [writer])
    one.send(Kind.STEP, b"ab", b"", b"cd")
    one.tell(Kind.LEAVE)
    frame = other.receive(5.0)
    assert frame.kind is Kind.POOLS
    assert frame.facts() == {"layout": "x" * 100_000}
    os.close(writer)
    os.write(frame.fds[0], b"!")
    os.close(frame.fds[0])
    assert os.read(reader, 2) == b"!"
    os.close(reader)
    frame = other.receive(5.0)
    assert (frame.kind, bytes(frame.body), frame.fds) == (Kind.STEP, b"abcd", [])
    assert other.receive(5.0).facts() == {}


def test_an_end_is_told_from_silence(ends: tuple[RankSocket, RankSocket]) -> None:
    one, other = ends
    with pytest.raises(TimeoutError):
        other.receive(0.01)
    one.close()
    with pytest.raises(EOFError):
        other.receive(5.0)


def layouts(tp_size: int, pp_size: int, windows: tuple[int | None, ...]) -> tuple[PageLayout, PageLayout]:
    layers = tuple(
        LayerCacheSpec(layer_index=index, num_kv_heads=2, head_dim=16, dtype="float32", window=window)
        for index, window in enumerate(windows)
    )
    whole = CacheRequirements(layers)
    return PageLayout.build(whole, BLOCK), PageLayout.build(shard_requirements(whole, tp_size, pp_size), BLOCK)


def test_sizes_are_those_of_each_rank() -> None:
    config = KvCacheConfig(
        max_gpu_total_bytes=1000, host_cache_size=200, disk_cache_size=30, disk_cache_path="/", max_tokens=77
    )
    assert cache_config_of_ranks(config, *layouts(1, 1, (None,))) is config
    four = cache_config_of_ranks(config, *layouts(2, 2, (None, None)))
    assert (four.max_gpu_total_bytes, four.host_cache_size, four.disk_cache_size) == (4000, 800, 120)
    assert four.max_tokens == 77
    for size in (None, 0):
        same = KvCacheConfig(host_cache_size=size)
        assert cache_config_of_ranks(same, *layouts(2, 1, (None,))).host_cache_size == size


def test_ranks_of_one_group_have_nothing_to_exchange() -> None:
    config = KvCacheConfig(enable_kv_pool_rebalance=True)
    assert not cache_config_of_ranks(config, *layouts(2, 1, (None, None))).enable_kv_pool_rebalance
    assert cache_config_of_ranks(config, *layouts(2, 1, (None, None, 8))).enable_kv_pool_rebalance


def test_a_ratio_of_groups_is_shared_by_their_ranks() -> None:
    """Stage 0 has two of the three full layers, stage 1 the third and the windowed one."""
    config = KvCacheConfig(pool_ratio=[0.75, 0.25])
    ratio = cache_config_of_ranks(config, *layouts(1, 2, (None, None, None, 8))).pool_ratio
    assert ratio == pytest.approx([0.5, 0.25, 0.25])
    assert cache_config_of_ranks(config, *layouts(2, 1, (None, 8))).pool_ratio == [0.375, 0.125, 0.375, 0.125]


class Recorder:
    """An event sink that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def __getattr__(self, name: str) -> object:
        return lambda *args: self.told.append((name, *args))


def test_what_is_reusable_is_told_once() -> None:
    whole, parts = layouts(2, 2, (None, None, 8, None))
    # Of ranks 0 and 1: full; of ranks 2 and 3: windowed, then full.
    assert [(group.rank, group.window) for group in parts.groups] == [
        (0, None), (1, None), (2, 8), (2, None), (3, 8), (3, None),
    ]  # fmt: skip
    assert told_groups(whole, parts) == {0: 0, 2: 1}
    recorder = Recorder()
    sink = OneRankEvents(recorder, told_groups(whole, parts))  # type: ignore[arg-type]
    blocks = StoredBlocks(
        ReuseScope(), None, [b"k"], np.zeros((1, BLOCK), dtype=np.int32), 0, np.zeros(1, dtype=np.uint8)
    )
    sink.on_created(["gpu"], [[10], [11], [12], [13], [14], [15]])
    for group in range(6):
        sink.on_stored(group, blocks)
        sink.on_removed(group, [b"k"], 0)
        sink.on_moved(group, [b"k"], 0, 1)
        sink.on_priority(group, [b"k"], 1, 2)
    assert recorder.told[0] == ("on_created", ["gpu"], [[10], [12]])
    assert [(name, group) for name, group, *_ in recorder.told[1:]] == [
        (name, group) for group in (0, 1) for name in ("on_stored", "on_removed", "on_moved", "on_priority")
    ]
