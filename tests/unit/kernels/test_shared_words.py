"""Words that are changed in one step."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
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


COUNTING = """
import mmap, sys
from kvmesh.kernels.shared_words import compare_exchange_word, exchange_word
words = memoryview(mmap.mmap(int(sys.argv[1]), 4096)).cast("Q")
exchange_word(words, int(sys.argv[2]), 1)
while not words[1] or not words[2]:
    pass
for step in range(int(sys.argv[3])):
    seen = words[0]
    while not compare_exchange_word(words, 0, seen, seen + 1):
        seen = words[0]
"""


def test_no_step_of_two_processes_is_lost() -> None:
    """Threads of one interpreter would not show it: a step keeps them out."""
    steps = 100_000
    fd = os.memfd_create("words", 0)
    os.ftruncate(fd, 4096)
    counting = [
        subprocess.Popen([sys.executable, "-c", COUNTING, str(fd), str(mark), str(steps)], pass_fds=[fd])
        for mark in (1, 2)
    ]
    assert [process.wait(60) for process in counting] == [0, 0]
    words = memoryview(mmap.mmap(fd, 4096)).cast("Q")
    os.close(fd)
    assert words[0] == len(counting) * steps


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
