"""Engines in all modes of the KV cache, and what they should answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cache_modes import FAMILIES, ROOMY, Mode
from cache_workload import Ask, continued, first_turns, serve
from tiny_models import build
from watched_engine import WatchedEngine

Make = Callable[..., Any]

CHUNK = 24
WHOLE = 512
"""Tokens of a step that holds any prompt."""
SECOND_TURNS = 32


class Reference(NamedTuple):
    """Two rounds of requests, and the answers to each of them alone, with no cache."""

    model: Path
    rounds: list[tuple[list[Ask], list[list[int]]]]
    device_bytes: int
    """Of a tight cache."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models by family."""
    directory = tmp_path_factory.mktemp("models")
    for name, family in FAMILIES.items():
        build(family.builds, **family.overrides).save_pretrained(directory / name)
    return {name: directory / name for name in FAMILIES}


@pytest.fixture(scope="session")
def references() -> dict[tuple[str, int], Reference]:
    """Those known so far, by family and seed."""
    return {}


@pytest.fixture
def reference(
    models: dict[str, Path], references: dict[tuple[str, int], Reference], make_engine: Make
) -> Callable[..., Reference]:
    """``reference(family, seed)``."""

    def of(name: str, seed: int = 0) -> Reference:
        if (name, seed) not in references:
            references[name, seed] = _refer(name, seed, models[name], make_engine)
        return references[name, seed]

    return of


def _refer(name: str, seed: int, model: Path, make_engine: Make) -> Reference:
    cache, tokens = FAMILIES[name].cache, FAMILIES[name].tight_tokens
    off = {"enable_block_reuse": False, "host_cache_size": 0}
    alone = make_engine(model=str(model), tokens=int(ROOMY * tokens), max_num_tokens=WHOLE, cache={**cache, **off})

    def answer(asks: list[Ask]) -> list[list[int]]:
        stays = [ask._replace(gone_after=None) for ask in asks]
        return [serve(alone, f"{len(alone.answers)}", [ask])[0] for ask in stays]

    first = first_turns(seed)
    answers = answer(first)
    second = continued(first, answers, seed + 1)[:SECOND_TURNS]
    tight = make_engine(model=str(model), tokens=tokens, max_num_tokens=CHUNK, cache={**cache, "host_cache_size": 0})
    pools = zip(tight.cache.pools, tight.engine.manager.layout.pools, strict=True)
    device_bytes = sum(pages.total * pool.page_bytes for pages, pool in pools)
    return Reference(model, [(first, answers), (second, answer(second))], device_bytes)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """Where disk tiers are."""
    directory = tmp_path / "disk"
    directory.mkdir()
    return directory


@pytest.fixture
def watched(make_engine: Make, monkeypatch: pytest.MonkeyPatch, disk: Path) -> Callable[..., WatchedEngine]:
    """``watched(family, mode, reference, ...)``: an engine in that mode; more goes to ``make_engine``."""

    def make(family_name: str, mode: Mode, reference: Reference, disk: Path = disk, **options: Any) -> WatchedEngine:
        family = FAMILIES[family_name]
        return WatchedEngine(
            make_engine,
            monkeypatch,
            disk,
            model=str(reference.model),
            tokens=int(mode.size * family.tight_tokens),
            cache={**family.cache, **mode.cache_settings(reference.device_bytes, disk)},
            **{"max_num_tokens": CHUNK, **mode.settings, **options},
        )

    return make
