"""A factory of small V1 caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from v1_cache import SmallCache


@pytest.fixture
def make_cache() -> Iterator[Callable[..., SmallCache]]:
    """At the end of the test each cache is checked, emptied and closed, and nothing may be missing."""
    made: list[SmallCache] = []

    def make(*args: int, **options: object) -> SmallCache:
        made.append(SmallCache(*args, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for cache in made:
        cache.finish()
