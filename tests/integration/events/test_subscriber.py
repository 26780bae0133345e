"""Loss, repetition, restart and silence, as one subscription meets them over real sockets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest
from shifted_clock import ShiftedClock

from kvmesh.events.ordered import REPLAY_COOLDOWN_S
from kvmesh.events.quarantine import LOG_INTERVAL_S
from kvmesh.events.watermark import Watermark, payload_digest

CLEARED = {"type": "AllBlocksCleared"}


@pytest.fixture
def publisher(wire_publisher: Callable[..., Any]) -> Any:
    return wire_publisher()


@pytest.fixture
def batch(event_payload: Callable[..., bytes]) -> Callable[..., bytes]:
    """Payload number ``n`` of a life: no two lives say the same at the same time."""
    return lambda number, life=0: event_payload(CLEARED, ts=number + life / 10)


async def test_history_then_live_without_counting_the_overlap_twice(publisher: Any, follow: Any, batch: Any) -> None:
    publisher.kept = {number: batch(number) for number in range(5)}
    async with follow(publisher) as following:
        await following.until(0, 1, 2, 3, 4, "Connected")
        for number in (3, 4, 5):
            publisher.publish(number, batch(number))
        await following.until(0, 1, 2, 3, 4, "Connected", 5)
        assert [item.replayed for item in following.items if hasattr(item, "replayed")] == [True] * 5 + [False]
        assert following.subscriber.statistics.duplicates_total >= 2


async def test_a_gap_is_filled_in_order_before_what_showed_it(publisher: Any, follow: Any, batch: Any) -> None:
    async with follow(publisher) as following:
        await following.until("Connected")
        publisher.publish(0, batch(0))
        publisher.kept |= {1: batch(1), 2: batch(2)}  # sent, and lost on the way
        publisher.publish(3, batch(3))
        await following.until("Connected", 0, 1, 2, 3)
        assert following.subscriber.statistics.gaps_total == 1
        assert following.subscriber.statistics.resets_total == 0


async def test_a_gap_that_cannot_be_filled_resets_and_gives_all_that_is_kept(
    publisher: Any, follow: Any, batch: Any
) -> None:
    async with follow(publisher) as following:
        await following.until("Connected")
        publisher.publish(0, batch(0))
        publisher.publish(2, batch(2))  # number 1 was dropped before it was kept
        publisher.publish(3, batch(3))
        await following.until("Connected", 0, "Reset", 0, 2, 3)


async def test_a_buffer_that_begins_late_is_a_loss_only_if_something_was_known(
    publisher: Any, follow: Any, batch: Any
) -> None:
    publisher.kept = {7: batch(7), 8: batch(8)}
    async with follow(publisher) as following:
        await following.until(7, 8, "Connected")
        publisher.kept = {20: batch(20), 21: batch(21)}
        publisher.send(21, batch(21))
        await following.until(7, 8, "Connected", "Reset", 20, 21)


async def test_numbers_that_go_back_are_another_life(publisher: Any, follow: Any, batch: Any) -> None:
    async with follow(publisher) as following:
        await following.until("Connected")
        for number in range(3):
            publisher.publish(number, batch(number))
        await following.until("Connected", 0, 1, 2)
        publisher.kept = {0: batch(0, life=1)}
        publisher.send(0, batch(0, life=1))
        publisher.publish(1, batch(1, life=1))
        await following.until("Connected", 0, 1, 2, "Reset", 0, 1)
        assert following.items[-1].records.ts == 1.1


async def test_another_life_that_has_overtaken_the_old_numbers_is_recognised(
    publisher: Any, follow: Any, batch: Any
) -> None:
    async with follow(publisher) as following:
        await following.until("Connected")
        publisher.publish(0, batch(0))
        publisher.publish(1, batch(1))
        await following.until("Connected", 0, 1)
        publisher.kept = {number: batch(number, life=1) for number in range(5)}
        publisher.publish(5, batch(5, life=1))
        await following.until("Connected", 0, 1, "Reset", 0, 1, 2, 3, 4, 5)
        assert following.subscriber.statistics.restarts_total == 1


async def test_messages_that_come_twice_or_late_change_nothing(publisher: Any, follow: Any, batch: Any) -> None:
    async with follow(publisher) as following:
        await following.until("Connected")
        publisher.kept = {number: batch(number) for number in range(4)}
        for number in (0, 2, 1, 1, 0, 2, 3):
            publisher.send(number, batch(number))
        await following.until("Connected", 0, 1, 2, 3)
        assert following.subscriber.statistics.resets_total == 0


async def test_without_replay_every_loss_starts_anew(publisher: Any, follow: Any, batch: Any) -> None:
    async with follow(publisher, replay=False) as following:
        await following.until("Connected")
        for number in (7, 8, 10, 3):
            publisher.send(number, batch(number))
        await following.until("Connected", 7, 8, "Reset", 10, "Reset", 3)
        assert publisher.requests == []


async def test_a_silent_replay_service_is_not_asked_again_at_once(publisher: Any, follow: Any, batch: Any) -> None:
    publisher.silent = True
    async with follow(publisher, replay_silence_s=0.05) as following:
        await following.until("Connected")
        for number in (0, 2, 4):
            publisher.send(number, batch(number))
        await following.until("Connected", 0, "Reset", 2, "Reset", 4)
        assert publisher.requests == [0]
        assert following.subscriber.statistics.replay_failures_total == 1


@pytest.mark.parametrize("end_marker", [[b"", b"\xff" * 8, b""], [b"", b""], [b"", b"", b"\xff" * 8, b""]])
async def test_replies_without_a_topic(publisher: Any, follow: Any, batch: Any, end_marker: list[bytes]) -> None:
    publisher.with_topic = False
    publisher.end_marker = end_marker
    publisher.kept = {0: batch(0), 1: batch(1)}
    async with follow(publisher) as following:
        await following.until(0, 1, "Connected")


async def test_what_was_sent_before_the_subscription_arrived_is_asked_for_once_more(
    publisher: Any, follow: Any, batch: Any
) -> None:
    async with follow(publisher) as following:
        await following.until("Connected")
        publisher.kept = {0: batch(0)}  # neither in the first replay nor in the stream
        await following.until("Connected", 0)
        assert publisher.requests == [0, 0]


async def test_a_bad_event_is_left_out_and_a_bad_batch_is_a_loss(
    publisher: Any, follow: Any, batch: Any, event_payload: Any
) -> None:
    async with follow(publisher) as following:
        await following.until("Connected")
        publisher.publish(0, event_payload(CLEARED, {"type": "?"}, CLEARED))
        await following.until("Connected", 0)
        assert len(following.items[-1].records.records) == 2
        assert following.subscriber.rejected == {"malformed": 1}
        publisher.publish(1, b"\xc1")
        publisher.publish(2, batch(2))
        publisher.send_raw(b"t", b"short", b"")
        publisher.send_raw(b"only one frame")
        await following.until("Connected", 0, "Reset", 2)


async def test_a_lost_connection_is_told_and_the_same_life_goes_on(
    publisher: Any, follow: Any, batch: Any, wire_publisher: Callable[..., Any]
) -> None:
    async with follow(publisher) as following:
        await following.until("Connected")
        publisher.publish(0, batch(0))
        await following.until("Connected", 0)
        publisher.close()
        await following.until("Connected", 0, "Disconnected")
        again = wire_publisher(publisher.endpoint, publisher.replay_endpoint)
        again.kept = {0: batch(0), 1: batch(1)}
        await again.subscribed()
        await following.until("Connected", 0, "Disconnected", 1, "Connected")


async def test_another_life_at_the_same_endpoint_is_noticed_without_a_message(
    publisher: Any, follow: Any, batch: Any, wire_publisher: Callable[..., Any]
) -> None:
    async with follow(publisher) as following:
        await following.until("Connected")
        publisher.publish(0, batch(0))
        publisher.publish(1, batch(1))
        await following.until("Connected", 0, 1)
        publisher.close()
        again = wire_publisher(publisher.endpoint, publisher.replay_endpoint)
        again.kept = {0: batch(0, life=1)}
        await again.subscribed()
        await following.until("Connected", 0, 1, "Disconnected", "Reset", 0, "Connected")


async def test_a_lost_connection_without_replay_starts_anew(
    publisher: Any, follow: Any, batch: Any, wire_publisher: Callable[..., Any]
) -> None:
    async with follow(publisher, replay=False) as following:
        await following.until("Connected")
        publisher.send(0, batch(0))
        await following.until("Connected", 0)
        publisher.close()
        again = wire_publisher(publisher.endpoint, publisher.replay_endpoint)
        await again.subscribed()
        await following.until("Connected", 0, "Disconnected", "Reset", "Connected")


async def test_asked_to_it_reads_everything_anew(publisher: Any, follow: Any, batch: Any) -> None:
    async with follow(publisher) as following:
        await following.until("Connected")
        for number in range(3):
            publisher.publish(number, batch(number))
        await following.until("Connected", 0, 1, 2)
        following.subscriber.resync("digests differ")
        await following.until("Connected", 0, 1, 2, "Reset", 0, 1, 2)
        assert following.items[4].reason == "digests differ"
        publisher.publish(3, batch(3))
        await following.until("Connected", 0, 1, 2, "Reset", 0, 1, 2, 3)


async def test_a_failed_replay_is_tried_again_after_its_cooldown_and_nothing_is_dropped_before_it_answers(
    publisher: Any, follow: Any, batch: Any
) -> None:
    """§2.2: 30 s after a failure, and only then. The history that was missed is fetched although no gap shows it."""
    clock = ShiftedClock()
    publisher.kept = {number: batch(number) for number in range(4)}
    publisher.silent = True
    async with follow(publisher, replay_silence_s=0.05, clock=clock) as following:
        await following.until("Connected")
        publisher.publish(4, batch(4))
        await following.until("Connected", 4)
        clock.passed_s = REPLAY_COOLDOWN_S + 1
        publisher.publish(5, batch(5))
        await following.until("Connected", 4, 5)
        with anyio.fail_after(5):
            while following.subscriber.statistics.replay_failures_total < 2:  # noqa: ASYNC110 - what is waited for has no event
                await anyio.sleep(0.002)
        publisher.silent = False
        clock.passed_s += REPLAY_COOLDOWN_S + 1
        publisher.publish(6, batch(6))
        await following.until("Connected", 4, 5, 6)  # twice the time after the second failure in a row
        clock.passed_s += REPLAY_COOLDOWN_S
        publisher.publish(7, batch(7))
        await following.until("Connected", 4, 5, 6, 7, "Reset", *range(8))
        assert publisher.requests == [0, 0, 0]


async def test_history_that_begins_no_earlier_is_not_read_again(publisher: Any, follow: Any, batch: Any) -> None:
    clock = ShiftedClock()
    publisher.silent = True
    async with follow(publisher, replay_silence_s=0.05, clock=clock) as following:
        await following.until("Connected")
        publisher.publish(3, batch(3))
        await following.until("Connected", 3)
        publisher.silent = False
        clock.passed_s = REPLAY_COOLDOWN_S + 1
        publisher.publish(4, batch(4))
        with anyio.fail_after(5):
            while len(publisher.requests) < 2:  # noqa: ASYNC110 - what is waited for has no event
                await anyio.sleep(0.002)
        publisher.publish(5, batch(5))
        await following.until("Connected", 3, 4, 5)


@pytest.mark.parametrize("missed", [0, 2])
async def test_a_warm_start_goes_on_from_the_watermark(publisher: Any, follow: Any, batch: Any, missed: int) -> None:
    async with follow(publisher) as following:
        await following.until("Connected")
        for number in range(3):
            publisher.publish(number, batch(number))
        await following.until("Connected", 0, 1, 2)
        mark = following.subscriber.watermark
    publisher.kept |= {number: batch(number) for number in range(3, 3 + missed)}
    resumed = Watermark.decode(mark.encode())
    async with follow(publisher, resume_from=resumed) as following:
        await following.until(*range(3, 3 + missed), "Connected")
        assert following.subscriber.statistics.resets_total == 0
        assert following.subscriber.watermark.sequence == 2 + missed


@pytest.mark.parametrize("kept", ["another life", "later ones only", "nothing", "less"])
async def test_a_warm_start_that_the_publisher_cannot_prove_begins_with_a_reset(
    publisher: Any, follow: Any, batch: Any, kept: str
) -> None:
    numbers = {"another life": range(5), "later ones only": range(4, 6), "nothing": range(0), "less": range(2)}[kept]
    publisher.kept = {number: batch(number, life=1) for number in numbers}
    async with follow(publisher, resume_from=Watermark(3, payload_digest(batch(3)))) as following:
        await following.until("Reset", *numbers, "Connected")


async def test_a_warm_start_without_a_replay_service_begins_with_a_reset(
    publisher: Any, follow: Any, batch: Any
) -> None:
    async with follow(publisher, replay=False, resume_from=Watermark(3, payload_digest(batch(3)))) as following:
        await following.until("Reset", "Connected")


@pytest.mark.parametrize("data", [b"", b"x" * 23, b"x" * 25])
def test_a_watermark_of_another_length_is_none(data: bytes) -> None:
    with pytest.raises(ValueError, match="24 bytes"):
        Watermark.decode(data)


async def test_events_are_counted_by_how_they_are_written(publisher: Any, follow: Any, event_payload: Any) -> None:
    array, stored = ["AllBlocksCleared"], ["BlockStored", [1], None, [1], 1, None, "GPU", {"cache_salt": "s"}]
    async with follow(publisher) as following:
        await following.until("Connected")
        publisher.publish(0, event_payload(CLEARED, array, stored, {"event_type": "cleared"}))
        publisher.publish(1, event_payload(array))
        await following.until("Connected", 0, 1)
        assert following.subscriber.dialects == {"map": 1, "array": 2, "sglang": 1, "mooncake": 1}


async def test_events_left_out_are_shown_in_the_log_now_and_then(
    publisher: Any, follow: Any, event_payload: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first of each reason with its first bytes, then at most one line in ten seconds."""
    clock = ShiftedClock()
    async with follow(publisher, clock=clock) as following:
        await following.until("Connected")
        for number in range(5):
            publisher.publish(number, event_payload({"type": "?"}, ["BlockRemoved", [1], "MOON"]))
        await following.until("Connected", *range(5))
        lines = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
        assert len(lines) == 2
        assert "81 a4 74 79 70 65 a1 3f" in lines[0]
        clock.passed_s = LOG_INTERVAL_S + 1
        publisher.publish(5, event_payload({"type": "?"}))
        await following.until("Connected", *range(6))
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
        assert "so_far=6" in line or '"so_far": 6' in line
