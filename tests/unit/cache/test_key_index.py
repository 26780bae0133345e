"""The native key index against its plain twin, on random histories and on the shapes that open addressing fears."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmesh.cache.key_index import KEY_BYTES, KeyIndex, KeyIndexReference

PREFIX = b"8 equal!"
"""The first 8 bytes of half of all keys here: they share their home slot whatever the secret number is."""


def key_of(number: int) -> bytes:
    digest = hashlib.sha256(number.to_bytes(8, "big")).digest()
    return PREFIX + digest[8:] if number % 2 else digest


def as_nodes(numbers: Sequence[int]) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


KEYS = st.integers(0, 60).map(key_of)
BAD_KEYS = st.sampled_from([b"", bytes(31), bytes(33), bytearray(32), None])
NODES = st.integers(-2, 70)


class Histories(RuleBasedStateMachine):
    """Every call gives what the twin gives, errors included, and errors change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.native = KeyIndex(4)
        self.twin = KeyIndexReference(4)
        self.capacity = 4

    def both(self, call: Callable[[KeyIndex | KeyIndexReference], object]) -> None:
        outcomes: list[tuple[str, object]] = []
        for index in (self.twin, self.native):
            try:
                value = call(index)
            except (ValueError, IndexError, TypeError) as error:
                outcomes.append(("error", type(error)))
            else:
                outcomes.append(("value", value.tolist() if isinstance(value, np.ndarray) else value))
        assert outcomes[0] == outcomes[1]

    @rule(more=st.integers(-1, 40))
    def grow(self, more: int) -> None:
        wanted = self.capacity + more
        self.both(lambda index: index.grow(wanted))
        self.capacity = max(self.capacity, wanted)

    @rule(pairs=st.lists(st.tuples(KEYS, NODES), max_size=12))
    def add(self, pairs: list[tuple[bytes, int]]) -> None:
        self.both(lambda index: index.add([key for key, _ in pairs], as_nodes([node for _, node in pairs])))

    @rule(data=st.data())
    def add_what_fits(self, data: st.DataObject) -> None:
        keys = data.draw(st.lists(KEYS.filter(lambda key: self.twin.find(key) < 0), unique=True, max_size=20))
        free = [node for node in range(self.capacity) if node not in set(self.used())]
        order = data.draw(st.permutations(free))[: len(keys)]
        self.both(lambda index: index.add(tuple(keys[: len(order)]), as_nodes(order)))

    @rule(key=BAD_KEYS)
    def bad_keys(self, key: bytes) -> None:
        self.both(lambda index: index.find(key))
        self.both(lambda index: index.walk([key]))
        self.both(lambda index: index.add([key], as_nodes([0])))

    @precondition(lambda self: len(self.twin))
    @rule(data=st.data())
    def remove_what_is_there(self, data: st.DataObject) -> None:
        nodes = data.draw(st.lists(st.sampled_from(self.used()), unique=True))
        assert self.native.names(as_nodes(nodes))
        self.both(lambda index: index.names(as_nodes(nodes)))
        self.both(lambda index: index.remove(as_nodes(nodes)))

    @rule(nodes=st.lists(NODES, max_size=4))
    def remove(self, nodes: list[int]) -> None:
        self.both(lambda index: index.keys(as_nodes(nodes)))
        self.both(lambda index: index.names(as_nodes(nodes)))
        self.both(lambda index: index.remove(as_nodes(nodes)))

    @rule(keys=st.lists(KEYS, max_size=20))
    def walk(self, keys: list[bytes]) -> None:
        self.both(lambda index: index.walk(keys))

    @rule(node=NODES)
    def key(self, node: int) -> None:
        self.both(lambda index: index.key(node))

    @invariant()
    def same_content(self) -> None:
        self.both(len)
        for number in range(61):
            key = key_of(number)
            assert self.native.find(key) == self.twin.find(key)

    def used(self) -> list[int]:
        return [node for node in (self.twin.find(key_of(number)) for number in range(61)) if node >= 0]


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.sets(st.integers(0, 1999), max_size=1990))
@settings(max_examples=20, deadline=None)
def test_removals_out_of_one_cluster_leave_the_rest_findable(removed: set[int]) -> None:
    keys = [PREFIX + number.to_bytes(KEY_BYTES - 8, "big") for number in range(2000)]
    index = KeyIndex(2000)
    index.add(keys, np.arange(2000, dtype=np.int32))
    gone = sorted(removed)
    assert index.remove(as_nodes(gone)) == [keys[number] for number in gone]
    assert [index.find(key) for key in keys] == [-1 if n in removed else n for n in range(2000)]
    index.add([keys[number] for number in gone], as_nodes(gone[::-1]))
    assert len(index.walk(keys)) == 2000


def test_a_long_life_at_full_capacity_grows_and_churns_without_loss() -> None:
    rng = np.random.default_rng(5)
    index, twin = KeyIndex(0), KeyIndexReference(0)
    made = 0
    free = np.empty(0, dtype=np.int32)
    before = 0
    for capacity in (100, 1000, 1001, 20_000):
        index.grow(capacity)
        twin.grow(capacity)
        free = np.concatenate((free, np.arange(before, capacity, dtype=np.int32)))
        before = capacity
        for _ in range(3):
            keys = [key_of(2 * (made + i)) for i in range(len(free))]
            made += len(free)
            index.add(keys, free)
            twin.add(keys, free)
            assert len(index) == len(twin) == capacity
            shuffled = rng.permutation(capacity).astype(np.int32)
            free, left = shuffled[: capacity // 2], shuffled[capacity // 2 :]
            assert index.remove(free) == twin.remove(free)
            kept = twin.keys(left)
            assert index.keys(left) == kept
            assert index.walk(kept).tolist() == left.tolist()


def test_it_takes_about_40_bytes_per_node() -> None:
    assert 36 <= KeyIndex(1 << 20).nbytes() / (1 << 20) <= 44
    # The table doubles just before its load would pass 0.7.
    assert KeyIndex(734_003).nbytes() / 734_003 < 44
    assert KeyIndex(734_004).nbytes() / 734_004 < 44


def test_arrays_of_another_kind_are_refused() -> None:
    index = KeyIndex(4)
    with pytest.raises(TypeError, match="4-byte"):
        index.add([key_of(0)], np.zeros(1, dtype=np.int64))
    with pytest.raises(ValueError, match="contiguous"):
        index.remove(np.zeros(4, dtype=np.int32)[::2])
    with pytest.raises(ValueError, match="as many nodes"):
        index.add([key_of(0)], as_nodes([1, 2]))
    with pytest.raises(ValueError, match="room for 2"):
        index.walk_into([key_of(0), key_of(2)], as_nodes([0]))
    with pytest.raises(ValueError, match="capacity"):
        KeyIndex(-1)
    assert len(index) == 0
