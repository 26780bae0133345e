"""The prefix index: what it claims, and that it agrees with a naive model after anything."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.hashing import local_hashes, salt_id, sequence_hashes
from kvmesh.indexer.index import BYTES_PER_RESIDENCY, PrefixIndex, Source
from kvmesh.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored

BLOCK = 2
A, B = Source("a"), Source("b")


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def stored(hashes: list[int], ids: list[int], parent: int | None = None, **fields: object) -> BlockStored:
    return BlockStored(block_hashes=hashes, parent_block_hash=parent, token_ids=ids, block_size=BLOCK, **fields)


def removed(*hashes: int, medium: str = "GPU") -> BlockRemoved:
    return BlockRemoved(block_hashes=list(hashes), medium=medium)


@pytest.fixture
def index() -> PrefixIndex:
    index = PrefixIndex()
    index.add_source(A, "m")
    index.add_source(B, "m")
    return index


def device(index: PrefixIndex, ids: np.ndarray, **scope: object) -> dict[str, int]:
    return {match.instance_id: match.device_tokens for match in index.match(ids, model="m", **scope)}


def test_workers_with_different_hashes_meet(index: PrefixIndex) -> None:
    index.apply(A, stored([1, 2], [1, 2, 3, 4]))
    index.apply(B, stored([900], [1, 2]))
    assert device(index, tokens(1, 2, 3, 4, 5)) == {"a": 4, "b": 2}
    assert device(index, tokens(1, 2, 9, 9)) == {"a": 2, "b": 2}
    assert device(index, tokens(9, 9)) == {}
    assert device(index, tokens(1)) == {}


def test_chains_continue_below_their_parent(index: PrefixIndex) -> None:
    index.apply(A, stored([1], [1, 2]))
    index.apply(A, stored([2], [3, 4], parent=1))
    assert device(index, tokens(1, 2, 3, 4)) == {"a": 4}


def test_an_unknown_parent_is_never_taken_for_the_root(index: PrefixIndex) -> None:
    index.apply(A, stored([2], [3, 4], parent=77))
    assert device(index, tokens(3, 4)) == {}
    assert index.statistics().orphan_blocks_total == 1


def test_store_and_remove_are_idempotent(index: PrefixIndex) -> None:
    for _ in range(2):
        index.apply(A, stored([1], [1, 2]))
    index.apply(A, removed(1))
    index.apply(A, removed(1))
    assert device(index, tokens(1, 2)) == {}
    assert index.statistics().residencies == 0
    assert index.statistics().unknown_removals_total == 1


def test_tiers(index: PrefixIndex) -> None:
    index.apply(A, stored([1, 2], [1, 2, 3, 4]))
    index.apply(A, stored([2], [3, 4], parent=1, medium="CPU"))
    index.apply(A, removed(2))
    (match,) = index.match(tokens(1, 2, 3, 4), model="m")
    assert (match.device_tokens, match.host_tokens, match.disk_tokens) == (2, 4, 4)
    index.apply(A, removed(2, medium="CPU"))
    (match,) = index.match(tokens(1, 2, 3, 4), model="m")
    assert (match.device_tokens, match.host_tokens) == (2, 2)


def test_scopes_do_not_mix(index: PrefixIndex) -> None:
    salt = salt_id("tenant-a")
    index.apply(A, stored([1, 2], [1, 2, 3, 4], extra_keys=[[str(salt)], None]))
    index.apply(A, stored([3], [5, 6], parent=2))
    index.apply(B, stored([4], [1, 2], lora_id=7))
    assert device(index, tokens(1, 2)) == {}
    assert device(index, tokens(1, 2, 3, 4, 5, 6), salt=salt) == {"a": 6}
    assert device(index, tokens(1, 2), lora=7) == {"b": 2}
    assert index.match(tokens(1, 2), model="other", lora=7) == []


def test_clear_and_departure(index: PrefixIndex) -> None:
    for source in (A, B):
        index.apply(source, stored([1], [1, 2]))
    index.apply(A, AllBlocksCleared())
    assert device(index, tokens(1, 2)) == {"b": 2}
    index.remove_instance("b")
    assert device(index, tokens(1, 2)) == {}
    index.apply(B, stored([1], [1, 2]))
    assert index.sources() == [A]
    assert index.statistics().scopes == 0


def test_a_bit_is_reused_only_after_its_blocks_are_gone(index: PrefixIndex) -> None:
    index.apply(A, stored([1], [1, 2]))
    index.remove_source(A)
    index.add_source(Source("c"), "m")
    assert device(index, tokens(1, 2)) == {}


@pytest.mark.parametrize(
    "event",
    [
        stored([1], [1, 2, 3]),
        stored([1, 1], [1, 2, 3, 4]),
        stored([1], [1, 2], parent=1),
        stored([1], [1, 2], medium="TAPE"),
    ],
)
def test_malformed_stores_are_left_out(index: PrefixIndex, event: BlockStored) -> None:
    index.apply(A, event)
    assert index.statistics().residencies == 0
    assert index.statistics().malformed_events_total == 1


def test_sliding_window_groups_are_not_prefixes(index: PrefixIndex) -> None:
    index.apply(A, stored([1], [1, 2]))
    index.apply(A, stored([1], [1, 2], group_idx=1, kv_cache_spec_kind="sliding_window"))
    index.apply(A, BlockRemoved(block_hashes=[1], group_idx=1))
    assert device(index, tokens(1, 2)) == {"a": 2}


def test_the_memory_bound_refuses_and_never_lies() -> None:
    index = PrefixIndex(max_bytes=2 * BYTES_PER_RESIDENCY)
    index.add_source(A, "m")
    index.apply(A, stored([1, 2, 3], [1, 2, 3, 4, 5, 6]))
    assert device(index, tokens(1, 2, 3, 4, 5, 6)) == {"a": 4}
    assert index.statistics().refused_blocks_total == 1
    index.apply(A, removed(3, 2, 1))
    assert index.statistics().residencies == 0


def test_block_sizes_live_side_by_side(index: PrefixIndex) -> None:
    index.apply(A, stored([1, 2], [1, 2, 3, 4]))
    event = BlockStored(block_hashes=[5], parent_block_hash=None, token_ids=[1, 2, 3, 4], block_size=4)
    index.apply(B, event)
    assert device(index, tokens(1, 2, 3, 4)) == {"a": 4, "b": 4}
    assert device(index, tokens(1, 2, 3)) == {"a": 2}


def test_match_by_rolling_hashes(index: PrefixIndex) -> None:
    index.apply(A, stored([1, 2], [1, 2, 3, 4]))
    prefixes = sequence_hashes(local_hashes(tokens(1, 2, 3, 4), BLOCK)).tolist()
    assert index.match_prefixes(prefixes, model="m") == {A: 2}


Step = tuple[str, int, tuple[int, ...]]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["store", "store", "store", "remove", "clear", "leave"]),
            st.integers(0, 2),
            st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple),
        ),
        max_size=40,
    )
)
def test_agrees_with_a_naive_model(steps: list[Step]) -> None:
    """Random stores, subtree removals, clears and departures: equal answers always, nothing left at the end."""
    index = PrefixIndex()
    naive: dict[str, set[tuple[int, ...]]] = {}
    for action, number, path in steps:
        source = Source(f"w{number}")
        held = naive.setdefault(source.instance_id, set())
        index.add_source(source, "m")
        if action == "store":
            for depth in range(1, len(path) + 1):
                parent = _hash(path[: depth - 1]) if depth > 1 else None
                index.apply(source, stored([_hash(path[:depth])], [path[depth - 1]] * BLOCK, parent=parent))
                held.add(path[:depth])
        elif action == "remove":
            gone = sorted((item for item in held if item[: len(path)] == path), key=len, reverse=True)
            index.apply(source, removed(*map(_hash, gone)))
            held.difference_update(gone)
        elif action == "clear":
            index.apply(source, AllBlocksCleared())
            held.clear()
        else:
            index.remove_source(source)
            held.clear()
    for prompt in {path for _, _, path in steps}:
        expected = {}
        for instance_id, held in naive.items():
            depth = 0
            while depth < len(prompt) and prompt[: depth + 1] in held:
                depth += 1
            if depth:
                expected[instance_id] = depth * BLOCK
        assert device(index, tokens(*np.repeat(prompt, BLOCK))) == expected
    for source in index.sources():
        index.remove_source(source)
    assert index.statistics().residencies == 0
    assert index.statistics().scopes == 0


def _hash(path: tuple[int, ...]) -> int:
    return int("1" + "".join(map(str, path)), 2)
