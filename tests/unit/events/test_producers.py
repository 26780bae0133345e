"""Both cache managers under random requests tell a consistent story on both event paths (semantics §8.5, §8.23)."""

from __future__ import annotations

import tempfile
from typing import Any, NamedTuple

from event_checks import CheckedEvents
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.cache.base import CacheManager, SequenceCache
from kvmesh.cache.device import CpuDevice
from kvmesh.cache.factory import create_manager
from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, PageLayout
from kvmesh.config import KvCacheConfig
from kvmesh.hashing import ReuseScope, TokenIds, as_token_ids
from kvmesh.net.clock import ManualClock
from kvmesh.protocol.retention import RetentionConfig, TokenRangeRetention

BLOCK = 4
LONGEST = 18
BLOCKS = 7
"""Of the device: little more than the longest prompt needs."""


class Request(NamedTuple):
    scope: ReuseScope
    prompt: list[int]
    chunk: int
    """Tokens computed at a time."""
    priority: int | None
    conversation: str | None
    suspended: bool
    """Stays open, suspended, while the next ones come."""


requests = st.builds(
    Request,
    st.sampled_from([ReuseScope(), ReuseScope(salt=5), ReuseScope(lora_id=1)]),
    st.lists(st.integers(0, 1), min_size=1, max_size=LONGEST),
    st.sampled_from([4, 8, 100]),
    st.sampled_from([None, 10, 80]),
    st.sampled_from([None, "a"]),
    st.booleans(),
)

v1 = st.fixed_dictionaries({"use_kv_cache_manager_v2": st.just(False), "host_blocks": st.sampled_from([0, 4])})
v2 = st.fixed_dictionaries(
    {
        "use_kv_cache_manager_v2": st.just(True),
        "host_blocks": st.sampled_from([0, 4]),
        "disk_blocks": st.sampled_from([0, 4]),
        "enable_swa_scratch_reuse": st.booleans(),
        "block_reuse_config": st.sampled_from(
            [{"policy": "all_reusable"}, {"policy": "per_request"}, {"policy": "per_conversation", "max_num_turns": 2}]
        ),
    }
)


def layout_of(windows: tuple[int | None, ...]) -> PageLayout:
    layers = tuple(
        LayerCacheSpec(layer_index=i, num_kv_heads=1, head_dim=8, dtype="float32", window=window)
        for i, window in enumerate(windows)
    )
    return PageLayout.build(CacheRequirements(layers), BLOCK)


def manager_of(layout: PageLayout, options: dict[str, Any], events: CheckedEvents, disk: str) -> CacheManager:
    options = dict(options)
    block = layout.bytes_per_block
    config = KvCacheConfig.model_validate(
        {
            "tokens_per_block": BLOCK,
            "max_gpu_total_bytes": BLOCKS * block,
            "host_cache_size": options.pop("host_blocks") * block,
            "disk_cache_size": options.pop("disk_blocks", 0) * block,
            "disk_cache_path": disk,
            "max_util_for_resume": 1.0,
            "cold_tier_offload_min_priority": 20,
        }
        | options
    )
    return create_manager(
        config,
        layout,
        CpuDevice(1 << 22),
        event_sink=events,
        clock=ManualClock(),
        max_seq_len=LONGEST,
        max_batch_size=1,
        max_num_tokens=LONGEST,
    )


def compute(sequence: SequenceCache, tokens: TokenIds, chunk: int) -> bool:
    """Prefill a prompt as far as there are pages; whether to its end."""
    if not sequence.resume():
        return False
    while sequence.committed < len(tokens):
        begin, end = sequence.committed, min(len(tokens), sequence.committed + chunk)
        if not sequence.resize(end, begin):
            return False
        sequence.commit(tokens[begin:end])
    sequence.stop_committing()
    return True


@settings(max_examples=100, deadline=None)
@given(
    windows=st.sampled_from([(None,), (None, 8), (8, 16), (4,)]),
    options=st.one_of(v1, v2),
    algo=st.sampled_from(["v2_sha256", "v2_sha256_64", "v1_block_key"]),
    tier_moves=st.sampled_from(["publish", "device_only"]),
    asked=st.lists(requests, min_size=1, max_size=25),
)
def test_what_is_stored_is_removed_once(
    windows: tuple[int | None, ...], options: dict[str, Any], algo: Any, tier_moves: Any, asked: list[Request]
) -> None:
    layout, v2_keys = layout_of(windows), bool(options["use_kv_cache_manager_v2"])
    events = CheckedEvents(layout, algo=algo if v2_keys else "v1_block_key", tier_moves=tier_moves, manager_v2=v2_keys)
    with tempfile.TemporaryDirectory() as disk:
        manager = manager_of(layout, options, events, disk)
        suspended: list[SequenceCache] = []
        for number, request in enumerate(asked):
            tokens = as_token_ids(request.prompt)
            retention = None
            if request.priority is not None:
                whole = TokenRangeRetention(token_start=0, priority=request.priority)
                retention = RetentionConfig(token_range_retention_configs=(whole,))
            sequence = manager.create(
                request.scope, tokens, str(number), retention=retention, conversation_id=request.conversation
            )
            finished = compute(sequence, tokens, request.chunk)
            if finished and request.suspended and manager.can_suspend:
                sequence.suspend()
                suspended.append(sequence)
            else:
                sequence.close()
            events.step()
            while len(suspended) > 1 or (suspended and not finished):
                suspended.pop(0).close()
        for sequence in suspended:
            sequence.close()
        manager.close()
    events.finish()
