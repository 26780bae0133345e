"""Engines of several ranks: their answers are those of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Make = Callable[..., Any]


def test_two_tensor_ranks(make_engine: Make, request_of: Make, prompt: Make) -> None:
    requests = [request_of(f"r{i}", prompt(5 + 9 * i, i)) for i in range(4)]
    expected = [answer.tokens for answer in make_engine().run(*requests)]
    bench = make_engine(tensor_parallel_size=2)
    assert [answer.tokens for answer in bench.run(*requests)] == expected
    bench.check_idle()
