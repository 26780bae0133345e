"""Digests of what is held: equal to the plain sum over any history, and what goes over the wire."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.events.digests import (
    DIGEST_REQUEST,
    Digest,
    DigestAnswer,
    DigestError,
    DigestKey,
    answer_frames,
    differences,
    digest_of,
    mix,
    mixed_sum,
    parse_answer,
)
from kvmesh.events.records import Tier

hashes = st.lists(st.integers(0, 2**64 - 1), unique=True)


def test_the_mixing_function_is_splitmix64s_finaliser() -> None:
    """The first three numbers of splitmix64 seeded with 0 (the published test vector): its state is finalised."""
    golden = 0x9E3779B97F4A7C15
    assert [mix(golden * i) for i in (1, 2, 3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert mix(-1) == mix(2**64 - 1)


@given(hashes)
def test_many_at_once_are_the_sum_of_each(numbers: list[int]) -> None:
    assert mixed_sum(np.array(numbers, np.uint64)) == sum(map(mix, numbers)) % 2**64
    assert digest_of(numbers) == Digest(len(numbers), mixed_sum(np.array(numbers, np.uint64)))


@given(hashes, st.data())
def test_what_is_added_and_taken_away_in_any_order_leaves_nothing(numbers: list[int], data: st.DataObject) -> None:
    digest = Digest()
    for number in numbers:
        digest = digest.plus(digest_of([number]))
    assert digest == digest_of(reversed(numbers))
    for number in data.draw(st.permutations(numbers)):
        digest = digest.minus(digest_of([number - 2**64]))
    assert digest == Digest()


KEYS = st.builds(
    DigestKey,
    st.sampled_from(Tier),
    st.none() | st.integers(0, 2**31) | st.text(max_size=3),
    st.none() | st.text(max_size=3),
)


@given(
    st.integers(0, 2**64 - 1), st.dictionaries(KEYS, st.builds(Digest, st.integers(0, 9), st.integers(0, 2**64 - 1)))
)
def test_an_answer_is_read_as_it_was_written(sequence: int, digests: dict[DigestKey, Digest]) -> None:
    kept = {key: digest for key, digest in digests.items() if digest != Digest()}
    assert parse_answer(answer_frames(sequence, digests)) == DigestAnswer(sequence, kept)


def test_the_answer_byte_for_byte() -> None:
    frames = answer_frames(258, {DigestKey(Tier.HOST, 7, "s"): Digest(1, 5), DigestKey(Tier.DISK, "a"): Digest(2, 6)})
    assert frames[:3] == [b"", b"digest", b"\0\0\0\0\0\0\1\2"]
    assert msgspec.msgpack.decode(frames[3]) == [[1, 7, None, "s", 1, 5], [2, None, "a", None, 2, 6]]


@pytest.mark.parametrize(
    "frames", [[], [b""], [b"", b"", b"\xff" * 8, b""], [b"", b"\xff" * 8, b""], [b"", b"t", bytes(8), b"\x90"]]
)
def test_the_answers_of_those_who_offer_no_digests_are_not_taken_for_one(frames: list[bytes]) -> None:
    """wire.md §2.2: they ignore the request, or take it for a replay from a number that is not reached yet."""
    assert parse_answer(frames) is None


@pytest.mark.parametrize(
    ("sequence", "payload"),
    [
        (b"1", b"\x90"),
        (bytes(8), b""),
        (bytes(8), b"\xc1"),
        (bytes(8), msgspec.msgpack.encode([[3, None, None, None, 1, 1]])),
        (bytes(8), msgspec.msgpack.encode([[0, None, None, None, 1]])),
        (bytes(8), msgspec.msgpack.encode([[0, None, None, None, "1", 1]])),
    ],
)
def test_a_damaged_answer_is_refused(sequence: bytes, payload: bytes) -> None:
    with pytest.raises(DigestError):
        parse_answer([b"", DIGEST_REQUEST, sequence, payload])


def test_differences_are_named_with_their_size() -> None:
    device, host, salted = DigestKey(Tier.DEVICE), DigestKey(Tier.HOST), DigestKey(Tier.DEVICE, salt="1")
    told = {device: digest_of([1, 2]), host: digest_of([3, 4]), salted: digest_of([5])}
    held = {device: digest_of([2, 1]), host: digest_of([3, 9]), DigestKey(Tier.DISK): digest_of([1, 2, 3])}
    assert differences(told, held) == {host: 0, salted: -1, DigestKey(Tier.DISK): 3}
    assert differences({device: Digest()}, {}) == {}
