"""Words that are changed in one step."""

from __future__ import annotations

import mmap
import threading
from typing import Any

import pytest

from kvmesh.kernels.shared_words import compare_exchange_word, exchange_word

LARGEST = 2**64 - 1


@pytest.fixture
def words() -> memoryview[int]:
    return memoryview(mmap.mmap(-1, 4096)).cast("Q")


def test_an_exchange_says_what_was_there(words: memoryview[int]) -> None:
    assert exchange_word(words, 511, LARGEST) == 0
    assert exchange_word(words, 511, 7) == LARGEST
    assert words[511] == 7
    assert not any(words[:511])


def test_a_word_that_is_not_as_expected_stays(words: memoryview[int]) -> None:
    words[3] = LARGEST
    assert not compare_exchange_word(words, 3, LARGEST - 1, 5)
    assert words[3] == LARGEST
    assert compare_exchange_word(words, 3, LARGEST, 5)
    assert words[3] == 5


def test_no_step_of_several_threads_is_lost(words: memoryview[int]) -> None:
    steps, threads = 2000, 4

    running = [threading.Thread(target=count_exactly, args=(words, steps)) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert words[0] == threads * steps


def count_exactly(words: memoryview[int], steps: int) -> None:
    """Add 1 so many times, each time to what is there."""
    for _ in range(steps):
        seen = words[0]
        while not compare_exchange_word(words, 0, seen, seen + 1):
            seen = words[0]


@pytest.mark.parametrize(
    ("index", "desired", "error", "message"),
    [
        (512, 1, IndexError, r"word 512 is not in 0\.\.511"),
        (-1, 1, IndexError, "word -1 is not in"),
        (0, LARGEST + 1, OverflowError, "too big"),
        (0, -1, OverflowError, "negative"),
        ("0", 1, TypeError, "integer"),
        (0, 1.5, TypeError, "int"),
    ],
)
def test_what_is_no_word_is_refused(
    words: memoryview[int], index: Any, desired: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        exchange_word(words, index, desired)
    with pytest.raises(error, match=message):
        compare_exchange_word(words, index, 0, desired)
    assert not any(words)


def test_what_is_no_memory_of_words_is_refused(words: memoryview[int]) -> None:
    with pytest.raises(BufferError, match="not writable"):
        exchange_word(memoryview(bytes(8)).cast("Q"), 0, 1)
    with pytest.raises(TypeError, match="8-byte"):
        exchange_word(memoryview(bytearray(8)).cast("I"), 0, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes 3 arguments"):
        exchange_word(words, 0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="takes 4 arguments"):
        compare_exchange_word(words, 0, 1)  # type: ignore[call-arg]
