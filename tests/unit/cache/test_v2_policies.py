"""When blocks become reusable and when they go: the reuse policies of the V2 cache.

Covers semantics §1.3 CHECK A (windows; full attention is in ``test_manager``), B and C with §7 T14, and what a
conversation is; §7 T15.
"""

from __future__ import annotations

import numpy as np
import pytest
from scheduling import SchedulerBench

from kvmesh.cache.conversation import MAX_CONVERSATIONS
from kvmesh.cache.manager import KvCacheManager
from kvmesh.cache.sequence import KvCache
from kvmesh.hashing import ReuseScope, as_token_ids

NO_SCOPE = ReuseScope()
A = np.arange(0, 8, dtype=np.int32)
B = np.arange(100, 108, dtype=np.int32)
C = np.arange(200, 208, dtype=np.int32)


def turn(manager: KvCacheManager, tokens: np.ndarray, conversation: str | None = "conv-1") -> int:
    """One request of a conversation; returns how many tokens it reuses."""
    cache = open_turn(manager, tokens, conversation)
    cache.close()
    manager.check_integrity()
    return cache.num_cached_tokens


def open_turn(manager: KvCacheManager, tokens: np.ndarray, conversation: str | None = "conv-1") -> KvCache:
    cache = manager.create(NO_SCOPE, tokens, "r", conversation_id=conversation)
    assert cache.resume()
    assert cache.resize(len(tokens))
    cache.commit(tokens[cache.committed :])
    return cache


def probe(manager: KvCacheManager, tokens: np.ndarray) -> int:
    return manager.match(NO_SCOPE, tokens).num_tokens


@pytest.mark.parametrize("policy", ["per_request", "per_conversation"])
@pytest.mark.parametrize("windows", [(None,), (None, 8), (8, 5)])
def test_nothing_before_the_last_chunk(make_manager, sink, policy: str, windows: tuple[int | None, ...]) -> None:
    """§1.3 CHECK A: between chunk 2 and 3 another request finds 0 tokens, afterwards all but the last."""
    manager = make_manager(policy=policy, windows=windows)
    tokens = np.arange(12, dtype=np.int32)
    cache = manager.create(NO_SCOPE, tokens, "r", conversation_id="c")
    assert cache.resume()
    for end in (4, 8):
        assert cache.resize(end)
        cache.commit(tokens[end - 4 : end])
        assert probe(manager, tokens) == 0
    assert not sink.log
    assert cache.resize(12)
    cache.commit(tokens[8:])
    assert probe(manager, tokens) == 11
    cache.close()


def test_a_turn_older_than_max_num_turns_is_forgotten(make_manager) -> None:
    """§1.3 CHECK B, §7 T14: two turns are kept; the third drops the first."""
    manager = make_manager(policy="per_conversation", max_num_turns=2)
    turn(manager, A)
    turn(manager, B)
    assert probe(manager, A) == 7
    turn(manager, C)
    assert [probe(manager, tokens) for tokens in (A, B, C)] == [0, 7, 7]


def test_a_continued_turn_drops_the_window_of_the_one_before(make_manager) -> None:
    """§1.3 CHECK C, §7 T14: B continues A and reuses 8; afterwards A's window is gone, B's is not."""
    manager = make_manager(policy="per_conversation", windows=(None, 4))
    longer = as_token_ids([*A.tolist(), 100, 101, 102, 103])
    turn(manager, A)
    assert turn(manager, longer) == 8
    assert probe(manager, A) == 0
    assert probe(manager, as_token_ids([*longer.tolist(), 7])) == 12


def test_full_attention_keeps_what_the_newer_turn_needs(make_manager) -> None:
    """§1.3: blocks that are needed by newer turns stay."""
    manager = make_manager(policy="per_conversation")
    turn(manager, A)
    assert turn(manager, as_token_ids([*A.tolist(), 100, 101, 102, 103])) == 8
    assert probe(manager, A) == 7


def test_other_conversations_and_none(make_manager) -> None:
    """§1.3: requests without a conversation behave as ``per_request``; each conversation has turns of its own."""
    manager = make_manager(policy="per_conversation")
    turn(manager, A, None)
    turn(manager, B, "conv-2")
    turn(manager, C)
    turn(manager, np.arange(300, 308, dtype=np.int32))
    assert [probe(manager, tokens) for tokens in (A, B, C)] == [7, 7, 0]


@pytest.mark.parametrize("theirs", [ReuseScope(salt=7), ReuseScope(lora_id=1)])
def test_one_id_in_two_scopes_is_two_conversations(make_manager, theirs: ReuseScope) -> None:
    """Another salt's or adapter's turn neither blocks this conversation's nor drops its blocks."""
    manager = make_manager(policy="per_conversation")
    turn(manager, A)
    other = manager.create(theirs, B, "r", conversation_id="conv-1")
    mine = open_turn(manager, A)
    assert (mine.conversation_id, other.conversation_id) == ("conv-1", "conv-1")
    mine.close()
    assert other.resume()
    assert other.resize(len(B))
    other.commit(B)
    other.close()
    assert probe(manager, A) == 7
    assert manager.match(theirs, B).num_tokens == 7


def test_blocks_that_others_continue_or_use_stay(make_manager) -> None:
    manager = make_manager(policy="per_conversation")
    turn(manager, A)
    other = open_turn(manager, as_token_ids([*A.tolist(), 9, 9, 9, 9]), None)
    turn(manager, B)
    assert probe(manager, A) == 7
    other.close()
    turn(manager, C)
    assert [probe(manager, tokens) for tokens in (A, B)] == [7, 0]


def test_one_request_of_a_conversation_at_a_time(make_manager) -> None:
    """§1.3: a second concurrent one is warned about and ignores its conversation."""
    manager = make_manager(policy="per_conversation")
    first = open_turn(manager, A)
    second = open_turn(manager, B)
    assert (first.conversation_id, second.conversation_id) == ("conv-1", None)
    second.close()
    assert probe(manager, B) == 7
    first.close()
    third = open_turn(manager, C)
    assert third.conversation_id == "conv-1", "the conversation goes on"
    third.close()
    assert [probe(manager, tokens) for tokens in (A, B, C)] == [0, 7, 7]


def test_a_turn_whose_blocks_went_is_harmless(make_manager) -> None:
    """§1.3: a turn that fails to plan, its blocks being gone already, is no error."""
    manager = make_manager(policy="per_conversation")
    turn(manager, A)
    manager.clear_reusable_blocks()
    turn(manager, B)
    assert [probe(manager, tokens) for tokens in (A, B)] == [0, 7]


def test_an_unfinished_prompt_is_no_turn(make_manager) -> None:
    manager = make_manager(policy="per_conversation")
    turn(manager, A)
    cache = manager.create(NO_SCOPE, B, "r", conversation_id="conv-1")
    assert cache.resume()
    assert cache.resize(4)
    cache.commit(B[:4])
    cache.close()
    assert [probe(manager, tokens) for tokens in (A, B)] == [7, 0]


def test_conversations_are_bounded(make_manager, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was quiet for longest is forgotten; its blocks age like any others."""
    assert MAX_CONVERSATIONS >= 1000
    monkeypatch.setattr("kvmesh.cache.conversation.MAX_CONVERSATIONS", 2)
    manager = make_manager(policy="per_conversation")
    for name, tokens in (("a", A), ("b", B), ("c", C)):
        turn(manager, tokens, name)
    turn(manager, np.arange(300, 308, dtype=np.int32), "a")
    assert probe(manager, A) == 7
    turn(manager, np.arange(400, 408, dtype=np.int32), "c")
    assert probe(manager, C) == 0


@pytest.mark.parametrize(("reusable", "waits"), [(4, True), (8, False)])
def test_the_first_new_block_decides_who_waits(reusable: int, waits: bool) -> None:
    """§7 T15: 10 tokens, 4 a block. 4 are reusable: block 1 is the first new one, and who computes it is waited for;
    8: what is new is part of a block, which has no key, and nobody is waited for.
    """
    bench = SchedulerBench(32, max_num_tokens=8, prefix_aware=True)
    bench.add("cached", reusable, max_tokens=1)
    while bench.all[0] in bench.scheduler.running or bench.all[0] in bench.scheduler.waiting:
        bench.step()
    bench.add("first", 10)
    bench.add("second", 10)
    plan = bench.scheduler.schedule()
    assert len(plan.chunks) == (1 if waits else 2)
