"""Philox against the known-answer vectors of Random123, and the uniform draw over it."""

from __future__ import annotations

import pytest

from kvmesh.engine.philox import philox4x32, uniform

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    assert philox4x32(counter, key) == expected


def test_uniform_is_a_function_of_seed_and_position() -> None:
    assert uniform(7, 3) == uniform(7, 3)
    assert uniform(7, 3) != uniform(7, 4)
    assert uniform(7, 3) != uniform(8, 3)
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


def test_uniform_is_uniform() -> None:
    draws = [uniform(123, position) for position in range(20_000)]
    assert all(0.0 <= draw < 1.0 for draw in draws)
    counts = [0] * 20
    for draw in draws:
        counts[int(draw * 20)] += 1
    chi_square = sum((count - 1000) ** 2 / 1000 for count in counts)
    assert chi_square < 43.8  # 99.9 % quantile at 19 degrees of freedom
