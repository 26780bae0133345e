"""A cold tier that loses what it holds, refuses what it is given, or outlives its engine: never a wrong token.

``KVMESH_SOAK`` harms files of more models and tiers.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from cache_modes import REBALANCE, Mode, check_evidence
from cache_workload import check_answers, serve

from kvmesh.cache.storage.disk import FILE_PREFIX, PageFile
from kvmesh.config import CacheTransceiverConfig, KvCacheConfig, WorkerSettings
from kvmesh.engine.build import EngineBuildError
from kvmesh.engine.client import EngineClient

Make = Callable[..., Any]
pytestmark = pytest.mark.slow

MODES = {
    "disk": Mode(("to_disk",), ("starved",), disk=2.0),
    "host-disk": Mode(("to_host", "to_disk"), ("starved",), host=0.5, disk=2.0),
}
SINGLE_PAGES = {
    "host": Mode(("to_host", "damaged_pages"), host=1.0),
    "host-disk": Mode(("to_host", "to_disk", "damaged_pages"), host=0.5, disk=2.0),
    "rebalance": Mode(("rebalances", "to_host", "to_disk", "damaged_pages"), (), REBALANCE, host=0.5, disk=2.0),
}
SOAK = int(os.environ.get("KVMESH_SOAK", "0"))


def scribble(path: Path) -> None:
    """Flip bits in every page, in place."""
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(bytes(byte ^ 0x10 if place % 64 == 5 else byte for place, byte in enumerate(content)))


def empty(path: Path) -> None:
    """Cut everything off."""
    os.truncate(path, 0)


def cut(path: Path) -> None:
    """Cut off the second half, inside a page."""
    os.truncate(path, path.stat().st_size // 2 + 1)


HARMS = {"scribble": scribble, "empty": empty, "cut": cut, "delete": Path.unlink}


def disabled(logs: list[Any]) -> list[Any]:
    """What the log says of tiers that were turned off."""
    return [entry for entry in logs if "tier disabled" in entry["event"]]


def harmed(*cases: tuple[str, str, str]) -> list[tuple[str, str, str]]:
    """Ways to be harmed, on a model with a certain cache; all combinations when soaking."""
    return list(product(["llama", "gemma2"], HARMS, MODES)) if SOAK else list(cases)


@pytest.mark.parametrize(
    ("family", "harm", "tiers"),
    harmed(
        ("llama", "scribble", "host-disk"),
        ("gemma2", "cut", "disk"),
        ("gemma2", "empty", "host-disk"),
        ("llama", "delete", "disk"),
    ),
)
def test_files_harmed_between_rounds(
    family: str, harm: str, tiers: str, reference: Make, watched: Make, disk: Path
) -> None:
    """Every page that the tree thinks is on disk is bad when the same prompts come again."""
    expected, mode = reference(family), MODES[tiers]
    engine = watched(family, mode, expected)
    [(asks, answers), (second, second_answers)] = expected.rounds
    check_answers(serve(engine, "before", asks), answers, asks)
    files = list(disk.iterdir())
    assert len(files) == len(engine.manager.layout.pools)
    assert all(file.stat().st_size for file in files)
    for file in files:
        HARMS[harm](file)
    before = engine.evidence()
    with structlog.testing.capture_logs() as logs:
        check_answers(serve(engine, "after", second), second_answers, second)
        check_answers(serve(engine, "again", asks), answers, asks)
    evidence = engine.evidence()
    engine.close()
    check_evidence(evidence, mode)
    # A deleted file is noticed when the next page should go there; all that was in it is dropped at once.
    count = "dropped_pages" if harm == "delete" else "damaged_pages"
    assert evidence[count] > before[count]
    assert len(disabled(logs)) == (harm == "delete")


@pytest.mark.parametrize(("family", "harm"), [("llama", "scribble"), ("gemma2", "empty")])
def test_files_harmed_while_requests_run(family: str, harm: str, reference: Make, watched: Make, disk: Path) -> None:
    """Suspended requests find their own pages gone, and start anew."""
    expected = reference(family)
    engine = watched(family, MODES["disk"], expected)
    asks, answers = expected.rounds[0]

    def harm_all(step: int) -> None:
        if step % 3 == 0:
            for file in disk.iterdir():
                HARMS[harm](file)

    check_answers(serve(engine, "run", asks, each_step=harm_all), answers, asks)
    evidence = engine.evidence()
    engine.close()
    check_evidence(evidence, MODES["disk"])
    assert evidence["damaged_pages"] > 0
    assert evidence["lost"] > 0


@pytest.mark.parametrize(
    ("family", "tiers"),
    list(product(["llama-windows", "gemma2", "gemma3"], SINGLE_PAGES))
    if SOAK
    else [("llama-windows", "host"), ("llama-windows", "host-disk"), ("gemma2", "rebalance")],
)
def test_single_pages_harmed_while_requests_run(family: str, tiers: str, reference: Make, watched: Make) -> None:
    """One page of the host's memory and one of each file at a time: what continues it is moved together with it."""
    expected, mode = reference(family), SINGLE_PAGES[tiers]
    engine = watched(family, mode, expected)
    asks, answers = expected.rounds[0]
    layout = engine.manager.layout
    random = np.random.default_rng(0)

    def harm_some(step: int) -> None:
        if step % 4:
            return
        for level in engine.manager.storage._cold:
            for pool, sizes in zip(level, layout.pools, strict=True):
                if isinstance(pool, PageFile):
                    scribble_page(pool.path, sizes.page_bytes, random)
                elif pool.array.nbytes:
                    pool.array[int(random.integers(pool.array.nbytes))] ^= 0x10

    check_answers(serve(engine, "run", asks, each_step=harm_some), answers, asks)
    engine.manager.check_integrity()
    evidence = engine.evidence()
    engine.close()
    check_evidence(evidence, mode)


def scribble_page(path: Path, page_bytes: int, random: np.random.Generator) -> None:
    """Flip a bit of one page of a file, in place."""
    pages = path.stat().st_size // page_bytes
    if pages:
        place = int(random.integers(pages)) * page_bytes + 5
        with path.open("r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize(("family", "tiers"), [("llama", "disk"), ("gemma3", "host-disk")])
def test_a_disk_that_becomes_full(
    family: str, tiers: str, reference: Make, watched: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier is disabled, once and with its reason, while requests run; they and later ones are served."""
    expected, mode = reference(family), MODES[tiers]
    engine = watched(family, mode, expected)
    store, written = PageFile.store, 0

    def limited(file: PageFile, slots: Any, *rest: Any) -> None:
        nonlocal written
        written += len(slots)
        if written > 60:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        store(file, slots, *rest)

    monkeypatch.setattr(PageFile, "store", limited)
    with structlog.testing.capture_logs() as logs:
        for number, (asks, answers) in enumerate(expected.rounds):
            check_answers(serve(engine, f"round{number}", asks), answers, asks)
    [entry] = disabled(logs)
    assert (entry["log_level"], entry["level"]) == ("error", len(engine.manager.tiers) - 1)
    assert "No space left on device" in entry["reason"]
    assert engine.manager.can_suspend == bool(mode.host)
    evidence = engine.evidence()
    engine.close()
    check_evidence(evidence, mode)
    assert evidence["damaged_pages"] == 0


def test_a_disk_that_takes_nothing_at_start(reference: Make, watched: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that cannot have its files says so and does not start."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    expected = reference("llama")
    monkeypatch.setattr("kvmesh.cache.storage.disk.fcntl.flock", refuse)
    with pytest.raises(EngineBuildError, match="Read-only file system"):
        watched("llama", MODES["disk"], expected)


async def test_a_killed_engine_leaves_files_that_the_next_one_sweeps(models: dict[str, Path], disk: Path) -> None:
    """A start in the same directory removes what SIGKILL left, but not a running engine's; a clean stop leaves none."""
    settings = WorkerSettings(
        model=str(models["llama"]),
        device="cpu",
        num_threads=1,
        log_level="warning",
        max_batch_size=1,
        kv_cache_config=KvCacheConfig(
            tokens_per_block=4,
            max_tokens=140,
            host_cache_size=0,
            disk_cache_size=1 << 20,
            disk_cache_path=str(disk),
        ),
        cache_transceiver_config=CacheTransceiverConfig(),
    )
    own = disk / "not-ours"
    own.write_bytes(b"x")

    def files(pattern: str = f"{FILE_PREFIX}*") -> list[Path]:
        return sorted(disk.glob(pattern))

    async with EngineClient.launch(settings) as client:
        [first] = files()
        os.kill(client.ready.pid, signal.SIGKILL)
        await client.wait_dead()
    assert files() == [first]
    async with EngineClient.launch(settings) as client:
        [second] = files()
        assert second != first
        async with EngineClient.launch(settings):
            assert len(files()) == 2, "a running engine's file stays"
        assert files() == [second]
    assert files("*") == [own]
