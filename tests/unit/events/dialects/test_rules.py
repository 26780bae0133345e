"""Fields that events tell in different ways, one rule each (§2.4): tails, salts, images, tokens; and rubbish."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvmesh.events.decoding import BatchError, decode_batch, rank_of
from kvmesh.events.dialects import DIALECTS
from kvmesh.events.index import PrefixIndex, Source
from kvmesh.events.records import Cleared, Removed, Stored, Tier
from kvmesh.kernels import _native

FOLDER = Path(__file__).parents[3] / "data" / "events"
ROUNDS = 200 if os.environ.get("KVMESH_SOAK") else 2

PREFIX = ["BlockStored", [1], None, [1, 2], 2, None, "GPU"]


def decode(*events: Any) -> Any:
    return decode_batch(msgspec.msgpack.encode([0.0, list(events), 0]))


def stored(event: Any) -> Stored:
    batch = decode(event)
    assert batch.rejected == {}
    (record,) = batch.records
    assert isinstance(record, Stored)
    return record


def reason(event: Any) -> str:
    (name,) = decode(event).rejected
    return name


def map_event(**fields: Any) -> dict[str, Any]:
    return {"type": "BlockStored", "block_hashes": [1, 2], "token_ids": [1, 2, 3, 4], "block_size": 2} | fields


class TestTails:
    """What comes after the extra keys of a positional event differs between the releases of vLLM, Dynamo and ATOM."""

    @pytest.mark.parametrize(
        ("tail", "group", "kind"),
        [
            ([], None, None),
            ([0], 0, None),
            ([0, "full_attention", None], 0, "full_attention"),
            ([3, "sliding_window", 64], 3, "sliding_window"),
            ([[{"mm_objects": []}], 3, "sliding_window", 64], 3, "sliding_window"),
            ([None, "full_attention", 64, "LOCAL", "engine"], None, "full_attention"),
            ([None, None, None, "LOCAL", "kv_store"], None, None),
            ([None, None, None, None, "kv_store"], None, None),
            ([2, None, None, None, None, 4096], 2, None),
        ],
    )
    def test_stored(self, tail: list[Any], group: int | None, kind: str | None) -> None:
        record = stored([*PREFIX, None, None, *tail])
        assert (record.group, record.kind) == (group, kind)

    def test_a_source_kind_is_not_taken_for_the_kind_of_the_group(self) -> None:
        assert stored([*PREFIX, None, None, 1, None, None, None, "engine"]).kind is None

    @pytest.mark.parametrize("locality", ["REMOTE", "ELSEWHERE"])
    def test_what_lies_elsewhere_or_who_knows_where_is_left_out(self, locality: str) -> None:
        assert reason([*PREFIX, None, None, 0, "full_attention", None, locality, "engine"]) == "not_local"
        assert reason(["BlockRemoved", [1], "GPU", 0, None, None, locality, "engine"]) == "not_local"
        assert reason(map_event(locality=locality)) == "not_local"

    def test_where_sglang_has_a_map_others_have_the_adapter_or_cut(self) -> None:
        salted = decode([*PREFIX, {"cache_salt": "s", "session_id": "x"}])
        assert (salted.records[0].salt, salted.dialects) == ("s", {"sglang": 1})
        named = decode([*PREFIX, "sql"])
        assert (named.records[0].lora, named.dialects) == ("sql", {"array": 1})
        assert decode(PREFIX[:5]).dialects == {"array": 1}


class TestMedia:
    @pytest.mark.parametrize(
        ("medium", "tier"), [("gpu", Tier.DEVICE), ("cpu", Tier.HOST), ("disk", Tier.DISK), ("NVME", Tier.DISK)]
    )
    def test_case_does_not_matter(self, medium: str, tier: Tier) -> None:
        assert decode(["BlockRemoved", [1], medium]).records == [Removed(hashes=[1], tier=tier)]

    def test_a_pool_that_others_share_is_not_the_workers(self) -> None:
        """SGLang's EXTERNAL: whether this worker can reuse such a block, its events do not say."""
        assert reason(["BlockRemoved", [1], "EXTERNAL"]) == "unknown_medium"


class TestSalts:
    """vLLM puts adapter, images and salt into one unlabelled list for each block."""

    @pytest.mark.parametrize(
        ("extra_keys", "lora_name", "salt", "rest"),
        [
            ([["s"], None], None, "s", None),
            ([["sql", "s"], ["sql"]], "sql", "s", None),
            ([["sql", "sql"], ["sql"]], "sql", "sql", None),
            ([[["img", 0], "s"], [["img", -2]]], None, "s", [[["img", 0]], [["img", -2]]]),
            ([["sql", ["img", 0]], ["sql"]], "sql", None, [[["img", 0]], None]),
            ([["dynamo-cache-salt:s"], None], None, "s", None),
            ([["img", "dynamo-cache-salt:s"], None], None, "s", [["img"], None]),
            ([[b"embedding"], [b"other"]], None, None, [[b"embedding"], [b"other"]]),
            (
                [[["lora", "sql"], ["mm", "img", 3], ["cache_salt", "s"]], [["lora", "sql"]]],
                "sql",
                "s",
                [[["img", 3]], None],
            ),
            ([[["prompt_embeds", b"e"]], None], None, None, [[b"e"], None]),
            ([None, None], None, None, None),
            ([[], []], None, None, None),
        ],
    )
    def test_of_the_first_block(self, extra_keys: Any, lora_name: str | None, salt: str | None, rest: Any) -> None:
        record = stored(map_event(extra_keys=extra_keys, lora_name=lora_name))
        assert (record.salt, record.extra_keys) == (salt, rest)

    def test_further_on_a_text_is_content(self) -> None:
        record = stored(map_event(parent_block_hash=9, extra_keys=[["img"], None]))
        assert (record.salt, record.extra_keys) == (None, [["img"], None])

    def test_a_field_of_its_own_wins(self) -> None:
        assert stored(map_event(cache_salt="s", extra_keys=[["s"], None])).extra_keys is None
        other = stored(map_event(cache_salt="s", extra_keys=[["img"], None]))
        assert (other.salt, other.extra_keys) == ("s", [["img"], None])

    def test_lists_that_are_not_one_entry_a_block_are_left_out(self) -> None:
        assert reason(map_event(extra_keys=[["s"]])) == "keys_do_not_fit_blocks"
        assert reason(map_event(extra_keys=["s", "s"])) == "malformed"
        assert reason(map_event(mm_keys=[[{"start_offset": 1}], None])) == "malformed"


class TestImages:
    def test_each_way_of_telling_them(self) -> None:
        of_vllm = stored(map_event(extra_keys=[[["1f", 0]], None]))
        of_tensorrt = stored(map_event(mm_keys=[[{"type": "mm_key", "hash": "1f", "start_offset": 0}], None]))
        assert of_vllm.extra_keys == of_tensorrt.extra_keys == [[["1f", 0]], None]
        infos = [{"mm_objects": [{"mm_hash": 77, "offsets": []}]}, None]
        assert stored(map_event(block_mm_infos=infos)).extra_keys == [[77], None]
        assert stored([*PREFIX[:6], "GPU", None, None, [infos[0]], 0]).extra_keys == [[77]]

    def test_digests_among_the_tokens_belong_to_their_block(self) -> None:
        record = stored(map_event(token_ids=[1, "ab", 3, 4]))
        assert record.token_ids.tolist() == [1, 0, 3, 4]
        assert record.extra_keys == [[["digest", 1, "ab"]], None]
        assert stored(map_event(token_ids=[1, "cd", 3, 4])).extra_keys != record.extra_keys


class TestLookahead:
    def test_pairs_and_lists_of_what_follows_say_the_same(self) -> None:
        pairs = stored(map_event(token_ids=[[1, 2], [2, 3], [3, 4], [4, 5]]))
        lists = stored(map_event(lookahead_token_ids=[[3], [5]]))
        for record in (pairs, lists):
            assert (record.token_ids.tolist(), record.lookahead) == ([1, 2, 3, 4, 5], 1)
        assert stored(map_event(lookahead_token_ids=[[3, 4], [5, 6]])).lookahead == 2

    @pytest.mark.parametrize(
        "fields",
        [
            {"token_ids": [[1, 2], [3, 4], [4, 5], [5, 6]]},
            {"lookahead_token_ids": [[9], [5]]},
            {"lookahead_token_ids": [[3], [5], [6]]},
            {"lookahead_token_ids": [[], [5]]},
            {"token_ids": [[1, 2], [2, 3], [3, 4], [4, 5]], "lookahead_token_ids": [[3], [5]]},
        ],
    )
    def test_a_contradiction_is_left_out(self, fields: dict[str, Any]) -> None:
        assert reason(map_event(**fields)) == "broken_lookahead"

    def test_an_engine_without_lookahead_may_say_so(self) -> None:
        assert stored(map_event(lookahead_token_ids=[[], []])).lookahead == 0

    @pytest.mark.parametrize("tokens", [[[1, 2, 3]], [[1]], [[1, 2], 3], [[1, "x"]], {}, "text", [1, None], [1.5]])
    def test_other_shapes_are_malformed(self, tokens: Any) -> None:
        assert reason(map_event(token_ids=tokens)) == "malformed"


class TestMooncake:
    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"event_type": kind, "seq_hashes": [5], "medium": "cpu", "tenant_id": "acme", "model_name": "m"} | fields

    def test_blocks_of_several_models_and_tenants(self) -> None:
        batch = decode(
            self.event("stored", token_ids=[1, 2], block_size=2, additional_salt="s", lora_name="", parent_hash=None),
            self.event("removed"),
            self.event("cleared", seq_hashes=None),
        )
        record = batch.records[0]
        assert (record.tenant, record.model, record.salt, record.lora) == ("acme", "m", "s", None)
        assert isinstance(batch.records[1], Removed)
        assert (batch.records[1].tier, batch.records[2]) == (Tier.HOST, Cleared())
        assert batch.dialects == {"mooncake": 3}

    @pytest.mark.parametrize(
        "owner", [{"tenant_id": "other"}, {"model_name": "n"}, {"lora_name": "sql"}, {"additional_salt": "s"}]
    )
    def test_equal_hashes_of_two_owners_are_two_blocks(self, owner: dict[str, Any]) -> None:
        """They are of tokens alone: whoever has the same prompt has the same hashes."""
        index, source = PrefixIndex(), Source("store")
        index.add(source, model="m")

        def tell(kind: str, tokens: list[int] | None, hash_: int, parent: int | None, **fields: Any) -> None:
            event = self.event(kind, token_ids=tokens, block_size=2, medium="gpu", seq_hashes=[hash_], **fields)
            index.apply(source, decode(event | {"parent_hash": parent}).records)

        def found() -> list[int]:
            scopes = [self.event("") | {"additional_salt": None, "lora_name": None} | of for of in ({}, owner)]
            prompt = np.array([1, 2, 3, 4], np.int32)
            return [
                sum(
                    match.device_tokens
                    for match in index.match(
                        prompt,
                        model=of["model_name"],
                        tenant=of["tenant_id"],
                        lora=of["lora_name"],
                        cache_salt=of["additional_salt"],
                    )
                )
                for of in scopes
            ]

        tell("stored", [1, 2], 1, None)
        tell("stored", [1, 2], 1, None, **owner)
        assert found() == [2, 2]
        tell("stored", [3, 4], 2, 1, **owner)
        assert found() == [2, 4]
        tell("removed", None, 1, None)
        assert found() == [0, 4]

    def test_a_prompt_of_another_tenant_or_model_finds_nothing(self) -> None:
        index, source = PrefixIndex(), Source("store")
        index.add(source, model="other")
        index.apply(source, decode(self.event("stored", token_ids=[1, 2], block_size=2, medium="gpu")).records)

        def found(**of: str) -> int:
            return sum(match.device_tokens for match in index.match(np.array([1, 2], np.int32), **of))

        assert found(model="m", tenant="acme") == 2
        assert found(model="m") == found(model="other") == found(model="other", tenant="acme") == 0

    def test_without_tokens_known_blocks_are_in_another_medium(self) -> None:
        record = stored(self.event("stored", token_ids=None, block_size=None))
        assert (record.token_ids.size, record.tier) == (0, Tier.HOST)

    def test_without_a_hash_there_is_nothing_to_use(self) -> None:
        assert reason(self.event("stored", seq_hashes=[], token_ids=None)) == "no_blocks"

    def test_a_text_that_looks_like_its_key_does_not_make_it_one(self) -> None:
        assert decode(map_event(extra_keys=[["event_type"], None])).dialects == {"map": 1}


def test_events_that_say_nothing_are_counted_and_make_no_record() -> None:
    batch = decode(["Ignored"], {"type": "Ignored"}, {"type": "AllBlocksCleared", "source_kind": "engine"})
    assert (batch.records, batch.rejected) == ([Cleared()], {})
    assert batch.dialects == {"array": 1, "map": 2}
    assert set(batch.dialects) <= set(DIALECTS)


@pytest.mark.parametrize(
    ("envelope", "rank"),
    [
        ([1, []], None),
        ([1.5, [], 3], 3),
        ([None, [], None, "later"], None),
        (["now", [], "0"], None),
        ({"events": []}, None),
        ({"events": [], "dp_rank": 2, "ts": 1}, 2),
        ({"events": [], "data_parallel_rank": 0, "dp_rank": 2}, 0),
    ],
)
def test_envelopes(envelope: Any, rank: int | None) -> None:
    payload = msgspec.msgpack.encode(envelope)
    assert decode_batch(payload).rank == rank_of(payload) == rank


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=300))
@example([-33, -32, -129, -128, -32769, -32768, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, -(2**31)])
def test_tokens_are_unpacked_as_they_were_packed(tokens: list[int]) -> None:
    packed = msgspec.msgpack.encode(tokens)
    unpacked = _native.unpack_token_ids(packed)
    assert unpacked is not None
    assert np.frombuffer(unpacked, "<i4").tolist() == tokens
    assert _native.unpack_token_ids(packed + b"\x00") is None
    assert all(_native.unpack_token_ids(packed[:end]) is None for end in range(len(packed)))


@pytest.mark.parametrize("packed", [b"\xdd\xff\xff\xff\xff\x01", b"\xcf\x00", b"", b"\x91\xcf" + b"\xff" * 8])
def test_unpacking_rubbish_takes_no_memory(packed: bytes) -> None:
    assert _native.unpack_token_ids(packed) is None


WORDS = ["BlockStored", "BlockRemoved", "AllBlocksCleared", "stored", "GPU", "LOCAL", "full_attention", "lora", "s", ""]
KEYS = [
    "type",
    "event_type",
    "block_hashes",
    "seq_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "medium",
    "extra_keys",
    "mm_keys",
    "hash",
    "start_offset",
    "block_mm_infos",
    "mm_objects",
    "mm_hash",
    "lookahead_token_ids",
    "group_idx",
    "locality",
    "cache_salt",
    "lora_name",
]


def rubbish(rng: random.Random, depth: int = 4) -> Any:
    """Anything that msgpack can say, in the words of events."""
    leaf = rng.choice(
        [
            None,
            True,
            rng.randrange(4),
            rng.randrange(-(2**63), 2**64),
            rng.random(),
            rng.choice(WORDS),
            rng.randbytes(9),
        ]
    )
    if depth == 0 or rng.random() < 0.4:
        return leaf
    if rng.random() < 0.7:
        return [rubbish(rng, depth - 1) for _ in range(rng.randrange(5))]
    return {rng.choice(KEYS): rubbish(rng, depth - 1) for _ in range(rng.randrange(5))}


def nearly_an_event(rng: random.Random) -> Any:
    """A good event of which something is not."""
    event: Any = map_event()
    if rng.random() < 0.5:
        event |= {rng.choice(KEYS): rubbish(rng) for _ in range(rng.randrange(1, 4))}
        return event
    event = ["BlockStored", [1, 2], None, [1, 2, 3, 4], 2, None, "GPU", None, None, 0, None, None, "LOCAL", "engine"]
    for _ in range(rng.randrange(1, 4)):
        event[rng.randrange(len(event))] = rubbish(rng)
    return event[: rng.randrange(1, len(event) + 1)]


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_no_event_takes_its_batch_or_its_reader_with_it(seed: int) -> None:
    rng = random.Random(seed)
    good = ["BlockRemoved", [7], "GPU"]
    for _ in range(2000):
        events = [rng.choice([rubbish, nearly_an_event])(rng) for _ in range(rng.randrange(1, 4))]
        batch = decode(good, *events, good)
        assert batch.records[0] == batch.records[-1] == Removed(hashes=[7])
        assert sum(batch.dialects.values()) + sum(batch.rejected.values()) == len(events) + 2
        assert set(batch.samples) == set(batch.rejected)


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_batch_or_none(payload: bytes) -> None:
    with contextlib.suppress(BatchError):
        decode_batch(payload)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.hex")), ids=lambda path: path.stem)
def test_damaged_bytes_are_events_of_less_or_no_batch(path: Path) -> None:
    rng = random.Random(path.stem)
    for text in path.read_text().split("\n\n")[1:]:
        payload = bytes.fromhex(text)
        for _ in range(200):
            damaged = bytearray(payload)
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            with contextlib.suppress(BatchError):
                decode_batch(bytes(damaged[: rng.randrange(len(damaged))] if rng.random() < 0.3 else damaged))
