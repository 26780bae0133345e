"""§1.3, ``per_conversation``: what is dropped with a turn, how much work that is, and what the plans take."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.cache.conversation import MAX_KEYS_PER_PAGE, MAX_PLANS_LEFT
from kvmesh.cache.device import CpuDevice
from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, PageLayout
from kvmesh.cache.manager import KvCacheManager
from kvmesh.cache.pages import NO_PAGE
from kvmesh.cache.sequence import KvCache
from kvmesh.cache.settings import CacheSettings
from kvmesh.cache.storage import Storage
from kvmesh.cache.windows import first_live_block
from kvmesh.hashing import ReuseScope

SCOPE = ReuseScope()


def ids(length: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + length, dtype=np.int32)


def compute(manager: KvCacheManager, tokens: np.ndarray, conversation: str | None = "c") -> KvCache:
    cache = manager.create(SCOPE, tokens, "r", conversation_id=conversation)
    assert cache.resume()
    assert cache.resize(len(tokens))
    cache.commit(tokens[cache.committed :])
    return cache


def small_manager(windows: tuple[int | None, ...], max_num_turns: int) -> KvCacheManager:
    layers = tuple(
        LayerCacheSpec(layer_index=index, num_kv_heads=1, head_dim=8, dtype="float32", window=window)
        for index, window in enumerate(windows)
    )
    layout = PageLayout.build(CacheRequirements(layers), 4)
    pages = [[200 * len(pool.groups) for pool in layout.pools]]
    chosen = CacheSettings(max_util_for_resume=1.0, policy="per_conversation", max_num_turns=max_num_turns)
    return KvCacheManager(layout, Storage(layout, pages, ("gpu",), CpuDevice(1 << 24)), pages, chosen)


def probe(manager: KvCacheManager, tokens: np.ndarray) -> int:
    return manager.match(SCOPE, tokens).num_tokens


@pytest.mark.parametrize("windows", [(None,), (None, 64), (64, 32)])
def test_a_turn_is_dropped_at_once(make_manager, monkeypatch: pytest.MonkeyPatch, windows: tuple) -> None:
    """One call for each pool and one walk, not one for each block: the engine waits for it."""
    manager = make_manager(600, policy="per_conversation", windows=windows)
    compute(manager, ids(1000)).close()
    calls: list[int] = []
    drop = manager.store.drop_pages

    def noted(pool: int, pages: np.ndarray) -> None:
        calls.append(pool)
        drop(pool, pages)

    monkeypatch.setattr(manager.store, "drop_pages", noted)
    compute(manager, ids(1000, 5000)).close()
    assert sorted(calls) == list(range(len(manager.store.tables)))
    assert [probe(manager, ids(1000)), probe(manager, ids(1000, 5000))] == [0, 999]


def test_what_a_transfer_pins_goes_with_a_later_turn(make_manager) -> None:
    """A slow transfer's lease outlives the turn that would drop its blocks; the plan is applied again."""
    manager = make_manager(32, policy="per_conversation")
    cache = compute(manager, ids(12))
    lease = cache.hold(8)
    cache.close()
    compute(manager, ids(8, 100)).close()
    assert probe(manager, ids(12)) == 8, "the third block was nobody's"
    compute(manager, ids(8, 200)).close()
    assert [probe(manager, ids(12)), probe(manager, ids(8, 100))] == [8, 0]
    lease.release()
    compute(manager, ids(8, 300)).close()
    assert [probe(manager, ids(12)), probe(manager, ids(8, 200)), probe(manager, ids(8, 300))] == [0, 0, 7]


def test_a_pinned_turn_that_is_gone_on_with_is_needed_again(make_manager) -> None:
    manager = make_manager(32, policy="per_conversation")
    cache = compute(manager, ids(8))
    lease = cache.hold(8)
    cache.close()
    compute(manager, ids(8, 100)).close()
    compute(manager, ids(12)).close()
    lease.release()
    compute(manager, ids(16)).close()
    assert probe(manager, ids(16)) == 15


def test_plans_that_wait_are_bounded(make_manager) -> None:
    manager = make_manager(64, policy="per_conversation")
    leases = []
    for number in range(MAX_PLANS_LEFT + 2):
        cache = compute(manager, ids(8, 100 * number))
        leases.append(cache.hold(8))
        cache.close()
    for lease in leases:
        lease.release()
    compute(manager, ids(8, 9000)).close()
    found = [probe(manager, ids(8, 100 * number)) for number in range(MAX_PLANS_LEFT + 2)]
    assert found == [7, *[0] * (MAX_PLANS_LEFT + 1)], "the oldest plan was forgotten, and its blocks age"


def test_keys_are_bounded_by_the_pages_of_the_cache(make_manager) -> None:
    """Conversations that share their prompts take few pages and as many keys as any; the quietest is forgotten."""
    manager = make_manager(32, policy="per_conversation")
    number = MAX_KEYS_PER_PAGE * 32 // 8 + 1
    prompts = [np.concatenate((ids(28), ids(4, 1000 * (one + 1)))) for one in range(number)]
    for one, prompt in enumerate(prompts):
        compute(manager, prompt, f"c{one}").close()
        assert manager._conversations.num_keys <= MAX_KEYS_PER_PAGE * 32
    assert manager._conversations.num_keys == MAX_KEYS_PER_PAGE * 32
    for one in (0, number - 1):
        compute(manager, ids(4, 9000), f"c{one}").close()
    found = [probe(manager, prompt) for prompt in (prompts[0], prompts[-1])]
    assert found == [31, 28], "the first conversation's plan is gone, and its block stays"


def test_turns_that_go_on_share_their_keys(make_manager) -> None:
    """Else one long conversation would reach the bound alone, and nothing of it would ever be dropped."""
    manager = make_manager(24, policy="per_conversation", max_num_turns=8)
    for blocks in range(2, 11):
        compute(manager, ids(4 * blocks)).close()
    assert manager._conversations.num_keys == 10 < MAX_KEYS_PER_PAGE * 24 < sum(range(3, 11))
    compute(manager, ids(8, 500)).close()
    assert manager._conversations.num_keys == 12
    for number in range(6):
        compute(manager, ids(4, 1000 + 100 * number)).close()
    assert probe(manager, ids(40)) == 39
    compute(manager, ids(4, 2000)).close()
    assert [probe(manager, ids(40)), probe(manager, ids(8, 500))] == [0, 7]


def test_a_forgotten_conversation_gives_its_keys_back(make_manager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.cache.conversation.MAX_CONVERSATIONS", 2)
    manager = make_manager(32, policy="per_conversation")
    for number in range(5):
        compute(manager, ids(8, 100 * number), f"c{number}").close()
    assert manager._conversations.num_keys == 2 * 2


def expected(manager: KvCacheManager, turns: list[tuple[list[bytes], int]]) -> list[set[bytes]]:
    """By group, the keys that still offer a page when the first of ``turns`` is dropped block by block, last first.

    Nobody uses a page.
    """
    tree, layouts = manager.store.tree, manager.layout.groups
    every = tree.nodes().tolist()
    offered = [
        {tree.index.key(node) for node in every if tree.pages(group)[node] != NO_PAGE} for group in range(len(layouts))
    ]
    children = {tree.index.key(node): {tree.index.key(child) for child in tree.children(node)} for node in every}
    (oldest, _), *newer = turns
    for layout, keys in zip(layouts, offered, strict=True):
        needed: set[bytes] = set()
        for turn, length in newer:
            first = (
                0 if layout.window is None else first_live_block(length, manager.layout.tokens_per_block, layout.window)
            )
            needed |= set(turn[first:])
        for key in reversed(oldest):
            alive = set().union(*offered)
            if key in needed or key not in keys or (layout.window is None and children[key] & alive):
                continue
            for other in offered if layout.window is None else [keys]:
                other.discard(key)
    return offered


PROMPTS = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30), st.booleans()), min_size=2, max_size=6)


@settings(max_examples=60, deadline=None)
@given(PROMPTS, st.sampled_from([(None,), (None, 8), (8, 5)]), st.integers(1, 3))
def test_what_goes_is_what_goes_block_by_block(
    prompts: list[tuple[int, int, bool]], windows: tuple[int | None, ...], max_num_turns: int
) -> None:
    """Prompts fork from 0, 1, 2, ... at any token; some are turns, others somebody else's."""
    manager = small_manager(windows, max_num_turns)
    turns: list[tuple[list[bytes], int]] = []
    for number, (length, fork, is_turn) in enumerate(prompts):
        tokens = ids(length)
        tokens[fork:] += 1000 * (number + 1)
        cache = compute(manager, tokens, "c" if is_turn else None)
        cache.stop_committing()
        wanted = None
        if is_turn:
            keys = manager.block_keys(SCOPE, tokens) + cache._tail_keys
            turns.append((keys, length))
            if len(turns) > max_num_turns:
                wanted = turns
                turns = turns[1:]
        if wanted is None:
            cache.close()
            continue
        # The pages of the turn that ends are in use until it is closed, but it needs what it uses.
        cache.conversation_id, conversation = None, cache.conversation_id
        cache.close()
        goal = expected(manager, wanted)
        assert conversation is not None
        manager.end_turn((SCOPE, conversation), keys, length)
        manager._conversations.finish((SCOPE, conversation))
        tree = manager.store.tree
        for group, offered in enumerate(goal):
            nodes = [node for node in tree.nodes().tolist() if tree.pages(group)[node] != NO_PAGE]
            assert {tree.index.key(node) for node in nodes} == offered
        manager.check_integrity()
    manager.close()
