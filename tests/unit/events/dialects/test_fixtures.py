"""Bytes of every engine, read from files: whatever they are written in, the index is the same (§2.3, §2.4).

Each file is one scenario as one engine writes it; ``tests/data/events/README.md`` says where the bytes are from.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from event_scenarios import BLOCK, SCENARIOS, Event, Removal, run

from kvmesh.events.decoding import decode_batch, decode_by_dialects
from kvmesh.events.index import PrefixIndex, Source
from kvmesh.events.index.index import DumpedBlock
from kvmesh.events.records import Cleared, EventRecord, Removed, Stored, Tier

FOLDER = Path(__file__).parents[3] / "data" / "events"
SOURCE = Source("engine")
TIERS = {"device": Tier.DEVICE, "host": Tier.HOST}


class Fixture(NamedTuple):
    written_by: str
    scenario: str
    dialect: str
    payloads: list[bytes]


def read(path: Path) -> Fixture:
    head, *batches = path.read_text().split("\n\n")
    notes = dict(line.removeprefix("# ").split(": ", 1) for line in head.splitlines())
    return Fixture(notes["written by"], notes["scenario"], notes["dialect"], [bytes.fromhex(text) for text in batches])


FIXTURES = {path.stem: read(path) for path in sorted(FOLDER.glob("*.hex"))}


def record(event: Event) -> EventRecord:
    """What a scenario's event is, as the index wants it."""
    if event is None:
        return Cleared()
    if isinstance(event, Removal):
        return Removed(hashes=event.hashes, tier=TIERS[event.tier], group=event.group)
    images = [[list(image) for image in block] or None for block in event.images]
    return Stored(
        hashes=event.hashes,
        parent=event.parent,
        token_ids=np.array(event.tokens, np.int32),
        block_size=BLOCK,
        lookahead=event.lookahead,
        tier=TIERS[event.tier],
        lora=event.lora_name or event.lora_id,
        salt=event.salt,
        extra_keys=images or None,
        group=event.group,
        kind=event.kind,
    )


def index_of(batches: Iterable[Iterable[EventRecord]]) -> PrefixIndex:
    index = PrefixIndex()
    index.add(SOURCE, model="m")
    for records in batches:
        index.apply(SOURCE, records)
    return index


def state(index: PrefixIndex) -> set[DumpedBlock]:
    return set(index.dump(SOURCE))


def expected(scenario: str) -> set[DumpedBlock]:
    return state(index_of([record(event) for event in batch] for batch in SCENARIOS[scenario]))


@pytest.mark.parametrize("name", FIXTURES)
def test_the_index_is_the_same_whatever_engine_wrote_the_bytes(name: str) -> None:
    fixture = FIXTURES[name]
    for decode in (decode_batch, decode_by_dialects):  # the native reader of plain events, and without it
        batches = [decode(payload) for payload in fixture.payloads]
        assert [batch.rejected for batch in batches] == [{}] * len(batches)
        assert fixture.dialect in batches[0].dialects
        found = state(index_of(batch.records for batch in batches))
        assert found
        assert found == expected(fixture.scenario)


def test_every_scenario_is_written_by_several_engines_and_every_note_says_by_whom() -> None:
    writers = {
        scenario: {name.rsplit(".", 1)[0] for name in FIXTURES if name.endswith(f".{scenario}")}
        for scenario in SCENARIOS
    }
    assert all(len(names) >= 2 for names in writers.values()), writers
    assert len({name for names in writers.values() for name in names}) >= 14
    assert all(fixture.written_by for fixture in FIXTURES.values())


@pytest.mark.parametrize("seed", range(4))
def test_one_stream_may_mix_them_all(seed: int) -> None:
    """Dialects are told by each event, not by its stream or its batch: engines are updated under a running index."""
    rng = random.Random(seed)
    for scenario in ("plain", "cleared", "tiers"):
        # Hashes are the same numbers in all of them: a removal written by one finds what another has stored. Only a
        # store of several owners says with each hash whose it is.
        sources = [
            fixture.payloads
            for fixture in FIXTURES.values()
            if fixture.scenario == scenario and fixture.dialect != "mooncake"
        ]
        mixed = []
        for number, batch in enumerate(SCENARIOS[scenario]):
            chosen = [_events(rng.choice(sources)[number])[place] for place in range(len(batch))]
            mixed.append(decode_batch(msgspec.msgpack.encode([0.0, chosen, 0])))
        assert state(index_of(batch.records for batch in mixed)) == expected(scenario)


def _events(payload: bytes) -> list[msgspec.Raw]:
    envelope = msgspec.msgpack.decode(payload)
    raw = msgspec.msgpack.decode(
        payload, type=dict[str, msgspec.Raw] if isinstance(envelope, dict) else list[msgspec.Raw]
    )
    return msgspec.msgpack.decode(raw["events"] if isinstance(raw, dict) else raw[1], type=list[msgspec.Raw])


def matched(scenario: str, tokens: list[int], **request: object) -> int:
    """Tokens of a prompt that are held on the device."""
    index = index_of([record(event) for event in batch] for batch in SCENARIOS[scenario])
    matches = index.match(np.array(tokens, np.int32), model="m", **request)
    return max((match.device_tokens for match in matches), default=0)


def test_what_the_scenarios_mean_to_a_prompt() -> None:
    assert matched("plain", run(0, 16)) == 12
    assert matched("plain", [*run(0, 4), *run(100, 4)]) == 8
    assert matched("cleared", run(0, 16)) == 0
    assert matched("tiers", run(0, 8)) == 4
    assert matched("salted", run(0, 12), cache_salt="tenant-a") == 12
    assert matched("salted", run(0, 12)) == 4
    assert matched("adapter", run(0, 12), lora="sql") == 12
    assert matched("adapter", run(0, 12)) == 0
    assert matched("numbered_adapter", run(0, 12), lora=7) == 8
    assert matched("numbered_adapter", run(0, 12)) == 4
    assert matched("groups", run(0, 8)) == 4


def test_equal_tokens_with_different_images_share_only_what_is_before_them() -> None:
    blocks = expected("images")
    assert len(blocks) == 5
    assert matched("images", run(0, 12)) == 4, "a prompt without images matches nothing that has one"


def test_blocks_are_told_apart_by_what_follows_them() -> None:
    """EAGLE: a block counts only together with the token after it, so the prompt's last full block is never whole."""
    assert matched("lookahead", [*run(0, 8), 91, 92, 93, 94, 95]) == 12
    assert matched("lookahead", [*run(0, 8), 91]) == 8
    assert matched("lookahead", [*run(0, 8), 90]) == 4
    assert matched("lookahead", run(0, 8)) == 4
