"""Whatever happens to a stream, its reader ends up with what is kept, and never mixes lives or skips in silence.

A publisher loses, repeats, delays and drops messages, restarts behind the reader's back, forgets what it kept and
breaks off its answers, at random; the reader is asked to read anew and is started warm. Nothing here depends on how
long anything takes. The same with every interleaving chosen is in the unit tests (``test_ordered_model``).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import anyio
import pytest
from shifted_clock import ShiftedClock

ROUNDS = 100 if os.environ.get("KVMESH_SOAK") else 8
STEPS = 60
CLEARED = {"type": "AllBlocksCleared"}


class Told(NamedTuple):
    """One batch, as it was delivered."""

    life: int
    number: int
    replayed: bool


class Fate:
    """What happens to the messages of one publisher."""

    def __init__(self, rng: random.Random, publisher: Any, payload: Callable[..., bytes], clock: ShiftedClock) -> None:
        self._rng = rng
        self._publisher = publisher
        self._payload = payload
        self._clock = clock
        self.life = 0
        self.next = 0
        self.seen = -1
        """Highest number that the reader can have heard of in this life."""
        self.sent_before = 0
        """Messages that were sent before this reader subscribed."""
        self.taken = 0
        """Messages that it has worked off."""

    @property
    def waiting(self) -> int:
        """Messages on their way to the reader."""
        return int(self._publisher.sent_total) - self.sent_before - self.taken

    @property
    def kept(self) -> dict[int, bytes]:
        return dict(self._publisher.kept)

    def make(self) -> tuple[int, bytes]:
        number, self.next = self.next, self.next + 1
        return number, self._payload(CLEARED, ts=self.life * 1000.0 + number)

    async def step(self, subscriber: Any) -> None:
        rng, publisher = self._rng, self._publisher
        action = rng.choices(
            [
                "publish",
                "lose",
                "drop",
                "repeat",
                "swap",
                "restart",
                "overtake",
                "forget",
                "break",
                "mend",
                "resync",
            ],
            [40, 8, 3, 6, 4, 3, 2, 4, 2, 6, 2],
        )[0]
        match action:
            case "publish":
                self.publish()
            case "lose":
                number, data = self.make()
                publisher.kept = publisher.kept | {number: data}
            case "drop":
                self.make()
            case "repeat" if publisher.kept:
                number = rng.choice(list(publisher.kept))
                if number <= self.seen:
                    publisher.send(number, publisher.kept[number])
            case "swap":
                first, second = self.make(), self.make()
                publisher.kept = publisher.kept | dict([first, second])
                publisher.send(*second)
                publisher.send(*first)
                self.seen = second[0]
            case "restart":
                await self.settle(subscriber)
                self.life, self.next, publisher.kept = self.life + 1, 0, {}
                self.publish()
            case "overtake":
                await self.settle(subscriber)
                # Its next message must show a gap or go back: the very next number would say nothing.
                self.life, overtaken, self.next, publisher.kept = self.life + 1, self.next, 0, {}
                kept = dict(self.make() for _ in range(overtaken + 2))
                publisher.kept = kept
                self.publish()
            case "forget" if publisher.kept:  # never what was sent last
                kept_items = sorted(publisher.kept.items())
                publisher.kept = dict(kept_items[min(rng.randrange(4), len(kept_items) - 1) :])
            case "break":
                publisher.broken_after = rng.randrange(4)
            case "mend":
                publisher.broken_after = None
                self._clock.passed_s += rng.choice([0.0, 31.0, 700.0])
            case "resync":
                subscriber.resync("the test wants it")

    def meet(self, subscriber: Any) -> None:
        """Count what this reader has worked off of what it is sent from now on."""
        self.sent_before, self.taken = self._publisher.sent_total, 0
        ordered = subscriber._ordered
        take_live = ordered.take_live

        async def counted(message: Any) -> None:
            await take_live(message)
            self.taken += 1

        ordered.take_live = counted

    async def settle(self, subscriber: Any) -> None:
        """Let the reader have everything of this life: where no connection breaks, nothing else tells lives apart.

        Numbers would not do to see it: those of an earlier life may be the same.
        """
        self._publisher.broken_after = None
        patience_s = 0.5
        with anyio.fail_after(60):
            while True:
                self.publish()  # and again, should a replay have failed that nothing else would have tried anew
                patience_s *= 2
                with anyio.move_on_after(patience_s):
                    while self.waiting or subscriber.applied != self.seen:  # noqa: ASYNC110 - it has no event
                        await anyio.sleep(0.002)
                    return

    def publish(self) -> None:
        number, data = self.make()
        self._publisher.kept = self._publisher.kept | {number: data}
        self._publisher.send(number, data)
        self.seen = number


def periods(items: list[Any]) -> list[list[Told]]:
    """Batches between two resets."""
    found: list[list[Told]] = [[]]
    for item in items:
        if type(item).__name__ == "Reset":
            found.append([])
        elif type(item).__name__ == "Batch":
            life, number = divmod(int(item.records.ts), 1000)
            assert number == item.sequence
            found[-1].append(Told(life, number, item.replayed))
    return found


def check(period: list[Told]) -> None:
    assert len({told.life for told in period}) <= 1, "two lives are mixed"
    for at, told in enumerate(period[1:], 1):
        before = period[at - 1]
        assert told.number > before.number, "told twice, or out of order"
        # Only in what a publisher keeps may numbers be missing, and only where it was read from the beginning.
        assert told.number == before.number + 1 or all(earlier.replayed for earlier in period[: at + 1]), "a silent gap"


async def converge(fate: Fate, following: Any, clock: ShiftedClock) -> None:
    patience_s = 0.5
    while True:
        clock.passed_s += 1000.0  # no cooldown holds it up any more
        fate.publish()
        patience_s *= 2
        with anyio.move_on_after(patience_s):
            while not has_all(following, fate):  # noqa: ASYNC110 - what is waited for has no event
                await anyio.sleep(0.002)
            return


def has_all(following: Any, fate: Fate) -> bool:
    """Not an earlier life that has the same numbers."""
    last, kept = periods(following.items)[-1], sorted(fate.kept)
    return following.subscriber.connected and [(told.life, told.number) for told in last[-len(kept) :]] == [
        (fate.life, number) for number in kept
    ]


@pytest.mark.parametrize("seed", range(ROUNDS))
async def test_the_reader_ends_up_with_what_is_kept(
    seed: int, wire_publisher: Callable[..., Any], follow: Any, event_payload: Callable[..., bytes]
) -> None:
    rng = random.Random(seed)
    publisher, clock = wire_publisher(), ShiftedClock()
    fate = Fate(rng, publisher, event_payload, clock)
    mark = None
    told: list[list[Told]] = []
    for start in range(2):  # the second one is warm
        async with follow(publisher, clock=clock, replay_silence_s=30.0, resume_from=mark) as following:
            fate.meet(following.subscriber)
            for _ in range(STEPS):
                await fate.step(following.subscriber)
                if rng.random() < 0.3:
                    await anyio.sleep(0.001)
            publisher.broken_after = None
            with anyio.fail_after(120):
                await converge(fate, following, clock)
            mark = following.subscriber.watermark
        found = periods(following.items)
        if start and following.subscriber.statistics.resets_total == 0:
            found[0] = told[-1] + found[0]  # it went on where the first one was
        told = found
        for period in told:
            check(period)
        assert {each.life for each in told[-1]} == {fate.life}
        numbers = [each.number for each in told[-1]]
        assert numbers[-len(publisher.kept) :] == sorted(publisher.kept)
        assert following.subscriber.connected
