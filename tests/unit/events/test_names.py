"""The four settings of ``kv_cache_event_hash_algo``, byte-exact (semantics §4.2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from kvmesh.events.names import BlockNames, NamedRun, V1ChainNames, block_names, effective_event_algo
from kvmesh.hashing import ReuseScope, TokenIds, as_token_ids, salt_id, v1_block_keys, v2_block_keys, v2_root

SCOPE = ReuseScope()
TENANT = ReuseScope(salt=salt_id("tenant-a"))


def rows(*tokens: int) -> TokenIds:
    return as_token_ids(list(tokens)).reshape(-1, 4)


def chain(scope: ReuseScope, *tokens: int) -> list[bytes]:
    return v2_block_keys(as_token_ids(list(tokens)), 4, v2_root(scope), include_partial=True)


@pytest.mark.parametrize(
    ("setting", "v2", "algo"),
    [
        ("auto", True, "v2_sha256"),
        ("auto", False, "v1_block_key"),
        ("v1_block_key", True, "v1_block_key"),
        ("v1_block_key", False, "v1_block_key"),
        ("v2_sha256", True, "v2_sha256"),
        ("v2_sha256_64", True, "v2_sha256_64"),
    ],
)
def test_the_effective_algorithm(setting: Any, v2: bool, algo: str) -> None:
    assert effective_event_algo(setting, manager_v2=v2) == (algo, None)


@pytest.mark.parametrize("setting", ["v2_sha256", "v2_sha256_64"])
def test_v1_ignores_v2_algorithms_with_a_warning(setting: Any) -> None:
    algo, warning = effective_event_algo(setting, manager_v2=False)
    assert algo == "v1_block_key"
    assert warning is not None
    assert setting in warning


@pytest.mark.parametrize(
    ("algo", "scope", "expected"),
    [
        (
            "v2_sha256",
            SCOPE,
            [
                "e432228522a304ab556d66e6e40979ad05575f28b19b554264dd3c6277aaf073",
                "756b1d258c63ccc0cbd6284ab33b043c81175086163f9d2821f5764079efb75c",
            ],
        ),
        ("v2_sha256_64", SCOPE, [16443243144690205867, 8460888372051954880]),
        ("v1_block_key", SCOPE, [924206229973855, 2728178455351807326]),
    ],
)
def test_4_2_the_same_prompt_under_every_algorithm(algo: Any, scope: ReuseScope, expected: list[Any]) -> None:
    names = block_names(algo, manager_v2=True, tokens_per_block=4)
    keys = chain(scope, 1, 2, 3, 4, 5, 6, 7, 8)
    assert learnt(names, scope, None, keys[:1], rows(1, 2, 3, 4)) == expected[:1]
    assert learnt(names, scope, keys[0], keys[1:], rows(5, 6, 7, 8)) == expected[1:]
    assert names.of(keys) == expected
    assert names.of_parent(keys[0]) == expected[0]
    names.forget(keys)


@pytest.mark.parametrize(
    ("scope", "expected"),
    [(ReuseScope(lora_id=7), 1405807694910447675), (TENANT, 8961321873627678067)],
)
def test_4_2_v1_names_carry_adapter_and_salt(scope: ReuseScope, expected: int) -> None:
    names = block_names("v1_block_key", manager_v2=True, tokens_per_block=4)
    assert learnt(names, scope, None, chain(scope, 1, 2, 3, 4), rows(1, 2, 3, 4)) == [expected]


def test_4_2_salted_v2_names() -> None:
    names = block_names("v2_sha256", manager_v2=True, tokens_per_block=4)
    expected = "b4c950a41ade125ebdbafd8dcf8a17bbe24b891746c3a790b43ad14c26bd7cd9"
    assert learnt(names, TENANT, None, chain(TENANT, 1, 2, 3, 4), rows(1, 2, 3, 4)) == [expected]


def test_v1_names_of_a_partial_block() -> None:
    names = block_names("v1_block_key", manager_v2=True, tokens_per_block=4)
    full, partial = chain(SCOPE, 1, 2, 3, 4, 5, 6)
    learnt(names, SCOPE, None, [full], rows(1, 2, 3, 4))
    expected = v1_block_keys(as_token_ids([1, 2, 3, 4, 5, 6]), 4, include_partial=True).tolist()
    assert learnt(names, SCOPE, full, [partial], as_token_ids([5, 6]).reshape(1, 2)) == expected[1:]


def test_the_v1_manager_has_names_already() -> None:
    names = block_names("v1_block_key", manager_v2=False, tokens_per_block=4)
    keys = [(2**64 - 1).to_bytes(8, "big"), (5).to_bytes(8, "big")]
    assert learnt(names, SCOPE, None, keys, rows(*range(8))) == [2**64 - 1, 5]
    assert names.of_parent(keys[1]) == 5


def test_4_2_what_is_not_text_is_named_by_its_v2_key_and_so_is_all_that_follows() -> None:
    """Fall back to the truncated V2 hash for that block and all descendants, and warn once."""
    names = V1ChainNames(4, vocab_size=100)
    keys = chain(SCOPE, *range(16))
    tokens = rows(*range(16))
    tokens[1, 2] = 100
    v1 = v1_block_keys(tokens[:1].reshape(-1), 4).tolist()
    by_key = [int.from_bytes(key[:8], "big") for key in keys]
    with capture_logs() as logs:
        assert learnt(names, SCOPE, None, keys[:2], tokens[:2]) == [v1[0], by_key[1]]
        assert learnt(names, SCOPE, keys[1], keys[2:3], tokens[2:3]) == [by_key[2]]
        assert learnt(names, SCOPE, keys[2], keys[3:], tokens[3:]) == [by_key[3]]
    assert len(logs) == 1
    names.forget(keys)
    tokens[1, 2] = 6
    assert learnt(names, SCOPE, None, keys, tokens) == v1_block_keys(tokens.reshape(-1), 4).tolist()


class TestWindowedGroups:
    """They may tell a block without the one before it."""

    keys = chain(SCOPE, *range(16))
    tokens = rows(*range(16))
    expected = v1_block_keys(np.arange(16, dtype=np.int32), 4).tolist()

    def test_the_parent_is_told_later_in_the_same_step(self) -> None:
        names = V1ChainNames(4)
        names.learn(
            [
                NamedRun(SCOPE, self.keys[2], self.keys[3:], self.tokens[3:]),
                NamedRun(SCOPE, self.keys[1], self.keys[2:3], self.tokens[2:3]),
                NamedRun(SCOPE, None, self.keys[:3], self.tokens[:3]),
            ]
        )
        assert names.of(self.keys) == self.expected

    def test_the_parent_is_gone(self) -> None:
        names = V1ChainNames(4)
        names.learn([NamedRun(SCOPE, None, self.keys[:1], self.tokens[:1])])
        names.forget(self.keys[:1])
        names.learn([NamedRun(SCOPE, self.keys[0], self.keys[1:2], self.tokens[1:2])])
        by_key = [int.from_bytes(key[:8], "big") for key in self.keys]
        assert names.of_parent(self.keys[0]) == by_key[0]
        assert names.of(self.keys[1:2]) == by_key[1:2]
        # What was told keeps its name, and so does the rule for what continues it.
        names.learn([NamedRun(SCOPE, None, self.keys, self.tokens)])
        assert names.of(self.keys) == [self.expected[0], *by_key[1:]]

    def test_a_known_block_is_not_named_again(self) -> None:
        names = V1ChainNames(4)
        names.learn([NamedRun(SCOPE, None, self.keys[:2], self.tokens[:2])])
        names.learn([NamedRun(SCOPE, None, self.keys, self.tokens)])
        assert names.of(self.keys) == self.expected


def learnt(
    names: BlockNames, scope: ReuseScope, parent_key: bytes | None, keys: list[bytes], token_ids: TokenIds
) -> list[str | int]:
    names.learn([NamedRun(scope, parent_key, keys, token_ids)])
    return names.of(keys)
