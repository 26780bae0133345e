"""Deadlines: in order, each once, and nothing is kept of what is over."""

from __future__ import annotations

import random

from kvmesh.engine.deadlines import Deadlines


def test_they_pass_in_order_and_once() -> None:
    deadlines = Deadlines()
    assert deadlines.next_s() is None
    for name, at_s in (("b", 2.0), ("c", 3.0), ("a", 1.0)):
        deadlines.set(name, at_s)
    assert deadlines.next_s() == 1.0
    assert deadlines.take_passed(0.9) == []
    assert deadlines.take_passed(2.0) == ["a", "b"]
    assert deadlines.take_passed(2.0) == []
    deadlines.drop("c")
    deadlines.drop("unknown")
    assert (deadlines.next_s(), len(deadlines)) == (None, 0)


def test_an_id_that_comes_back_has_its_new_deadline_only() -> None:
    deadlines = Deadlines()
    for name in ("again", "x", "y", "z"):
        deadlines.set(name, 5.0)
    deadlines.drop("again")
    deadlines.set("again", 9.0)
    assert sorted(deadlines.take_passed(6.0)) == ["x", "y", "z"]
    assert deadlines.take_passed(9.0) == ["again"]


def test_finished_requests_take_no_memory() -> None:
    deadlines = Deadlines()
    deadlines.set("long", 1e9)
    for index in range(1000):
        deadlines.set(f"r{index}", 1e6 + index)
        deadlines.drop(f"r{index}")
        assert len(deadlines) <= 3
    assert deadlines.next_s() == 1e9


def test_any_order_of_changes_agrees_with_a_plain_dictionary() -> None:
    rng = random.Random(3)
    deadlines, plain = Deadlines(), dict[str, float]()
    for now in range(2000):
        name = f"r{rng.randrange(60)}"
        if name in plain:
            deadlines.drop(name)
            del plain[name]
        else:
            plain[name] = float(now + rng.randrange(100))
            deadlines.set(name, plain[name])
        assert deadlines.next_s() == min(plain.values(), default=None)
        assert len(deadlines) <= 2 * len(plain) + 1
        expected = {one for one, at_s in plain.items() if at_s <= now}
        assert set(deadlines.take_passed(now)) == expected
        plain = {one: at_s for one, at_s in plain.items() if one not in expected}
