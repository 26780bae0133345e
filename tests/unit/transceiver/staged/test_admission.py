"""Who may use a staging region, and in which order."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.transceiver.planes.base import MoveControl, MoveStoppedError
from kvmesh.transceiver.staged.admission import AdmissionGate, AdmissionQueue

STEPS = st.lists(st.tuples(st.sampled_from(["ask", "leave", "rest", "wake"]), st.integers(0, 9), st.integers(0, 25)))


@given(capacity=st.integers(1, 20), steps=STEPS)
def test_first_come_first_served_within_the_capacity(capacity: int, steps: list[tuple[str, int, int]]) -> None:
    queue = AdmissionQueue(capacity)
    waiting: list[int] = []
    active: dict[int, int] = {}
    resting: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for verb, key, nbytes in steps:
        if verb == "ask":
            if key in waiting or key in active or key in resting:
                with pytest.raises(ValueError, match="already"):
                    queue.ask(key, nbytes)
            else:
                queue.ask(key, nbytes)
                sizes[key] = min(nbytes, capacity)
                waiting.append(key)
        elif verb == "leave":
            queue.leave(key)
            active.pop(key, None)
            resting.pop(key, None)
            waiting = [one for one in waiting if one != key]
        elif verb == "rest":
            queue.rest(key)
            if key in active:
                resting[key] = active.pop(key)
        else:
            queue.wake(key)
            if key in resting:
                active[key] = resting.pop(key)
        before = sum(active.values())
        admitted = queue.admit()
        assert admitted == waiting[: len(admitted)], "in the order in which they came"
        for one in admitted:
            active[one] = sizes[one]
        waiting = waiting[len(admitted) :]
        total = sum(active.values())
        assert queue.admitted_bytes == total
        assert total <= capacity or total == before, "only those that wake can make it more"
        assert not waiting or total + sizes[waiting[0]] > capacity, "nobody waits without need"
        assert queue.waiting == len(waiting)


def test_a_prompt_larger_than_the_buffer_goes_alone() -> None:
    """§2b max_tokens_in_buffer: it must still complete."""
    queue = AdmissionQueue(100)
    queue.ask("small", 10)
    queue.ask("huge", 1000)
    queue.ask("next", 10)
    assert queue.admit() == ["small"]
    queue.leave("small")
    assert queue.admit() == ["huge"]
    queue.leave("huge")
    assert queue.admit() == ["next"]


def test_a_waiter_that_is_stopped_leaves_its_place() -> None:
    gate = AdmissionGate(10)
    gate.enter("first", 10, MoveControl())
    control = MoveControl()
    outcomes: list[str] = []

    def enter(key: str, control: MoveControl) -> None:
        try:
            gate.enter(key, 10, control)
        except MoveStoppedError:
            outcomes.append(f"{key} stopped")
        else:
            outcomes.append(f"{key} entered")

    stopped = threading.Thread(target=enter, args=("second", control))
    stopped.start()
    control.stop()
    stopped.join(10)
    assert outcomes == ["second stopped"]
    following = threading.Thread(target=enter, args=("third", MoveControl()))
    following.start()
    gate.rest("first")
    following.join(10)
    assert outcomes[-1] == "third entered"
    gate.wake("first")
    gate.leave("first")
    gate.leave("third")
    assert gate.waiting == 0
