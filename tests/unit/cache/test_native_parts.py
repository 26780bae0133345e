"""Page states and tree links in native code against their plain twins."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from cache_twins import FREE, HOLD, LOCK, NONE, PIN, PageStatesTwin, TreeTwin
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmesh.kernels import _native

PAGES = 12
LEVELS = 3
SOME = st.lists(st.integers(0, PAGES - 1), unique=True, max_size=6)
DELTAS = st.sampled_from([LOCK, -LOCK, HOLD, -HOLD, PIN, -PIN, LOCK - HOLD, HOLD - LOCK, PIN - HOLD, HOLD - PIN])


def numbers(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


USES, LEVEL, PRIORITY, NODE = 0, 1, 3, 5
"""Positions in the tuple of columns."""


def page_columns(count: int) -> tuple[np.ndarray, ...]:
    kinds = (np.int64, np.uint8, np.uint8, np.uint8, np.int32, np.int32, np.int32)
    return tuple(np.zeros(count, dtype=kind) for kind in kinds)


class PageHistories(RuleBasedStateMachine):
    """Every call gives what the twin gives; queues are compared by emptying both at the end and in between."""

    def __init__(self) -> None:
        super().__init__()
        rng = np.random.default_rng(3)
        columns = page_columns(PAGES)
        columns[PRIORITY][:] = rng.integers(34, 37, PAGES)
        columns[NODE][:] = rng.integers(-1, 2, PAGES)
        self.native_columns = tuple(column.copy() for column in columns)
        self.twin_columns = tuple(column.copy() for column in columns)
        self.native = _native.PageStates(self.native_columns, LEVELS)
        self.twin = PageStatesTwin(self.twin_columns, LEVELS)

    def both(self, call: Callable[[_native.PageStates | PageStatesTwin], object]) -> None:
        outcomes = []
        for states in (self.twin, self.native):
            try:
                outcomes.append(call(states))
            except (ValueError, IndexError) as error:
                outcomes.append(type(error))
        assert outcomes[0] == outcomes[1]

    @rule(pages=SOME, level=st.integers(0, LEVELS - 1), group=st.integers(0, 3), priority=st.integers(0, 100))
    def place(self, pages: list[int], level: int, group: int, priority: int) -> None:
        pages = [page for page in pages if not self.twin_columns[USES][page]]
        slots = numbers([3 * page for page in pages])
        priorities = priority if group else np.arange(len(pages), dtype=np.uint8)
        self.both(lambda states: states.discard(numbers(pages)))
        self.both(lambda states: states.place(numbers(pages)[::-1], slots[::-1], level, group, priorities))

    @rule(pages=SOME, delta=DELTAS)
    def change(self, pages: list[int], delta: int) -> None:
        def call(states: _native.PageStates | PageStatesTwin) -> list[int]:
            freed = np.full(PAGES, -7, dtype=np.int32)
            return freed[: states.change(numbers(pages), delta, freed)].tolist()

        self.both(call)

    @rule(pages=SOME, front=st.booleans())
    def push(self, pages: list[int], front: bool) -> None:
        self.both(lambda states: states.push(numbers(pages), front))

    @rule(pages=SOME)
    def discard(self, pages: list[int]) -> None:
        self.both(lambda states: states.discard(numbers(pages)))

    @rule(pages=SOME, value=st.integers(-1, 1))
    def attach(self, pages: list[int], value: int) -> None:
        for columns in (self.native_columns, self.twin_columns):
            columns[NODE][pages] = value

    @rule(page=st.integers(0, PAGES - 1), value=st.sampled_from([0, 35, 63, 64, 100, 255]))
    def change_priority(self, page: int, value: int) -> None:
        for columns in (self.native_columns, self.twin_columns):
            columns[PRIORITY][page] = value

    @rule(pages=SOME, level=st.integers(0, LEVELS - 1), queue=st.booleans())
    def relocate(self, pages: list[int], level: int, queue: bool) -> None:
        self.both(lambda states: states.relocate(numbers(pages), level))
        for columns in (self.native_columns, self.twin_columns):
            columns[LEVEL][pages] = level
        if queue:
            self.both(lambda states: states.push(numbers(pages), False))

    @precondition(lambda self: any(self.twin.queued(level) for level in range(LEVELS)))
    @rule(level=st.integers(0, LEVELS - 1), count=st.integers(0, PAGES))
    def pop(self, level: int, count: int) -> None:
        def call(states: _native.PageStates | PageStatesTwin) -> list[int]:
            out = np.full(count, -7, dtype=np.int32)
            return out[: states.pop(level, out)].tolist()

        self.both(call)

    @invariant()
    def same_counts(self) -> None:
        for native, twin in zip(self.native_columns, self.twin_columns, strict=True):
            assert native.tolist() == twin.tolist()
        assert self.native.num_locked == self.twin.num_locked
        for level in range(LEVELS):
            assert self.native.fixed(level) == self.twin.fixed(level)
            assert self.native.held(level) == self.twin.held(level)
            assert self.native.queued(level) == self.twin.queued(level)
        mask = np.empty(PAGES, dtype=np.bool_)
        self.native.queued_into(mask)
        queued = [self.twin.is_queued(page) for page in range(PAGES)]
        assert [self.native.is_queued(page) for page in range(PAGES)] == queued == mask.tolist()

    def teardown(self) -> None:
        for level in range(LEVELS):
            self.pop(level, PAGES)


TestPageHistories = PageHistories.TestCase
TestPageHistories.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_page_states_refuse_what_does_not_fit() -> None:
    columns = page_columns(4)
    with pytest.raises(ValueError, match="one entry for each page"):
        _native.PageStates((*columns[:-1], numbers([0])), 1)
    with pytest.raises(TypeError, match="tuple of 7"):
        _native.PageStates(columns[:-1], 1)
    with pytest.raises(ValueError, match="levels"):
        _native.PageStates(columns, 0)
    states = _native.PageStates(columns, 1)
    with pytest.raises(ValueError, match="as many slots"):
        states.place(numbers([0, 1]), numbers([0]), 0, 0, 35)
    with pytest.raises(IndexError, match="level 1"):
        states.place(numbers([0]), numbers([0]), 1, 0, 35)
    for pages in ([4], [-1]):
        with pytest.raises(IndexError, match=r"not in 0\.\.3"):
            states.change(numbers(pages), LOCK, numbers([0]))
    with pytest.raises(ValueError, match="room for 2"):
        states.change(numbers([0, 1]), LOCK, numbers([0]))
    with pytest.raises(ValueError, match="not locked"):
        states.change(numbers([0]), -LOCK, numbers([0]))
    with pytest.raises(IndexError, match="level 1"):
        states.pop(1, numbers([0]))
    with pytest.raises(ValueError, match="each of 4 pages"):
        states.queued_into(np.empty(3, dtype=np.bool_))
    assert not columns[USES].any()


NODES = 40
GROUPS = 2
WIDTH = 4


def columns_of_a_tree() -> tuple[np.ndarray, ...]:
    columns = [np.full(NODES, NONE, dtype=np.int32) for _ in range(6 + GROUPS)]
    columns[4][:] = 0
    return tuple(columns)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_chains_and_subtrees(data: st.DataObject) -> None:
    columns, twin = columns_of_a_tree(), TreeTwin(GROUPS)
    parent, first_child, next_, previous, num_children, num_tokens = columns[:6]
    rows, expected_rows = np.zeros((NODES, WIDTH), dtype=np.int32), {}
    rng = np.random.default_rng(1)
    free = list(range(NODES))
    for _ in range(data.draw(st.integers(1, 12))):
        if twin.parents and data.draw(st.booleans()):
            blocks = [node for node in twin.parents if node not in twin.roots]
            gone = data.draw(st.lists(st.sampled_from(blocks), max_size=6)) if blocks else []
            gone += data.draw(st.lists(st.sampled_from(free), max_size=1)) if free else []
            removed, roots = _native.unlink_subtrees(columns, numbers(gone))
            expected = twin.unlink_subtrees(gone)
            assert tuple(np.frombuffer(part, dtype=np.int32).tolist() for part in (removed, roots)) == expected
            free += expected[0] + expected[1]
            for node in expected[0]:
                for group in range(GROUPS):
                    columns[6 + group][node] = NONE
                    twin.pages[group].pop(node, None)
        elif len(free) > 4:
            if not twin.parents or data.draw(st.integers(0, 4)) == 0:
                above = free.pop()
                twin.add_root(above)
                num_tokens[above], parent[above], first_child[above], num_children[above] = 0, NONE, NONE, 0
            else:
                above = data.draw(st.sampled_from(sorted(twin.parents)))
            nodes = [free.pop(0) for _ in range(data.draw(st.integers(1, 3)))]
            tokens = rng.integers(0, 2, (len(nodes), WIDTH), dtype=np.int32)
            _native.link_chain(columns, rows, above, numbers(nodes), tokens)
            expected_rows |= dict(zip(nodes, tokens.tolist(), strict=True))
            twin.link_chain(above, nodes)
            for node in nodes:
                for group in range(GROUPS):
                    if data.draw(st.booleans()):
                        columns[6 + group][node] = twin.pages[group][node] = node
        assert _native.check_links(columns)
        for node in range(NODES):
            assert (num_tokens[node] != FREE) == (node in twin.parents)
        for node, children in twin.children.items():
            found, child = [], int(first_child[node])
            while child != NONE:
                found.append(child)
                assert parent[child] == node
                assert next_[child] == NONE or previous[next_[child]] == child
                child = int(next_[child])
            assert found == children
            wanted = rng.integers(0, 2, data.draw(st.integers(1, WIDTH + 1)), dtype=np.int32)
            assert _native.shared_prefixes(columns, rows, node, wanted) == [
                (child, common(expected_rows[child], wanted.tolist())) for child in children
            ]
            assert num_children[node] == len(children)


def common(row: list[int], wanted: list[int]) -> int:
    width = min(len(row), len(wanted))
    return next((i for i in range(width) if row[i] != wanted[i]), width)


def test_links_refuse_what_does_not_fit() -> None:
    columns, rows = columns_of_a_tree(), np.zeros((NODES, WIDTH), dtype=np.int32)
    with pytest.raises(ValueError, match="need 4 tokens"):
        _native.link_chain(columns, rows, 0, numbers([1]), rows[:2])
    with pytest.raises(ValueError, match="as many as the nodes"):
        _native.link_chain(columns, rows[:7], 0, numbers([1]), rows[:1])
    with pytest.raises(IndexError, match="node 40"):
        _native.link_chain(columns, rows, 0, numbers([40]), rows[:1])
    with pytest.raises(IndexError, match="node -1"):
        _native.link_chain(columns, rows, -1, numbers([0]), rows[:1])
    with pytest.raises(TypeError, match="tuple"):
        _native.unlink_subtrees(list(columns), numbers([0]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="same length"):
        _native.unlink_subtrees((*columns, numbers([0])), numbers([0]))
    columns[5][3] = 0
    with pytest.raises(ValueError, match="node 3 is a root"):
        _native.unlink_subtrees(columns, numbers([3]))
