"""Routing policies as vectors: candidates and a question in, a decision out."""

from __future__ import annotations

import numpy as np
import pytest

from kvmesh.config.routing import ConversationPolicy, KvCacheAwarePolicy, LoadBalancingPolicy, RoundRobinPolicy
from kvmesh.router.policy import Candidate, Question, make_policy
from kvmesh.router.policy.conversation import Conversation, ConversationArgs
from kvmesh.router.policy.kv_cache_aware import KvCacheAware, KvCacheAwareArgs, credit_tokens, decide
from kvmesh.router.policy.load_balancing import LoadBalancing
from kvmesh.router.policy.round_robin import RoundRobin
from kvmesh.router.policy.sessions import SessionTable, prefix_hashes

QUESTION = Question(prompt_tokens=256)


def three(**fields: tuple[int, int, int]) -> list[Candidate]:
    return [
        Candidate(f"s{index + 1}", **{name: values[index] for name, values in fields.items()}) for index in range(3)
    ]


def test_round_robin_takes_turns_in_a_fixed_order() -> None:
    policy = RoundRobin()
    servers = three(active_requests=(9, 0, 0))
    assert [policy.choose(servers, QUESTION).chosen for _ in range(4)] == ["s1", "s2", "s3", "s1"]
    assert policy.choose(list(reversed(servers)), QUESTION).chosen == "s2"


def test_load_balancing_by_requests_and_by_tokens() -> None:
    servers = three(active_requests=(2, 1, 3), active_tokens=(10, 500, 20))
    assert LoadBalancing().choose(servers, QUESTION).chosen == "s2"
    assert LoadBalancing(use_tokens=True).choose(servers, QUESTION).chosen == "s1"


def test_load_balancing_ties_rotate() -> None:
    policy = LoadBalancing()
    servers = three(active_requests=(1, 0, 0))
    assert [policy.choose(servers, QUESTION).chosen for _ in range(3)] == ["s2", "s3", "s2"]


def test_the_holder_is_chosen() -> None:
    """T22: three servers, matches [0, 8, 0] blocks of 32."""
    decision = KvCacheAware().choose(three(device_tokens=(0, 256, 0)), QUESTION)
    assert decision.chosen == "s2"
    assert [entry.terms["credit_tokens"] / 32 for entry in decision.candidates] == [0, 8, 0]
    assert [entry.cost for entry in decision.candidates] == [8, 0, 8]


def test_kv_aware_cost_is_missing_blocks_plus_weighted_load() -> None:
    servers = three(device_tokens=(0, 128, 0), active_requests=(0, 3, 1))
    decision = decide(servers, 256, KvCacheAwareArgs(load_weight=2.0), 0)
    assert [entry.cost for entry in decision.candidates] == [8, 4 + 6, 8 + 2]
    assert decision.chosen == "s1"
    assert decide(servers, 256, KvCacheAwareArgs(load_weight=1.0), 0).chosen == "s2"


def test_kv_aware_load_in_tokens() -> None:
    servers = three(device_tokens=(0, 256, 0), active_tokens=(0, 320, 32))
    decision = decide(servers, 256, KvCacheAwareArgs(use_tokens=True), 0)
    assert [entry.cost for entry in decision.candidates] == [8, 10, 9]


def test_kv_aware_load_cap_takes_the_credit_of_a_crowded_holder() -> None:
    servers = three(device_tokens=(0, 256, 0), active_requests=(1, 4, 1))
    assert decide(servers, 256, KvCacheAwareArgs(load_weight=0, load_cap=4), 0).chosen == "s2"
    assert (
        decide(servers, 256, KvCacheAwareArgs(load_weight=0, load_cap=3), 0).candidates[1].terms["over_load_cap"] == 1
    )
    assert decide(servers, 256, KvCacheAwareArgs(load_weight=1, load_cap=3), 0).chosen != "s2"


def test_kv_aware_without_matches_is_least_load_with_rotating_ties() -> None:
    policy = KvCacheAware()
    servers = three(active_requests=(1, 0, 0))
    assert [policy.choose(servers, QUESTION).chosen for _ in range(3)] == ["s2", "s3", "s2"]


@pytest.mark.parametrize(
    ("device", "host", "disk", "credit"),
    [(64, 0, 0, 64), (64, 128, 0, 64 + 48), (0, 128, 256, 96 + 32), (0, 0, 256, 64), (512, 512, 512, 256)],
)
def test_colder_tiers_count_less(device: int, host: int, disk: int, credit: float) -> None:
    candidate = Candidate("s", device_tokens=device, host_tokens=host, disk_tokens=disk)
    assert credit_tokens(candidate, 256) == credit


def ids(*blocks: int) -> np.ndarray:
    return np.repeat(np.array(blocks, dtype=np.int32), 4)


def conversation(**args: object) -> Conversation:
    return Conversation(ConversationArgs(tokens_per_block=4, use_token_ids=True, **args))


def question(*blocks: int, conversation_id: str | None = None) -> Question:
    prompt = ids(*blocks)
    return Question(prompt_tokens=len(prompt), token_ids=prompt, conversation_id=conversation_id)


def test_conversation_three_of_four_blocks_stick() -> None:
    policy = conversation()
    servers = three(active_tokens=(5, 0, 0))
    first = policy.choose(servers, question(1, 2, 3, 4)).chosen
    busy = [Candidate(name, active_tokens=900 if name == first else 0) for name in ("s1", "s2", "s3")]
    assert policy.choose(busy, question(1, 2, 3, 9)).chosen == first


def test_conversation_two_of_four_fall_back() -> None:
    policy = conversation()
    first = policy.choose(three(), question(1, 2, 3, 4)).chosen
    busy = [Candidate(name, active_tokens=900 if name == first else 0) for name in ("s1", "s2", "s3")]
    assert policy.choose(busy, question(1, 2, 8, 9)).chosen != first


def test_conversation_id_is_sticky_while_the_server_lives() -> None:
    policy = conversation()
    servers = three(active_tokens=(5, 0, 1))
    assert policy.choose(servers, question(1, conversation_id="c")).chosen == "s2"
    busy = three(active_tokens=(0, 900, 1))
    assert policy.choose(busy, question(7, 8, conversation_id="c")).chosen == "s2"
    assert policy.choose(busy[::2], question(7, 8, conversation_id="c")).chosen == "s1"
    assert policy.choose(busy, question(7, 8, conversation_id="c")).chosen == "s1", "it moved"
    policy.forget("s1")
    assert policy.choose(three(active_tokens=(9, 0, 9)), question(7, 8, conversation_id="c")).chosen == "s2"


def test_conversation_in_characters_and_skipping_a_common_head() -> None:
    policy = Conversation(ConversationArgs(tokens_per_block=4, hash_skip_count=6))
    servers = three()
    head = "system"
    first = policy.choose(servers, Question(8, text=head + "aaaabbbb")).chosen
    second = policy.choose(servers, Question(8, text=head + "ccccdddd")).chosen
    assert first != second, "the shared head alone is no conversation"
    assert policy.choose(servers, Question(12, text=head + "aaaabbbbeeee"[:10])).chosen == first


def test_session_table_forgets_the_least_recently_used() -> None:
    table = SessionTable(2)
    table.remember("a", "s1", (1, 2))
    table.remember("b", "s2", (3,))
    table.remember("a", "s1", (1, 2, 5))
    table.remember("c", "s3", (4,))
    assert (table.server_of("a"), table.server_of("b"), table.server_of("c")) == ("s1", None, "s3")
    assert table.longest_match((3,)) is None
    match = table.longest_match((1, 2, 9))
    assert match is not None
    assert (match.session, match.depth) == ("a", 2)


def test_prefix_hashes_chain() -> None:
    assert prefix_hashes([1, 2, 3], units_per_block=4) == ()
    one, two = prefix_hashes([1] * 8, units_per_block=4), prefix_hashes([1] * 4 + [2] * 4, units_per_block=4)
    assert one[0] == two[0]
    assert one[1] != two[1]
    assert one[0] != one[1]


@pytest.mark.parametrize(
    ("settings", "name", "needs_matches"),
    [
        (RoundRobinPolicy(), "round_robin", False),
        (LoadBalancingPolicy(use_tokens=True), "load_balancing", False),
        (KvCacheAwarePolicy(load_weight=2), "kv_cache_aware", True),
        (ConversationPolicy(), "conversation", False),
    ],
)
def test_policies_from_settings(settings: object, name: str, needs_matches: bool) -> None:
    policy = make_policy(settings)
    assert (policy.name, policy.needs_matches) == (name, needs_matches)
    assert policy.choose(three(), question(1)).policy == name
