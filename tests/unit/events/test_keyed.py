"""Keyed streams: what is on the wire says nothing without the key, and everything to who has it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.cache.events import StoredBlocks
from kvmesh.config.errors import ConfigError
from kvmesh.events.decoding import decode_batch
from kvmesh.events.digests import DigestKey, digest_of
from kvmesh.events.encoding import EventEncoding, encode_batch
from kvmesh.events.index import PrefixIndex, Source
from kvmesh.events.keyed import (
    MAX_KEYED_BLOCK,
    MAX_UNSURE_TOKENS,
    KeyRing,
    StreamKey,
    disguised,
    generate_key,
    is_readable,
    keyed_salt,
)
from kvmesh.events.keyed_lookup import KeyedLookup, lookup_of
from kvmesh.events.live import LiveBlocks
from kvmesh.events.published import PublishedSet
from kvmesh.events.records import Stored, Tier
from kvmesh.events.sink import StreamSink
from kvmesh.hashing import ReuseScope, salt_id, v2_block_keys, v2_root
from kvmesh.protocol.events import EventBatch, KvEvent

SIZE = 4
SECRET = bytes(range(32))
KEY = StreamKey(SECRET)
TOKENS = np.arange(100, 112, dtype=np.int32)


def tell(sink: StreamSink, tokens: Sequence[int], scope: ReuseScope | None = None, *, level: int = 0) -> list[bytes]:
    """Tell a sink that a whole prompt is stored; gives its block keys."""
    scope = scope or ReuseScope()
    ids = np.array(tokens, np.int32)
    keys = v2_block_keys(ids, SIZE, v2_root(scope))
    blocks = ids[: len(keys) * SIZE].reshape(-1, SIZE)
    sink.on_stored(0, StoredBlocks(scope, None, keys, blocks, level, np.zeros(len(keys), np.uint8)))
    return keys


def encoded(events: list[KvEvent], encoding: EventEncoding = "map") -> bytes:
    return encode_batch(EventBatch(0.0, events, 0), encoding)


def test_a_name_is_the_keyed_blake2b_of_the_block_key() -> None:
    keys = v2_block_keys(TOKENS, SIZE, v2_root(ReuseScope()))
    names = KEY.names(keys)
    assert names.dtype == np.uint64
    assert names.tolist() == [
        int.from_bytes(hashlib.blake2b(key, key=SECRET, digest_size=8, person=b"kvmesh block").digest(), "big")
        for key in keys
    ]
    assert KEY.names([]).tolist() == []
    assert KEY.key_id == hashlib.blake2b(key=SECRET, digest_size=8, person=b"kvmesh key id").hexdigest()


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_the_event_byte_for_byte(encoding: EventEncoding) -> None:
    sink = StreamSink(SIZE, key=KEY)
    keys = tell(sink, TOKENS.tolist(), ReuseScope(lora_id=3, salt=9))
    [event] = msgspec.msgpack.decode(encoded(sink.take(), encoding))[1]
    assert event == {
        "type": "KeyedBlocksStored",
        "key_id": KEY.key_id,
        "block_hashes": KEY.names(keys).tolist(),
        "parent_block_hash": None,
        "block_size": SIZE,
        "medium": "GPU",
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=SIZE, max_size=40),
    st.sampled_from([ReuseScope(), ReuseScope(lora_id=77), ReuseScope(salt=salt_id("tenant"))]),
)
def test_only_names_and_sizes_depend_on_the_prompt(tokens: list[int], scope: ReuseScope) -> None:
    """With the names blanked two messages about prompts of one length are the same, whatever the prompts are."""

    def blanked(prompt: list[int], of: ReuseScope) -> Any:
        sink = StreamSink(SIZE, key=KEY)
        keys = tell(sink, prompt, of)
        sink.on_removed(0, keys, 0)
        ts, events, rank = msgspec.msgpack.decode(encoded(sink.take()))
        for event in events:
            names = KEY.names(keys).tolist()
            event["block_hashes"] = [names.index(name) for name in event["block_hashes"]]
        return ts, events, rank

    assert blanked(tokens, scope) == blanked([7] * len(tokens), ReuseScope())


def test_another_key_gives_other_names() -> None:
    keys = v2_block_keys(TOKENS, SIZE, v2_root(ReuseScope()))
    other = StreamKey(bytes(32))
    assert other.key_id != KEY.key_id
    assert not set(other.names(keys).tolist()) & set(KEY.names(keys).tolist())


def test_who_has_no_key_says_so_and_reads_the_rest() -> None:
    sink = StreamSink(SIZE, key=KEY)
    keys = tell(sink, TOKENS.tolist())
    sink.on_removed(0, keys[-1:], 0)
    payload = encoded(sink.take())
    for ring in (None, KeyRing([StreamKey(bytes(32))]).part()):
        batch = decode_batch(payload, ring)
        assert batch.rejected == {"keyed_without_its_key": 1}
        assert batch.dialects == {"map": 1}, "a removal of something unknown, which means nothing"
    read = decode_batch(payload, KeyRing([KEY]).part())
    assert read.rejected == {}
    assert read.dialects == {"keyed": 1, "map": 1}


def test_a_record_holds_the_names_as_tokens() -> None:
    sink = StreamSink(SIZE, key=KEY)
    keys = tell(sink, TOKENS.tolist())
    [record] = decode_batch(encoded(sink.take()), KeyRing([KEY]).part()).records
    assert isinstance(record, Stored)
    assert record.token_ids.tolist() == KEY.disguise(TOKENS, SIZE, ReuseScope()).tolist()
    assert record.salt == keyed_salt(KEY.key_id)
    halves = record.token_ids.reshape(-1, SIZE)
    assert not halves[:, 2:].any()
    names = [(int(high) % 2**32) << 32 | int(low) % 2**32 for low, high, *_ in halves.tolist()]
    assert names == KEY.names(keys).tolist()


def named(block_size: int, num_blocks: int = 1) -> dict[str, Any]:
    hashes = list(range(1, num_blocks + 1))
    return {"type": "KeyedBlocksStored", "key_id": KEY.key_id, "block_hashes": hashes, "block_size": block_size}


@pytest.mark.parametrize("block_size", [0, 1, MAX_KEYED_BLOCK + 1, 2**30, 2**40, 2**63])
def test_a_block_size_that_cannot_be_is_refused(block_size: int) -> None:
    """Names of 8 bytes are written out to whole blocks: whoever knows a key's id could ask for any amount of memory."""
    ring = KeyRing([KEY])
    batch = decode_batch(msgspec.msgpack.encode([0.0, [named(block_size), named(SIZE)], 0]), ring.part())
    assert batch.rejected == {"keyed_block_size": 1}
    assert len(batch.records) == 1
    assert ring.block_sizes == {SIZE}


def test_a_batch_writes_out_a_bounded_number_of_tokens() -> None:
    event = named(MAX_KEYED_BLOCK, MAX_UNSURE_TOKENS // MAX_KEYED_BLOCK // 2)
    batch = decode_batch(msgspec.msgpack.encode([0.0, [event] * 3, 0]), KeyRing([KEY]).part())
    assert (len(batch.records), batch.rejected) == (2, {"keyed_too_long": 1})
    event = named(MAX_KEYED_BLOCK, MAX_UNSURE_TOKENS // MAX_KEYED_BLOCK + 1)
    assert decode_batch(msgspec.msgpack.encode([0.0, [event], 0]), KeyRing([KEY]).part()).rejected == {
        "keyed_too_long": 1
    }


def test_a_publisher_has_its_block_size_alone() -> None:
    """Prompts are looked up in each size that is told: no publisher may add sizes without a bound, or for good."""
    ring = KeyRing([KEY])
    registered, unknown = ring.part(SIZE), ring.part()
    payload = msgspec.msgpack.encode([0.0, [named(size) for size in range(2, 1000)], 0])
    assert decode_batch(payload, registered).rejected == {"keyed_block_size": 997}
    assert ring.block_sizes == {SIZE}
    assert decode_batch(payload, unknown).rejected == {}
    assert ring.block_sizes == {SIZE, 998, 999}, "of one that nobody knows the size of: its newest ones"
    other = ring.part(999)
    unknown.close()
    unknown.close()
    assert not unknown.admits(1)
    assert unknown.admits(500)
    assert ring.block_sizes == {SIZE, 999}
    other.close()
    registered.close()
    assert ring.block_sizes == frozenset()


def test_signed_names() -> None:
    sink = StreamSink(SIZE, key=KEY, signed=True)
    keys = [hashlib.sha256(bytes([number])).digest() for number in range(16)]
    sink.on_stored(0, StoredBlocks(ReuseScope(), None, keys, np.zeros((16, SIZE), np.int32), 0, np.zeros(16, np.uint8)))
    [event] = sink.take()
    names = KEY.names(keys)
    assert event.block_hashes == names.view(np.int64).tolist()  # type: ignore[union-attr]
    assert min(event.block_hashes) < 0  # type: ignore[union-attr]
    [record] = decode_batch(encoded([event]), KeyRing([KEY]).part()).records
    assert record.token_ids.tolist() == disguised(names, SIZE).tolist()  # type: ignore[union-attr]


def test_digests_count_names_in_one_scope() -> None:
    published = PublishedSet((None, KEY.salt))
    sink = StreamSink(SIZE, key=KEY, published=published)
    sink.on_created(("gpu", "host"), [(9, 9)])
    keys = tell(sink, TOKENS.tolist()) + tell(sink, TOKENS.tolist(), ReuseScope(lora_id=1))
    published.commit(0)
    device = DigestKey(Tier.DEVICE, None, KEY.salt)
    assert published.answer().digests == {device: digest_of(KEY.names(keys).tolist())}
    sink.on_moved(0, keys[:2], 0, 1)
    sink.on_removed(0, keys[2:], 0)
    published.commit(1)
    host = DigestKey(Tier.HOST, None, KEY.salt)
    assert published.answer().digests == {host: digest_of(KEY.names(keys[:2]).tolist())}


PROMPTS = st.lists(st.integers(0, 1), min_size=SIZE, max_size=5 * SIZE)
SCOPES = st.sampled_from([(None, None), (1, None), (None, "salt"), (1, "salt")])


@settings(deadline=None)
@given(st.lists(st.tuples(PROMPTS, SCOPES, st.booleans(), st.booleans()), max_size=8), PROMPTS, SCOPES)
def test_answers_are_those_of_a_plain_stream(
    told: list[tuple[list[int], tuple[int | None, str | None], bool, bool]],
    asked: list[int],
    scope: tuple[int | None, str | None],
) -> None:
    """The same histories through a plain and a keyed stream: every prompt has the same answer, tier by tier."""
    ring = KeyRing([StreamKey(bytes(32)), KEY])  # the publisher's key need not be the first
    answers = []
    for key in (None, KEY):
        sink = StreamSink(SIZE, key=key)
        sink.on_created(("gpu", "host"), [(9, 9)])
        index = PrefixIndex()
        index.add(Source("w"), model="m")
        held: dict[bytes, int] = {}
        for prompt, (lora, salt), moves, leaves in told:
            of = ReuseScope(lora, None if salt is None else salt_id(salt))
            keys = v2_block_keys(np.array(prompt, np.int32), SIZE, v2_root(of))
            new = [number for number, each in enumerate(keys) if each not in held]
            if new:
                first = new[0]
                rows = np.array(prompt[: len(keys) * SIZE], np.int32).reshape(-1, SIZE)[first:]
                parent = keys[first - 1] if first else None
                sink.on_stored(0, StoredBlocks(of, parent, keys[first:], rows, 0, np.zeros(len(rows), np.uint8)))
                held.update(dict.fromkeys(keys[first:], 0))
            if moves and held[keys[-1]] == 0:
                sink.on_moved(0, keys[-1:], 0, 1)
                held[keys[-1]] = 1
            if leaves and new and new[-1] == len(keys) - 1:
                sink.on_removed(0, keys[-1:], held.pop(keys[-1]))
            batch = decode_batch(encoded(sink.take()), ring.part())
            assert not batch.rejected
            index.apply(Source("w"), batch.records)
        lora, salt = scope
        lookup = lookup_of(index, ring)
        answers.append(lookup(np.array(asked, np.int32), model="m", lora=lora, cache_salt=salt))
    assert answers[0] == answers[1]


def test_a_mixed_fleet_is_answered_in_one() -> None:
    """Plain workers, and workers of an old and a new key, during a rotation."""
    new = StreamKey(bytes(32))
    ring = KeyRing([new, KEY])
    index = PrefixIndex()
    for name, key in (("plain", None), ("old", KEY), ("new", new)):
        index.add(Source(name), model="m")
        sink = StreamSink(SIZE, key=key)
        tell(sink, TOKENS.tolist())
        index.apply(Source(name), decode_batch(encoded(sink.take()), ring.part()).records)
    found = KeyedLookup(index, ring).match(TOKENS, model="m")
    assert {match.instance_id: match.device_tokens for match in found} == {"plain": 12, "old": 12, "new": 12}
    assert len(KeyedLookup(index, KeyRing([new])).match(TOKENS, model="m")) == 1, "sizes of a ring are learnt"
    assert len(lookup_of(index, None)(TOKENS, model="m")) == 1
    assert KeyedLookup(index, ring).match(TOKENS, model="m", block_size=SIZE + 1) == []
    assert [m.instance_id for m in KeyedLookup(index, ring).match(TOKENS, model="m", lora="by name")] == []


def test_of_two_answers_about_a_worker_the_longer_counts() -> None:
    """What is predicted of it is plain, and what it tells is keyed."""
    ring, index = KeyRing([KEY]), PrefixIndex()
    index.add(Source("w"), model="m")
    plain, keyed = StreamSink(SIZE), StreamSink(SIZE, key=KEY)
    tell(plain, TOKENS.tolist()[:4])
    tell(keyed, TOKENS.tolist()[:8])
    for sink in (plain, keyed):
        index.apply(Source("w"), decode_batch(encoded(sink.take()), ring.part()).records)
    [match] = KeyedLookup(index, ring).match(TOKENS, model="m")
    assert match.device_tokens == 8


def test_no_request_can_have_the_salt_of_keyed_blocks() -> None:
    """A client that sends the salt text itself is not answered with keyed blocks for its plain tokens."""
    ring, index = KeyRing([KEY]), PrefixIndex()
    index.add(Source("w"), model="m")
    sink = StreamSink(SIZE, key=KEY)
    tell(sink, TOKENS.tolist())
    index.apply(Source("w"), decode_batch(encoded(sink.take()), ring.part()).records)
    assert KeyedLookup(index, ring).match(TOKENS, model="m", cache_salt=KEY.salt) == []


def test_files_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    first, second = generate_key(), generate_key()
    file.write_text(
        f"# the new one\n{first}\n{second.upper()}  # until the last worker has been restarted\n\n{first}\n"
    )
    file.chmod(0o600)
    ring = KeyRing.load(file, "x")
    assert ring is not None
    assert [key.key_id for key in ring] == [StreamKey(bytes.fromhex(key)).key_id for key in (first, second)]
    assert ring.first.key_id in ring
    assert KeyRing.load(None, "x") is None


@pytest.mark.parametrize("text", ["", "# nothing\n", "abc\n", "g" * 64, f"{'a' * 64}\nshort\n", "ü"])
def test_a_file_that_holds_no_keys_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="kvmesh keys events FILE"):
        KeyRing.load(file, "events.key_file")


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(generate_key())
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        KeyRing.load(file, "events.key_file")
    with pytest.raises(ConfigError, match="No such file"):
        KeyRing.load(tmp_path / "missing", "events.key_file")


def test_moves_and_the_whole_state_are_keyed_too() -> None:
    sink, live = StreamSink(SIZE, key=KEY), LiveBlocks()
    sink.on_created(("gpu", "host"), [(9, 9)])
    keys = tell(sink, TOKENS.tolist())
    sink.on_moved(0, keys[1:2], 0, 1)
    sink.on_removed(0, keys[2:], 0)
    told = live.take_in(sink.take())
    assert [type(event).__name__ for event in told] == [
        "KeyedBlocksStored",
        "KeyedBlocksStored",
        "BlockRemoved",
    ]
    index = PrefixIndex()
    index.add(Source("w"), model="m")
    batch = decode_batch(encoded(list(live.events())), KeyRing([KEY]).part())
    assert not batch.rejected
    index.apply(Source("w"), batch.records)
    ring = KeyRing([KEY])
    ring.expect(SIZE)
    [match] = KeyedLookup(index, ring).match(TOKENS, model="m")
    assert (match.device_tokens, match.host_tokens) == (SIZE, 2 * SIZE)


def test_what_is_readable() -> None:
    ring = KeyRing([KEY])
    assert all(is_readable(salt, keys) for salt in (None, "", "5") for keys in (None, ring))
    assert is_readable(KEY.salt, ring)
    assert not is_readable(KEY.salt, None)
    assert not is_readable(StreamKey(bytes(32)).salt, ring)
