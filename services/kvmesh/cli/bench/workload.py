"""Which requests a benchmark sends, and when; pure and reproducible from a seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["SAMPLE_TEXT", "LengthRange", "RequestSpec", "arrivals_s", "requests"]

SAMPLE_TEXT = (
    "The harbour was quiet in the early morning, and the boats lay still on the grey water. A woman in a red coat "
    "walked along the pier, counting the lamps that were still lit. She had come every day this week to meet a ship "
    "that was late. Behind her the market opened: boxes of apples, warm bread, fish on ice, old books and new "
    "umbrellas. A boy asked what time it was; nobody knew. Two engineers argued about the price of copper, about "
    "queues and memory, about how long a person will wait for an answer before leaving. The wind turned to the north, "
    "clouds gathered over the hills, and by noon rain fell on roofs, gardens and the narrow road to the station."
)
"""Prompts are made of this text's tokens, so that any model's vocabulary will do."""


class LengthRange(NamedTuple):
    """Lengths in tokens, both ends included; drawn uniformly."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> LengthRange:
        """``"128"`` or ``"128:512"``.

        Raises:
            ValueError: it is neither, or not positive.
        """
        first, _, last = text.partition(":")
        lengths = cls(int(first), int(last or first))
        if not 0 < lengths.least <= lengths.most:
            raise ValueError(f"{text!r} is no range of positive lengths")
        return lengths

    def draw(self, source: random.Random) -> int:
        """One length."""
        return source.randint(self.least, self.most)


class RequestSpec(NamedTuple):
    """One request."""

    group: str
    prompt_token_ids: list[int]
    max_tokens: int


def requests(
    group: str,
    vocabulary: Sequence[int],
    prompt: LengthRange,
    output: LengthRange,
    *,
    seed: int,
    shared_prefix_tokens: int = 0,
) -> Iterator[RequestSpec]:
    """Endless requests with prompts that have nothing in common but ``shared_prefix_tokens`` leading tokens.

    Args:
        group: name under which they are summed up.
        vocabulary: token ids that prompts are made of.
        prompt: length of the prompts, the shared prefix included.
        output: length of the answers.
        seed: equal seeds give equal requests.
        shared_prefix_tokens: like a system prompt that all users share.
    """
    source = random.Random(f"{group}/{seed}")
    shared = source.choices(vocabulary, k=shared_prefix_tokens)
    while True:
        length = prompt.draw(source)
        ids = (shared + source.choices(vocabulary, k=max(1, length - len(shared))))[: max(length, len(shared) + 1)]
        yield RequestSpec(group, ids, output.draw(source))


def arrivals_s(rate: float, *, seed: int) -> Iterator[float]:
    """Times since the start at which requests arrive: a Poisson process of ``rate`` a second, without end."""
    source = random.Random(f"arrivals/{seed}")
    return itertools.accumulate(source.expovariate(rate) for _ in itertools.count())
