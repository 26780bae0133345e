"""Removals that do not name all that their blocks were stored with: no block stays claimed that may have gone."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from kvmesh.events.decoding import decode_batch
from kvmesh.events.feeds import Feed, Feeds
from kvmesh.events.index import PrefixIndex, Source
from kvmesh.events.items import Batch
from kvmesh.events.owners import MAX_NAME_CHARS, MAX_OWNERS, MAX_REMOVED, Owners, mark_of
from kvmesh.events.records import Cleared, Owner, RecordBatch, Removed, Tier
from kvmesh.events.subscriber import EventSubscriber

NAMES = ("model_name", "tenant_id", "lora_name", "additional_salt")
NOBODYS = {"lora_name": "", "additional_salt": ""}
SOURCE = Source("store")


def batch(*events: Any) -> RecordBatch:
    decoded = decode_batch(msgspec.msgpack.encode([0.0, events, None]))
    assert not decoded.rejected
    return decoded


def stored(number: int, **names: str | None) -> dict[str, Any]:
    return {"event_type": "stored", "seq_hashes": [number], "token_ids": [number] * 2, "block_size": 2} | names


def removed(number: int, **names: str | None) -> dict[str, Any]:
    return {"event_type": "removed", "seq_hashes": [number]} | names


def moved(number: int, **names: str | None) -> dict[str, Any]:
    return {"event_type": "stored", "seq_hashes": [number], "medium": "cpu"} | names


class Held:
    """What the index has of a publisher."""

    def __init__(self, *, unsure: bool = False) -> None:
        self.index, self.owners = PrefixIndex(), Owners(Owner("m", "default", "", ""), unsure=unsure)
        self.index.add(SOURCE, model="m")

    def tell(self, *events: Any) -> None:
        self.index.apply(SOURCE, self.owners.resolve(batch(*events)).records)

    def finds(self, number: int, **names: str | None) -> bool:
        matches = self.index.match(
            np.array([number] * 2, np.int32),
            model=names.get("model_name") or "m",
            tenant=names.get("tenant_id") or "default",
            lora=names.get("lora_name") or None,
            cache_salt=names.get("additional_salt") or None,
        )
        return bool(matches)

    def in_host(self, number: int, **names: str | None) -> bool:
        """Whether the block is in host memory, on the device or not."""
        blocks = [block for block in self.index.dump(SOURCE) if block.tier is Tier.HOST]
        return any(
            (block.scope.model, block.scope.tenant, block.scope.lora or "", block.scope.salt or "")
            == (
                names.get("model_name") or "m",
                names.get("tenant_id") or "default",
                names.get("lora_name") or "",
                names.get("additional_salt") or "",
            )
            for block in blocks
        )


@pytest.mark.parametrize("named", [(), NAMES[:1], NAMES[:2], NAMES])
def test_a_removal_takes_from_everyone_that_it_may_mean(named: tuple[str, ...]) -> None:
    held = Held()
    owner = dict.fromkeys(NAMES, "x")
    other = dict.fromkeys(NAMES, "y")
    held.tell(stored(1, **owner), stored(1, **other), stored(2, **owner))
    held.tell(removed(1, **dict.fromkeys(named, "x")))
    assert not held.finds(1, **owner)
    assert held.finds(1, **other) == bool(named)
    assert held.finds(2, **owner)


def test_a_block_that_an_engine_told_in_its_own_dialect_goes_with_the_masters_removal() -> None:
    held = Held()
    own = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1, 1], "block_size": 2}
    held.tell(own)
    held.tell(removed(1, model_name="m", tenant_id="acme"))
    assert not held.finds(1)


OWN = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1, 1], "block_size": 2}


@pytest.mark.parametrize("names", [{}, {"model_name": "m"}, {"model_name": "m", "tenant_id": "default"} | NOBODYS])
def test_a_block_that_an_engine_told_in_its_own_dialect_moves_with_the_masters_word(names: dict[str, str]) -> None:
    held = Held()
    held.tell(OWN, moved(1, **names))
    assert held.in_host(1)
    held.tell(removed(1, medium="cpu", **names))
    assert not held.in_host(1)
    assert held.finds(1)


@pytest.mark.parametrize("name", NAMES)
def test_nobody_moves_what_is_anothers(name: str) -> None:
    """Nor is it guessed whose a block is where both have one of this hash."""
    held = Held()
    held.tell(OWN, moved(1, **{name: "x"}))
    assert not held.in_host(1)
    held.tell(stored(1, **{name: "x"}), moved(1, **{name: "x"}))
    assert held.in_host(1, **{name: "x"})
    assert not held.in_host(1)


def test_after_a_snapshot_no_block_moves_by_a_guess() -> None:
    held = Held(unsure=True)
    held.tell(OWN, moved(1, model_name="m"))
    assert not held.in_host(1)
    assert held.finds(1)


def meant(names: dict[str, str | None], of: tuple[str, ...]) -> bool:
    """Whether a removal may mean a block of an owner."""
    fits = [names[name] in (None, part) for name, part in zip(NAMES, of, strict=True)]
    return not any(of) or all(one or (at < 2 and not of[at]) for at, one in enumerate(fits))


owners = st.fixed_dictionaries({name: st.sampled_from([None, "", "x", "y"]) for name in NAMES})


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3), owners), max_size=20))
def test_nothing_is_claimed_that_may_have_gone(steps: list[tuple[bool, int, dict[str, str | None]]]) -> None:
    """And what nobody can have meant stays."""
    held, model = Held(), set[tuple[int, tuple[str, ...]]]()
    for stores, number, names in steps:
        if stores:
            held.tell(stored(number, **names))
            model.add((number, tuple(names[name] or "" for name in NAMES)))
        else:
            held.tell(removed(number, **names))
            model = {(one, of) for one, of in model if one != number or not meant(names, of)}
    assert held.index.num_held(SOURCE) == len(model)
    for number, of in model:
        assert held.finds(number, **dict(zip(NAMES, of, strict=True)))


def test_who_is_forgotten_is_taken_from_with_everyone() -> None:
    held = Held()
    first = {"additional_salt": "first"}
    held.tell(stored(1, **first))
    for number in range(MAX_OWNERS):
        held.tell(stored(2, additional_salt=str(number)))
    held.tell(removed(3, **dict.fromkeys(NAMES, "")))
    assert held.finds(1, **first), "that one says whose it is"
    held.tell(removed(1))
    assert held.index.num_held(SOURCE) == 0
    held.tell(stored(1, **first), stored(2, **first), removed(1))
    assert (held.finds(1, **first), held.finds(2, **first)) == (False, True)


def test_an_owner_with_a_long_name_is_not_remembered() -> None:
    held, long = Held(), {"additional_salt": "x" * (MAX_NAME_CHARS + 1)}
    held.tell(stored(1, **long), stored(2, **long))
    held.tell(removed(2, **{"model_name": "", "tenant_id": "", "lora_name": ""} | long))
    assert held.finds(1, **long)
    held.tell(removed(1))
    assert not held.finds(1, **long)


def test_a_removal_has_a_bound() -> None:
    names = Owners()
    names.resolve(batch(*(stored(1, additional_salt=str(number)) for number in range(MAX_OWNERS))))
    few = names.resolve(batch({"event_type": "removed", "seq_hashes": list(range(1, 500))})).records
    assert [type(record) for record in few] == [Removed]
    count = MAX_REMOVED // MAX_OWNERS + 1
    many = names.resolve(batch({"event_type": "removed", "seq_hashes": list(range(1, count + 1))})).records
    assert many == [Cleared()]


def test_marks_differ_by_what_is_named() -> None:
    assert mark_of(Owner(None, "", None, "")) == 0
    assert len({mark_of(Owner(*("x" if at == one else None for at in range(4)))) for one in range(5)}) == 5


async def test_what_is_followed_is_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    salt = {"additional_salt": "s"}

    async def run(subscriber: EventSubscriber, deliver: Any) -> None:
        for sequence, events in enumerate([stored(1, **salt), stored(2, **salt), removed(1)]):
            deliver(Batch(sequence, "", batch(events), replayed=False))
        await anyio.sleep_forever()

    monkeypatch.setattr(EventSubscriber, "run", run)
    index = PrefixIndex()
    with zmq.Context() as context:
        async with anyio.create_task_group() as tasks:
            Feeds(index, tasks, context).follow(Feed(SOURCE, "m", "tcp://127.0.0.1:1"))
            await until(lambda: index.num_held(SOURCE) == 1)
            tasks.cancel_scope.cancel()


def test_after_a_snapshot_it_is_not_known_who_had_what() -> None:
    held = Held(unsure=True)
    held.index.apply(SOURCE, batch(stored(1, additional_salt="s")).records)  # by the process before this one
    held.tell(removed(1))
    assert not held.finds(1, additional_salt="s")
