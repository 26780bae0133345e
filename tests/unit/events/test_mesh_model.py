"""Workers of every dialect, whose streams lose, repeat and swap messages and begin anew, against what they really hold.

After each resync the index holds of every worker exactly what that has told and keeps, and at no time before more than
what it once held in this life; at the end, when all is taken back, no block is left. What lies between is the product's
own: decoding, order and replays, owners of Mooncake's hashes, the index.
"""

from __future__ import annotations

from collections.abc import Coroutine
from hashlib import blake2b
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
import zmq
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvmesh.events.encoding import encode_batch
from kvmesh.events.feeds import Feed, Gate
from kvmesh.events.feeds.following import Following
from kvmesh.events.index import PrefixIndex, Source
from kvmesh.events.live import LiveBlocks
from kvmesh.events.ordered import OrderedStream
from kvmesh.events.records import Tier
from kvmesh.events.replay import KeptBatch
from kvmesh.hashing import local_hashes, sequence_hashes
from kvmesh.net.clock import SystemClock
from kvmesh.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KvEvent

BLOCK = 2
MEDIA = ("GPU", "CPU", "DISK")
NOBODYS = 2**64 - 2
"""A hash that no block has."""


class Owner(NamedTuple):
    """Of a sequence."""

    lora: str | int | None = None
    salt: str | None = None


class Place(NamedTuple):
    """A block: whose it is, and the numbers of its blocks from the start of its sequence."""

    owner: Owner
    chain: tuple[int, ...]

    @property
    def parent(self) -> Place | None:
        return Place(self.owner, self.chain[:-1]) if len(self.chain) > 1 else None

    @property
    def tokens(self) -> list[int]:
        """Its own."""
        return [self.chain[-1]] * BLOCK

    @property
    def prefix_hash(self) -> int:
        tokens = np.repeat(np.array(self.chain, np.int32), BLOCK)
        return int(sequence_hashes(local_hashes(tokens, BLOCK))[-1])


class Dialect:
    """How a worker writes; hashes cover all that a block is."""

    owners: tuple[Owner, ...] = (Owner(), Owner(salt="s"), Owner(lora="x"), Owner("x", "s"))
    state = False
    """Whether it can tell what it no longer keeps."""

    def hash_of(self, place: Place) -> int:
        return int.from_bytes(blake2b(repr(place).encode(), digest_size=8).digest(), "big")

    def stored(self, place: Place, tier: Tier) -> Any:
        raise NotImplementedError

    def removed(self, place: Place, tier: Tier) -> Any:
        raise NotImplementedError

    def cleared(self) -> Any:
        raise NotImplementedError

    def payload(self, events: list[Any]) -> bytes:
        return msgspec.msgpack.encode([0.0, events, 0])

    def parent_of(self, place: Place) -> int | None:
        return None if place.parent is None else self.hash_of(place.parent)

    def nothing(self) -> Any:
        """An event that changes nothing."""
        return {"type": "BlockRemoved", "block_hashes": [NOBODYS]}


class Map(Dialect):
    def stored(self, place: Place, tier: Tier) -> Any:
        salted = place.owner.salt is not None and place.parent is None
        return {
            "type": "BlockStored",
            "block_hashes": [self.hash_of(place)],
            "parent_block_hash": self.parent_of(place),
            "token_ids": place.tokens,
            "block_size": BLOCK,
            "lora_name": place.owner.lora,
            "medium": MEDIA[tier],
            "extra_keys": [[place.owner.salt]] if salted else [None],
        }

    def removed(self, place: Place, tier: Tier) -> Any:
        return {"type": "BlockRemoved", "block_hashes": [self.hash_of(place)], "medium": MEDIA[tier]}

    def cleared(self) -> Any:
        return {"type": "AllBlocksCleared"}


class Array(Map):
    def hash_of(self, place: Place) -> int:
        number = super().hash_of(place)
        return number - 2**64 if number >= 2**63 else number

    def stored(self, place: Place, tier: Tier) -> Any:
        event = super().stored(place, tier)
        names = ("block_hashes", "parent_block_hash", "token_ids", "block_size")
        return [event["type"], *map(event.get, names), None, event["medium"], event["lora_name"], event["extra_keys"]]

    def removed(self, place: Place, tier: Tier) -> Any:
        return ["BlockRemoved", [self.hash_of(place)], MEDIA[tier]]

    def cleared(self) -> Any:
        return ["AllBlocksCleared"]


class SGLang(Array):
    owners = (Owner(), Owner(salt="s"))

    def stored(self, place: Place, tier: Tier) -> Any:
        event = super().stored(place, tier)[:7]
        return [*event, {"cache_salt": place.owner.salt}] if place.owner.salt else event


class Mooncake(Dialect):
    """Hashes are of tokens alone, and every event says whose they are."""

    def hash_of(self, place: Place) -> int:
        return place.prefix_hash

    def stored(self, place: Place, tier: Tier) -> Any:
        return self._event("stored", place, tier) | {"token_ids": place.tokens, "block_size": BLOCK}

    def removed(self, place: Place, tier: Tier) -> Any:
        return self._event("removed", place, tier)

    def cleared(self) -> Any:
        return {"event_type": "cleared"}

    def _event(self, kind: str, place: Place, tier: Tier) -> dict[str, Any]:
        return {
            "event_type": kind,
            "seq_hashes": [self.hash_of(place)],
            "parent_hash": self.parent_of(place),
            "medium": MEDIA[tier].lower(),
            "lora_name": place.owner.lora or "",
            "additional_salt": place.owner.salt or "",
            "model_name": "m",
            "tenant_id": "default",
        }


class KVMesh(Dialect):
    """What its publisher sends, which can also tell its state."""

    owners = (Owner(), Owner(salt="77"), Owner(lora=1))
    state = True

    def stored(self, place: Place, tier: Tier) -> KvEvent:
        salt = place.owner.salt if place.parent is None else None
        return BlockStored(
            block_hashes=[self.hash_of(place)],
            parent_block_hash=self.parent_of(place),
            token_ids=place.tokens,
            block_size=BLOCK,
            lora_id=place.owner.lora if isinstance(place.owner.lora, int) else None,
            medium=MEDIA[tier],
            extra_keys=msgspec.UNSET if salt is None else [[salt]],
        )

    def removed(self, place: Place, tier: Tier) -> KvEvent:
        return BlockRemoved(block_hashes=[self.hash_of(place)], medium=MEDIA[tier])

    def cleared(self) -> KvEvent:
        return AllBlocksCleared()

    def payload(self, events: list[Any]) -> bytes:
        return encode_batch(EventBatch(0.0, events, 0))

    def nothing(self) -> KvEvent:
        return BlockRemoved(block_hashes=[NOBODYS])


DIALECTS: tuple[Dialect, ...] = (Map(), Array(), SGLang(), Mooncake(), KVMesh())


class HandClock(SystemClock):
    """Stands still unless a test moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s


class Answer:
    """A replay that is there at once."""

    def __init__(self, messages: list[KeptBatch]) -> None:
        self._messages = iter(messages)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    async def next(self) -> KeptBatch | None:
        return next(self._messages, None)


class Worker:
    """An engine with its publisher, the messages on their way, and what follows them."""

    def __init__(
        self, name: str, dialect: Dialect, index: PrefixIndex, clock: HandClock, context: zmq.Context[Any]
    ) -> None:
        self.source, self.dialect, self._index = Source(name), dialect, index
        self.held: set[tuple[Tier, Place]] = set()
        self.ever: set[tuple[Tier, Place]] = set()
        """In this life of it, and the one that its reader has not heard the end of."""
        self.kept: dict[int, bytes] = {}
        self.whole = True
        """Whether nothing of this life has been forgotten that no state would tell."""
        self.waiting: list[KeptBatch] = []
        self._next = 0
        self._live = LiveBlocks()
        index.add(self.source, model="m")
        feed = Feed(self.source, "m", "tcp://127.0.0.1:1")
        self._following = Following(feed, index, context, clock, gate=Gate(clock), tidy=lambda: None)
        self.ordered = OrderedStream(name, self, clock=clock, with_state=dialect.state)
        self.ordered.deliver = self._following._take
        at_once(self.ordered.opened(self._discard))

    def ask(self, start: int, *, with_state: bool = False) -> Answer:
        """As a publisher answers."""
        if not with_state:
            return Answer([KeptBatch(number, b"", data) for number, data in self.kept.items() if number >= start])
        last = self._next - 1
        if last < 0:
            return Answer([])
        state = KeptBatch(last, b"", encode_batch(EventBatch(0.0, list(self._live.events()), 0)))
        return Answer([state] + ([KeptBatch(last, b"", self.kept[last])] if last in self.kept else []))

    def step(self, changes: list[tuple[str, int, int, int]], *, sent: bool) -> None:
        """One batch, which is kept; it need not arrive."""
        events = [event for change in changes for event in self._change(*change)]
        self._tell(events or [self.dialect.nothing()], sent=sent)

    def _change(self, kind: str, owner: int, pick: int, tier: int) -> list[Any]:
        dialect, held = self.dialect, sorted(self.held, key=repr)
        whose, where = dialect.owners[owner % len(dialect.owners)], Tier(tier)
        if kind == "clear" and pick % 4 == 0:
            self.held.clear()
            return [dialect.cleared()]
        if kind == "store":
            above = [place for at, place in held if place.owner == whose] if pick % 3 else []
            chain = above[pick % len(above)].chain if above else ()
            place = Place(whose, (*chain[:4], pick % 2))
            # Engines store a block below one that they hold, in whichever tier, or at the start of a sequence.
            self._hold(where, place)
            return [dialect.stored(place, where)]
        if not held:
            return []
        at, place = held[pick % len(held)]
        if kind == "move" and at != where:
            self._hold(where, place)
            self.held.discard((at, place))
            moved = [dialect.stored(place, where)] if self._above_is_known(place) else []
            if not moved:
                self.held.discard((where, place))
            return [*moved, dialect.removed(place, at)]
        gone = [(at, place)]
        if dialect.state and not any(held == place and other != at for other, held in self.held):
            # Its state tells nothing of a block that is gone, so what continues that would have no place.
            below = len(place.chain)
            gone += [
                each
                for each in held
                if each[1] != place and each[1].chain[:below] == place.chain and each[1].owner == place.owner
            ]
        self.held.difference_update(gone)
        return [dialect.removed(place, at) for at, place in gone]

    def _above_is_known(self, place: Place) -> bool:
        """Whether its parent is held: without it nobody could place the block anew."""
        return place.parent is None or any(held == place.parent for _, held in self.held)

    def _hold(self, tier: Tier, place: Place) -> None:
        self.held.add((tier, place))
        self.ever.add((tier, place))

    def _tell(self, events: list[Any], *, sent: bool) -> None:
        if self.dialect.state:
            events = self._live.take_in(events)
        message = KeptBatch(self._next, b"", self.dialect.payload(events))
        self._next += 1
        self.kept[message.sequence] = message.payload
        if sent:
            self.waiting.append(message)

    def repeat(self, pick: int) -> None:
        if self.waiting:
            self.waiting.append(self.waiting[pick % len(self.waiting)])

    def swap(self) -> None:
        self.waiting[-2:] = self.waiting[:-3:-1]

    def forget(self, count: int) -> None:
        """The oldest batches, never the last one."""
        gone = list(self.kept)[: min(count, len(self.kept) - 1)]
        for number in gone:
            del self.kept[number]
        self.whole = self.whole and (self.dialect.state or not gone)

    def break_off(self) -> None:
        """What is on its way is lost."""
        self.ordered.closed()
        at_once(self.ordered.opened(self._discard))

    def begin_anew(self) -> None:
        """Another life: its connection breaks, and nothing of the old one is held."""
        self.ordered.closed()
        self.waiting.clear()
        self.held.clear()
        self.kept, self._next, self.whole, self._live = {}, 0, True, LiveBlocks()
        self._tell([self.dialect.nothing()], sent=False)
        at_once(self.ordered.opened(self._discard))

    def deliver(self, count: int) -> None:
        for message in self.waiting[:count]:
            at_once(self.ordered.take_live(message))
        del self.waiting[:count]

    def settle(self) -> None:
        """Everything arrives, and a message behind it that shows what was lost."""
        self._tell([self.dialect.nothing()], sent=True)
        self.deliver(len(self.waiting))
        at_once(self.ordered.check())

    def claimed(self) -> set[tuple[Any, ...]]:
        """What the index has of it."""
        return {
            (block.tier, block.scope.lora, block.scope.salt, block.prefix_hash)
            for block in self._index.dump(self.source)
        }

    def _discard(self) -> int:
        count = len(self.waiting)
        self.waiting.clear()
        return count


def told(places: set[tuple[Tier, Place]]) -> set[tuple[Any, ...]]:
    """As the index has them."""
    return {(tier, *place.owner, place.prefix_hash) for tier, place in places}


def at_once(work: Coroutine[Any, Any, object]) -> None:
    """Run what never waits."""
    try:
        work.send(None)
    except StopIteration:
        return
    work.close()
    raise AssertionError("it waits")


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "store", "remove", "move", "clear"]),
        st.integers(0, 3),
        st.integers(0, 30),
        st.sampled_from([0, 0, 0, 1, 2]),
    ),
    min_size=1,
    max_size=4,
)
WORKERS = st.integers(0, len(DIALECTS) - 1)


class Mesh(RuleBasedStateMachine):
    """One worker of each dialect, read into one index."""

    @initialize()
    def begin(self) -> None:
        self.clock, self.index = HandClock(), PrefixIndex()
        self.context: zmq.Context[Any] = zmq.Context()
        self.workers = [
            Worker(type(dialect).__name__, dialect, self.index, self.clock, self.context) for dialect in DIALECTS
        ]

    @rule(worker=WORKERS, changes=CHANGES, sent=st.sampled_from([True, True, True, False]))
    def step(self, worker: int, changes: list[tuple[str, int, int, int]], *, sent: bool) -> None:
        self.workers[worker].step(changes, sent=sent)

    @rule(worker=WORKERS, count=st.integers(1, 4))
    def deliver(self, worker: int, count: int) -> None:
        self.workers[worker].deliver(count)

    @rule(worker=WORKERS, pick=st.integers(0, 9))
    def repeat(self, worker: int, pick: int) -> None:
        self.workers[worker].repeat(pick)

    @rule(worker=WORKERS)
    def swap(self, worker: int) -> None:
        self.workers[worker].swap()

    @rule(worker=WORKERS, count=st.integers(1, 3))
    def forget(self, worker: int, count: int) -> None:
        self.workers[worker].forget(count)

    @rule(worker=WORKERS, how=st.sampled_from(["break off", "begin anew", "resync"]))
    def interrupt(self, worker: int, how: str) -> None:
        one = self.workers[worker]
        if how == "break off":
            one.break_off()
        elif how == "begin anew":
            one.begin_anew()
        else:
            at_once(one.ordered.resync("the test wants it"))

    @rule()
    def settle(self) -> None:
        self.clock.now_s += 1000.0
        for worker in self.workers:
            worker.settle()
            claimed, held = worker.claimed(), told(worker.held)
            if worker.whole:
                assert claimed == held, worker.source
            assert claimed <= held, worker.source

    @invariant()
    def nothing_is_claimed_that_never_was(self) -> None:
        if hasattr(self, "workers"):
            for worker in self.workers:
                assert worker.claimed() <= told(worker.ever), worker.source

    def teardown(self) -> None:
        if not hasattr(self, "workers"):
            return
        with self.context:
            self.settle()
            for worker in self.workers:
                worker.step([("remove", 0, 0, 0)] * len(worker.held), sent=True)
                assert not worker.held
            self.settle()
            while self.index.reclaim():
                pass
            assert self.index.statistics().blocks == 0
            assert self.index.statistics().residencies == 0


TestMesh = Mesh.TestCase
TestMesh.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
