"""The V1 manager under random requests tells a consistent story on both event paths (semantics §8.5, §8.23)."""

from __future__ import annotations

from event_checks import CheckedEvents
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.cache.device import CpuDevice
from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, PageLayout
from kvmesh.cache.storage import Storage
from kvmesh.cache.v1 import V1CacheManager, V1Settings
from kvmesh.hashing import ReuseScope, as_token_ids
from kvmesh.net.clock import ManualClock
from kvmesh.protocol.retention import RetentionConfig, TokenRangeRetention

BLOCK = 4

requests = st.tuples(
    st.sampled_from([ReuseScope(), ReuseScope(salt=5)]),
    st.lists(st.integers(0, 1), min_size=1, max_size=14),
    st.sampled_from([None, 10, 80]),
)


def layout_of(windows: tuple[int | None, ...]) -> PageLayout:
    layers = tuple(
        LayerCacheSpec(layer_index=i, num_kv_heads=1, head_dim=8, dtype="float32", window=window)
        for i, window in enumerate(windows)
    )
    return PageLayout.build(CacheRequirements(layers), BLOCK)


@settings(max_examples=60, deadline=None)
@given(
    windows=st.sampled_from([(None,), (None, 8), (8, 16)]),
    host=st.sampled_from([0, 4]),
    asked=st.lists(requests, min_size=1, max_size=25),
)
def test_stored_is_removed_once(
    windows: tuple[int | None, ...], host: int, asked: list[tuple[ReuseScope, list[int], int | None]]
) -> None:
    layout, device = layout_of(windows), CpuDevice(1 << 22)
    counts = [[pages * len(pool.groups) for pool in layout.pools] for pages in (6, host) if pages]
    tiers = ("gpu", "host")[: len(counts)]
    events = CheckedEvents(layout, algo="v1_block_key", manager_v2=False)
    manager = V1CacheManager(
        layout,
        Storage(layout, counts, tiers, device),
        counts,
        tiers,
        V1Settings(),
        event_sink=events,
        clock=ManualClock(),
    )
    for scope, prompt, priority in asked:
        retention = (
            None
            if priority is None
            else RetentionConfig(token_range_retention_configs=(TokenRangeRetention(token_start=0, priority=priority),))
        )
        tokens = as_token_ids(prompt)
        sequence = manager.create(scope, tokens, "r", retention=retention)
        if sequence.resume() and sequence.resize(len(tokens), sequence.num_cached_tokens):
            sequence.commit(tokens[sequence.num_cached_tokens :])
        sequence.close()
        events.step()
    manager.close()
    events.finish()
