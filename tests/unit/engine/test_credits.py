"""Admission credits: prompts that nobody fetches hold a share of the cache, and starve nobody."""

from __future__ import annotations

from typing import Any

import pytest
from scheduling import BLOCK, SchedulerBench, names

from kvmesh.engine.credits import ContextCredits, lent_share, patience_s
from kvmesh.engine.scheduler import Scheduler
from kvmesh.engine.sequence import Phase, Sequence
from kvmesh.net.clock import ManualClock

PAGES = 20
TIMEOUT_S = 60.0


def test_the_fullest_pool_counts():
    assert lent_share([10, 4], [10, 4], []) == 0
    assert lent_share([10, 4], [5, 3], []) == 0.5
    assert lent_share([10, 4], [5, 3], [[1, 1], [0, 1]]) == 0.75
    assert lent_share([10, 0], [10, 0], [[1, 0]]) == 0.1


def test_patience_keeps_what_is_left_from_filling_up_in_one_timeout():
    """Prompts of a twentieth of the pool, half of which may be lent: ten of them in a timeout fill the other half."""
    assert patience_s(0.05, 0.5, 60.0) == pytest.approx(6.0)
    assert patience_s(0.05, 1.0, 60.0) == float("inf")
    assert patience_s(0.05, 0.5, float("inf")) == float("inf")
    assert patience_s(0.0, 0.5, float("inf")) == 0.0, "what adds nothing fills nothing"


class Owner(SchedulerBench):
    """A context server; what it has prefilled stays pinned until it is read."""

    def __init__(self, share: float = 0.5, total: int = PAGES, **limits: Any) -> None:
        super().__init__(PAGES, **{"max_num_tokens": 64, **limits})
        self.clock = ManualClock()
        self.total = total
        self.unread: dict[int, Any] = {}
        self.asked: dict[int, Any] = {}
        self.lending = ContextCredits(
            share, lambda: [self.total], self.pages, TIMEOUT_S, self.unread.__contains__, self.clock
        )
        self.scheduler = Scheduler(self.limits, self.pages, self.lending)
        self.count = 0

    def prompts(self, count: int, blocks: int = 1, kind: str = "context") -> list[Sequence]:
        added = []
        for _ in range(count):
            self.count += 1
            seq = self.add(f"{kind}-{self.count}", blocks * BLOCK, first=1000 * self.count, max_tokens=1, kind=kind)
            seq.transfer_id = self.count
            added.append(seq)
        return added

    def finish(self, seq: Sequence) -> None:
        if seq.kind == "context":
            assert seq.cache is not None
            self.unread[seq.transfer_id] = seq.cache.hold(seq.history.prompt_length)
        super().finish(seq)

    def ask(self, seq: Sequence) -> None:
        """Somebody comes for the pages; they stay pinned until they are read."""
        self.asked[seq.transfer_id] = self.unread.pop(seq.transfer_id)

    def read(self, seq: Sequence) -> None:
        (self.unread.pop(seq.transfer_id, None) or self.asked.pop(seq.transfer_id)).release()

    def done(self, among: list[Sequence]) -> list[str]:
        return names([seq for seq in among if seq.phase is Phase.FINISHED])


def test_prompts_start_as_they_come_while_the_share_lasts_and_then_one_at_a_time():
    owner = Owner()
    prompts = owner.prompts(14)
    for _ in range(4):
        owner.step()
    # Ten take the share; the eleventh is the first beyond it, and nobody comes.
    assert len(owner.done(prompts)) == 11
    assert owner.scheduler.num_held_back == 3
    assert owner.scheduler.held_back_for_s() == pytest.approx(patience_s(1 / PAGES, 0.5, TIMEOUT_S))
    # Somebody comes for it: the next begins, and only it.
    owner.ask(prompts[10])
    for _ in range(3):
        owner.step()
    assert len(owner.done(prompts)) == 12
    # Some are read: the share has room again.
    for seq in prompts[:6]:
        owner.read(seq)
    for _ in range(3):
        owner.step()
    assert len(owner.done(prompts)) == 14
    assert owner.scheduler.num_held_back == 0
    assert owner.scheduler.held_back_for_s() is None


def test_a_pool_that_has_grown_since_the_start_is_lent_by_its_size_now():
    """Memory moves between pools: a share of the size at the start would be nothing here, or the whole pool there."""
    owner = Owner(total=PAGES // 2)
    owner.total = PAGES
    prompts = owner.prompts(14)
    for _ in range(4):
        owner.step()
    assert len(owner.done(prompts)) == 11
    assert owner.scheduler.num_held_back == 3


def test_readers_that_come_are_not_slowed_down_by_one_that_never_does():
    """Half of the cache belongs to a server that never fetches; the others' prompts follow each other at once."""
    owner = Owner()
    owner.prompts(10)
    owner.step()
    others = owner.prompts(30)
    for seq in others:
        for _ in range(20):
            if seq.phase is Phase.FINISHED:
                break
            owner.step()
        assert seq.phase is Phase.FINISHED, owner.done(others)
        owner.read(seq)
    assert owner.clock.monotonic_s() == 0.0, "none of them waited"


def test_one_that_never_fetches_fills_what_is_left_no_faster_than_its_prompts_time_out():
    owner = Owner()
    prompts = owner.prompts(100)
    lost: list[float] = []
    while owner.clock.monotonic_s() < TIMEOUT_S - 1:
        owner.step()
        owner.clock.advance(0.25)
        lost.append(len(owner.unread) / PAGES)
    assert max(lost) <= 1.0
    assert max(lost[: len(lost) // 2]) <= 0.8, "half of what was left is still there after half of the timeout"
    assert owner.scheduler.num_held_back > 0
    for seq in prompts:
        if seq.transfer_id in owner.unread:
            owner.read(seq)


def test_a_prompt_larger_than_the_share_runs_when_nothing_is_lent():
    owner = Owner()
    [large] = owner.prompts(1, blocks=15)
    owner.step()
    assert large.phase is Phase.FINISHED
    owner.read(large)


def test_what_is_being_computed_counts_too():
    """Else a burst would all begin before the first of it is finished."""
    owner = Owner(max_num_tokens=BLOCK)
    prompts = owner.prompts(8, blocks=4)
    owner.step()
    owner.step()
    running = [seq for seq in prompts if seq.phase is Phase.RUNNING]
    assert 1 <= len(running) <= 3


def test_other_kinds_of_requests_are_not_held_back():
    owner = Owner()
    owner.prompts(12)
    owner.step()
    owner.step()
    assert owner.scheduler.num_held_back > 0
    [whole] = owner.prompts(1, kind="aggregated")
    owner.step()
    assert whole.phase is Phase.FINISHED


def test_a_share_of_one_holds_nobody_back_whom_pages_do_not():
    free, bound = Owner(share=1.0), Owner(share=1.0)
    free.scheduler = Scheduler(free.limits, free.pages)
    done = []
    for owner in (free, bound):
        prompts = owner.prompts(PAGES + 2)
        for _ in range(5):
            owner.step()
        done.append(owner.done(prompts))
    assert done[0] == done[1]
    assert len(done[0]) >= PAGES - 1
