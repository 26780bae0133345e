"""Pages between real processes, over every way that is built."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

Pair = Any
"""tests/integration/transceiver/conftest.py"""


def scattered(seed: int, count: int) -> list[int]:
    return random.Random(seed).sample(range(96), count)


def test_scattered_pages_arrive(pair: Pair) -> None:
    pair.move(1, scattered(1, 40), scattered(2, 40))
    backend = "NIXL" if "nixl" in pair.way else "BUILTIN"
    assert pair.context.backend == (f"CPP/{backend}" if pair.way.startswith("staged") else backend)


def test_contiguous_pages_arrive(pair: Pair) -> None:
    pair.move(2, list(range(10, 60)), list(range(30, 80)))


def test_only_missing_pages_move(pair: Pair) -> None:
    before = pair.generation.stats()
    source, target = scattered(3, 12), scattered(4, 12)
    kept = pair.generation.digest(pages=target[:9])
    pair.move(3, source, target, first=9)
    after = pair.generation.stats()
    assert after["pages_moved_total"] - before["pages_moved_total"] == 3
    assert after["bytes_moved_total"] - before["bytes_moved_total"] == 3 * 65536
    assert after["pages_reused_total"] - before["pages_reused_total"] == 9
    assert pair.generation.digest(pages=target[:9]) == kept


def test_nothing_missing_moves_nothing_and_frees_the_owner(pair: Pair) -> None:
    before = pair.generation.stats()["bytes_moved_total"]
    source, target = scattered(5, 4), scattered(6, 4)
    pair.generation.ask(transfer=4, handoff=pair.context.offer(transfer=4, pages=source), pages=target, first=4)
    assert pair.settle(pair.generation, "generation", {4})["completed"] == [4]
    assert pair.settle(pair.context, "context", {4})["completed"] == [4]
    assert pair.generation.stats()["bytes_moved_total"] == before
    assert pair.context.held() == pair.generation.held() == []


def test_many_at_once_do_not_mix(pair: Pair) -> None:
    order = random.Random(7)
    sources = [order.sample(range(96), 4) for _ in range(20)]
    free = order.sample(range(96), 80)
    targets = [free[4 * i : 4 * i + 4] for i in range(20)]
    for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
        handoff = pair.context.offer(transfer=100 + number, pages=source)
        pair.generation.ask(transfer=100 + number, handoff=handoff, pages=target)
    wanted = set(range(100, 120))
    assert set(pair.settle(pair.generation, "generation", wanted)["completed"]) == wanted
    assert set(pair.settle(pair.context, "context", wanted)["completed"]) == wanted
    for source, target in zip(sources, targets, strict=True):
        assert pair.generation.digest(pages=target) == pair.context.digest(pages=source)


def test_waiting_polls_return_as_soon_as_a_transfer_ends(pair: Pair) -> None:
    handoff = pair.context.offer(transfer=200, pages=[1, 2, 3])
    pair.generation.ask(transfer=200, handoff=handoff, pages=[4, 5, 6])
    assert pair.generation.poll(side="generation", at_least=5)["completed"] == [200]
    assert pair.context.poll(side="context", at_least=5)["completed"] == [200]


def test_both_ledgers_tell_the_same_story(pair: Pair) -> None:
    pair.context.ledger()
    pair.generation.ledger()
    pair.move(300, [7], [8])
    # One page in shared memory is read on loan: nobody is asked.
    between = [] if pair.way == "memfd" else [[300, "transferring"]]
    story = [[300, "registered"], *between, [300, "completed"]]
    assert pair.context.ledger() == story
    assert pair.generation.ledger() == story


def test_few_pages_in_shared_memory_are_read_on_loan(pair: Pair) -> None:
    """Only they, once the two know each other; over every other way the owner is asked."""
    pair.move(310, [1], [2])
    before = pair.generation.stats()["borrowed_total"]
    pair.move(311, [3, 4], [5, 6])
    pair.move(312, [7, 8], [9, 10], first=1)
    pair.move(313, scattered(8, 40), scattered(9, 40))
    expected = 2 if pair.way == "memfd" else 0
    assert pair.generation.stats()["borrowed_total"] - before == expected
    assert pair.context.stats()["refused_total"] == 0


def test_a_loan_is_read_from_an_owner_that_stands_still(make_pair: Callable[..., Pair]) -> None:
    """It hears of it when it goes on, also where the connection was lost meanwhile."""
    pair = make_pair("memfd")
    pair.move(1, [1], [2])
    handoff = pair.context.offer(transfer=2, pages=[3, 4])
    wanted = pair.context.digest(pages=[3, 4])
    pair.context.stop()
    pair.generation.ask(transfer=2, handoff=handoff, pages=[5, 6])
    assert pair.generation.poll(side="generation")["completed"] == [2]
    assert pair.generation.digest(pages=[5, 6]) == wanted
    pair.context.proceed()
    assert pair.settle(pair.context, "context", {2})["completed"] == [2]
    pair.release(pair.context, "context")


def test_a_loan_that_was_given_up_is_not_read(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("memfd", checksums=False)
    pair.move(1, [1], [2])
    handoff = pair.context.offer(transfer=2, pages=[3, 4])
    assert pair.context.cancel(transfer=2)
    pair.release(pair.context, "context")
    pair.context.fill(seed=99)
    pair.generation.ask(transfer=2, handoff=handoff, pages=[5, 6])
    ((_, status, code, _),) = pair.settle(pair.generation, "generation", {2})["failed"]
    assert (status, code) == (404, "transfer_unknown")
    assert pair.generation.held() == []


def test_replayed_and_forged_hand_offs_are_refused_and_harm_nobody(pair: Pair) -> None:
    handoff = pair.context.offer(transfer=400, pages=[1, 2])
    pair.generation.ask(transfer=400, handoff=handoff, pages=[3, 4])
    assert pair.settle(pair.generation, "generation", {400})["completed"] == [400]
    pair.generation.ask(transfer=400, handoff=handoff, pages=[3, 4])
    ((_, status, code, _message),) = pair.settle(pair.generation, "generation", {400})["failed"]
    assert (status, code) == (403, "ticket_replayed")
    position = len(handoff) // 3
    forged = handoff[:position] + ("A" if handoff[position] != "A" else "B") + handoff[position + 1 :]
    with pytest.raises(Exception, match=r"403|forged|ticket") as error:
        pair.generation.ask(transfer=401, handoff=forged, pages=[3, 4])
    assert error.value.args[0] == 403
    assert pair.settle(pair.context, "context", {400})["completed"] == [400]
    pair.move(402, [9, 8], [7, 6])


def test_idle_engines_cost_nothing(pair: Pair) -> None:
    pair.move(500, [1], [2])
    # Measured at below 1 %; a spinning thread would take a good part of a core.
    assert pair.generation.idle_cpu(seconds=0.5) < 0.1
    assert pair.context.idle_cpu(seconds=0.5) < 0.1


def test_processes_leave_in_an_orderly_way(make_pair: Callable[..., Pair], pair: Pair) -> None:
    other = make_pair(pair.way)
    other.move(1, [1, 2], [3, 4])
    assert other.generation.end() == 0
    assert other.context.end() == 0


def test_without_checksums(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("memfd", checksums=False)
    pair.move(1, scattered(1, 30), scattered(2, 30))


def test_auto_takes_shared_memory_or_tcp(make_pair: Callable[..., Pair]) -> None:
    # The owner offers TCP only, the receiver takes what there is.
    pair = make_pair("memfd", context={"plane": "tcp"}, generation={"plane": "auto"})
    pair.move(1, scattered(1, 30), scattered(2, 30))


def test_planes_that_exclude_each_other_are_refused(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("memfd", context={"plane": "tcp"}, generation={"plane": "memfd"})
    pair.generation.ask(transfer=1, handoff=pair.context.offer(transfer=1, pages=[1]), pages=[2])
    ((_, status, code, message),) = pair.settle(pair.generation, "generation", {1})["failed"]
    assert (status, code) == (503, "peer_unreachable")
    assert "transfer_plane" in message
    assert pair.settle(pair.context, "context", {1})["cancelled"] == [1]


def test_another_layout_is_refused_with_both_values(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("memfd", context={"layers": 1})
    pair.generation.ask(transfer=1, handoff=pair.context.offer(transfer=1, pages=[1]), pages=[2])
    ((_, _status, code, message),) = pair.settle(pair.generation, "generation", {1})["failed"]
    assert code == "pairing_refused"
    assert "1 attention layers" in message
    assert "2 attention layers" in message
    assert pair.settle(pair.context, "context", {1})["cancelled"] == [1]
