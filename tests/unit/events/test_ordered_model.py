"""Whatever happens between a publisher and its reader, the reader mixes no lives and skips nothing in silence.

The publisher loses, repeats, swaps and drops messages, forgets what it kept, restarts, also behind a connection that
stands, and answers replays wholly, in part or not at all, with batches or with its state; while the reader asks, the
publisher goes on. Everything is plain calls, so each run is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, NamedTuple, Self

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from wire_publisher import payload

from kvmesh.events.items import Batch, Item, Reset
from kvmesh.events.ordered import OrderedStream
from kvmesh.events.replay import KeptBatch, ReplayFailedError
from kvmesh.net.clock import SystemClock

CLEARED = {"type": "AllBlocksCleared"}
LIFE_S = 1000.0
"""Timestamps say life and number of a batch."""
STATE_S = 0.5
"""And so much more, that it is everything up to that number."""


MEANWHILE = ["publish", "lose", "make", "restart", "catch up", "overtake"]


class Told(NamedTuple):
    """One batch, as it was delivered."""

    life: int
    number: int
    replayed: bool
    state: bool


class HandClock(SystemClock):
    """Stands still unless a test moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s


class FakePublisher:
    """Counts, sends and keeps; ``send`` is the way to its reader."""

    def __init__(self, send: Callable[[KeptBatch], None]) -> None:
        self.send = send
        self.life = 0
        self.next = 0
        self.kept: dict[int, bytes] = {}
        self.answers_up_to: int | None = None
        """Messages after which a replay breaks off; None: it does not."""

    def make(self) -> KeptBatch:
        number, self.next = self.next, self.next + 1
        return KeptBatch(number, b"t", payload(CLEARED, ts=self.life * LIFE_S + number))

    def publish(self) -> None:
        message = self.make()
        self.kept[message.sequence] = message.payload
        self.send(message)

    def lose(self) -> None:
        message = self.make()
        self.kept[message.sequence] = message.payload

    def swap(self) -> None:
        first, second = self.make(), self.make()
        self.kept |= {first.sequence: first.payload, second.sequence: second.payload}
        self.send(second)
        self.send(first)

    def repeat(self, which: int) -> None:
        if self.kept:
            number = list(self.kept)[which % len(self.kept)]
            self.send(KeptBatch(number, b"t", self.kept[number]))

    def forget(self, count: int) -> None:
        """The oldest, but never the newest."""
        self.kept = dict(list(self.kept.items())[min(count, max(len(self.kept) - 1, 0)) :])

    def begin_anew(self) -> None:
        self.life, self.next, self.kept = self.life + 1, 0, {}

    def answer(self, start: int, *, with_state: bool) -> list[KeptBatch]:
        if not with_state:
            return [KeptBatch(number, b"t", data) for number, data in self.kept.items() if number >= start]
        last = self.next - 1
        if last < 0:
            return []
        state = KeptBatch(last, b"t", payload(CLEARED, ts=self.life * LIFE_S + last + STATE_S))
        return [state] + ([KeptBatch(last, b"t", self.kept[last])] if last in self.kept else [])


class FakeReplays:
    """Answers at once; what the publisher does while the request is on its way is done first."""

    def __init__(self, publisher: FakePublisher) -> None:
        self._publisher = publisher
        self.meanwhile: list[Callable[[], None]] = []
        self.answered: set[int] = set()
        """Numbers in the last answer."""

    def ask(self, start: int, *, with_state: bool = False) -> FakeAnswer:
        meanwhile, self.meanwhile = self.meanwhile, []
        for happens in meanwhile:
            happens()
        messages = self._publisher.answer(start, with_state=with_state)
        self.answered = {message.sequence for message in messages}
        return FakeAnswer(messages, self._publisher.answers_up_to)


class FakeAnswer:
    def __init__(self, messages: list[KeptBatch], breaks_after: int | None) -> None:
        self._messages = iter(messages)
        self._left = breaks_after

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    async def next(self) -> KeptBatch | None:
        if self._left == 0:
            raise ReplayFailedError("silent")
        if self._left is not None:
            self._left -= 1
        return next(self._messages, None)


class Opened(NamedTuple):
    """Waits among the messages of a listener."""


class Closed(NamedTuple):
    """Waits among the messages of a listener."""


def at_once(work: Coroutine[Any, Any, object]) -> None:
    """Run what never waits."""
    try:
        work.send(None)
    except StopIteration:
        return
    work.close()
    raise AssertionError("the order of messages waits for something besides replays")


class Stream(RuleBasedStateMachine):
    """A publisher, the messages on their way, and a reader that checks each item."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = HandClock()
        self.waiting: list[KeptBatch | Opened | Closed] = []
        self.linked = False
        self.publisher = FakePublisher(self.send)
        self.replays = FakeReplays(self.publisher)
        self.period: list[Told] = []
        """Since the last reset."""

    @initialize(bound=st.booleans(), with_state=st.booleans(), history=st.integers(0, 3))
    def begin(self, bound: bool, with_state: bool, history: int) -> None:
        self.bound = bound
        """Whether publishers connect to the reader: the story of connections then comes in turn with the messages."""
        self.with_state = with_state
        for _ in range(history):
            self.publisher.lose()
        self.ordered = self.reader(None)
        self.connect(0)

    def reader(self, resume_from: Any) -> OrderedStream:
        ordered = OrderedStream(
            "p", self.replays, clock=self.clock, resume_from=resume_from, with_state=self.with_state
        )
        ordered.deliver = self.hear
        return ordered

    def send(self, message: KeptBatch) -> None:
        if self.linked:
            self.waiting.append(message)

    def hear(self, item: Item) -> None:
        if isinstance(item, Reset):
            self.period = []
        elif isinstance(item, Batch):
            life, number = divmod(item.records.ts, LIFE_S)
            told = Told(int(life), int(number), item.replayed, number % 1 == STATE_S)
            assert told.number == item.sequence
            if self.period:
                last = self.period[-1]
                assert told.life == last.life, "two lives are mixed"
                assert told.number > last.number, "told twice, or out of order"
                assert not told.state, "what is known already is told again"
                skipped = set(range(last.number + 1, told.number))
                from_nothing = all(each.replayed for each in [*self.period, told])
                assert not skipped or (from_nothing and not skipped & self.replays.answered), "a silent gap"
            self.period.append(told)

    # --- the publisher and the way of its messages

    @rule(action=st.sampled_from(["publish", "publish", "publish", "lose", "make", "swap"]), times=st.integers(1, 3))
    def act(self, action: str, times: int) -> None:
        for _ in range(times):
            getattr(self.publisher, action)()

    @rule(which=st.integers(0, 9))
    def repeat(self, which: int) -> None:
        self.publisher.repeat(which)

    @rule(count=st.integers(1, 4))
    def forget(self, count: int) -> None:
        self.publisher.forget(count)

    @rule(answers_up_to=st.sampled_from([0, 1, 2, 4]))
    def fall_silent(self, answers_up_to: int) -> None:
        self.publisher.answers_up_to = answers_up_to

    @rule()
    def speak(self) -> None:
        self.publisher.answers_up_to = None

    @rule(actions=st.lists(st.sampled_from(MEANWHILE), min_size=1, max_size=4))
    def meanwhile(self, actions: list[str]) -> None:
        """During the next replay request."""
        for action in actions:
            happens = {
                "publish": self.publisher.publish,
                "lose": self.publisher.lose,
                "make": self.publisher.make,
                "restart": lambda: self.cut(-99),
                "catch up": lambda: self.cut(-1),
                "overtake": lambda: self.cut(2),
            }[action]
            self.replays.meanwhile.append(happens)  # type: ignore[arg-type]

    @precondition(lambda self: self.linked)
    @rule()
    def lose_the_connection(self) -> None:
        self.disconnect()

    @rule(beyond=st.integers(-9, 4))
    def restart(self, beyond: int) -> None:
        """The connection breaks. Some messages of the earlier life may be still to come."""
        self.cut(beyond)

    def cut(self, beyond: int) -> None:
        before = self.publisher.next
        if self.linked:
            self.disconnect()
        self.publisher.begin_anew()
        while self.publisher.next < before + beyond:
            self.publisher.publish()

    def disconnect(self) -> None:
        self.linked = False
        if self.bound:
            self.waiting.append(Closed())
        else:
            self.broken = True

    @precondition(lambda self: not self.linked)
    @rule(queued=st.integers(0, 2))
    def connect(self, queued: int) -> None:
        self.linked = True
        if self.bound:
            self.waiting.append(Opened())
        else:
            self.hear_of_the_connection()
        for _ in range(queued):
            self.publisher.publish()
        if not self.bound:
            at_once(self.ordered.opened(self.discard))

    def hear_of_the_connection(self) -> None:
        """A subscriber hears of the end of a connection before it takes another message, wherever that stands."""
        if getattr(self, "broken", False):
            self.broken = False
            self.ordered.closed()

    def discard(self) -> int:
        count = len(self.waiting)
        self.waiting.clear()
        return count

    @precondition(
        lambda self: (
            self.linked
            and not self.waiting
            and self.period
            and self.period[-1].life == self.publisher.life
            and self.ordered._tracker.live == self.ordered.applied == self.publisher.next - 1
        )
    )
    @rule(overtakes=st.booleans())
    def restart_unseen(self, overtakes: bool) -> None:
        """Behind something that keeps the connection: only its numbers tell, and the very next would not."""
        before = self.publisher.next
        self.publisher.begin_anew()
        while overtakes and self.publisher.next < before + 2:
            self.publisher.lose()
        self.publisher.publish()

    # --- the reader

    @rule(count=st.sampled_from([1, 2, 5, 100]))
    def take(self, count: int) -> None:
        for _ in range(count):
            self.hear_of_the_connection()
            if not self.waiting:
                return
            match self.waiting.pop(0):
                case KeptBatch() as message:
                    at_once(self.ordered.take_live(message))
                case Opened():
                    at_once(self.ordered.opened(lambda: 0))
                case Closed():
                    self.ordered.closed()

    @rule(seconds=st.sampled_from([0.5, 31.0, 1000.0]))
    def let_pass(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.idle()

    def idle(self) -> None:
        self.hear_of_the_connection()
        if not self.waiting and self.ordered.due_in_s() == 0:
            at_once(self.ordered.check())

    @rule()
    def resync(self) -> None:
        self.hear_of_the_connection()
        at_once(self.ordered.resync("asked to"))

    @precondition(lambda self: self.linked and self.ordered.watermark is not None)
    @rule()
    def start_warm(self) -> None:
        """Another reader goes on where this one is; what waited for this one is lost."""
        self.waiting.clear()
        self.broken = False
        self.ordered = self.reader(self.ordered.watermark)
        at_once(self.ordered.opened(lambda: 0))

    def teardown(self) -> None:
        """Once all is well again the reader has everything."""
        if not hasattr(self, "ordered"):
            return
        self.publisher.answers_up_to = None
        self.replays.meanwhile.clear()
        self.take(1000)
        if not self.linked:
            self.connect(0)
        for _ in range(3):
            self.publisher.publish()
            self.take(1000)
            self.clock.now_s += 1000.0
            self.idle()
        assert self.ordered.connected
        assert self.ordered.applied == self.publisher.next - 1
        assert {told.life for told in self.period} == {self.publisher.life}
        numbers = [told.number for told in self.period]
        if self.with_state:
            assert self.period[0].state or numbers[0] == 0
        else:
            assert numbers[-len(self.publisher.kept) :] == list(self.publisher.kept)
        self.asks_for_nothing_more()

    def asks_for_nothing_more(self) -> None:
        """A stream in order needs no replays."""
        replays = self.ordered.statistics.replays_total
        for _ in range(3):
            self.publisher.publish()
            self.take(1000)
        assert self.ordered.statistics.replays_total == replays


@pytest.fixture
def stream() -> Stream:
    return Stream()


def told(stream: Stream) -> list[tuple[int, int]]:
    """Life and number."""
    return [(each.life, each.number) for each in stream.period]


@pytest.mark.parametrize("bound", [False, True])
def test_the_last_word_of_a_life_does_not_follow_the_last_batch_of_the_next(stream: Stream, bound: bool) -> None:
    """The gap before it has another life read whose last number happens to be the one before."""
    stream.begin(bound=bound, with_state=False, history=1)
    stream.take(1)
    stream.publisher.make()
    stream.publisher.publish()
    stream.cut(-99)
    stream.publisher.lose()
    stream.publisher.lose()
    stream.take(1)
    assert told(stream) == [(1, 0), (1, 1)]
    stream.teardown()


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("bound", [False, True])
def test_a_message_of_an_earlier_life_does_not_follow_what_was_replayed_of_the_next(
    stream: Stream, bound: bool, answers: bool
) -> None:
    """Without a gap, and while nobody can be asked: then what was replayed has to go."""
    stream.begin(bound=bound, with_state=False, history=1)
    stream.publisher.publish()
    stream.publisher.publish()
    stream.take(2 if bound else 1)
    stream.cut(-99)
    stream.publisher.lose()
    stream.publisher.lose()
    stream.resync()
    assert told(stream) == [(1, 0), (1, 1)]
    stream.publisher.answers_up_to = None if answers else 0
    stream.take(1)
    assert told(stream) == ([(1, 0), (1, 1)] if answers else [(0, 2)])
    stream.teardown()


def test_one_replay_proves_the_stream_of_a_publisher_that_never_rests(stream: Stream) -> None:
    stream.begin(bound=False, with_state=False, history=2)
    stream.publisher.publish()
    stream.replays.meanwhile += [stream.publisher.publish] * 5
    stream.take(1)
    assert told(stream) == [(0, number) for number in range(8)]
    replays = stream.ordered.statistics.replays_total
    stream.discard()  # that the last of the replay came, too, would be a proof as well
    stream.publisher.publish()
    stream.take(1)
    assert stream.ordered.statistics.replays_total == replays
    stream.teardown()


def test_what_was_missed_is_had_from_the_state_once_it_is_told(stream: Stream) -> None:
    """A worker that answers with its state numbers it like its last batch: not earlier than what was heard."""
    stream.begin(bound=False, with_state=True, history=2)
    stream.publisher.answers_up_to = 0
    stream.resync()
    stream.publisher.publish()
    stream.take(1)
    assert told(stream) == [(0, 2)]
    stream.publisher.answers_up_to = None
    stream.let_pass(31.0)
    assert stream.period[0].state
    stream.teardown()


TestStream = Stream.TestCase
TestStream.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
