"""Every backend by every way of moving pages: what arrives is what was sent, between two engine processes.

Backends: the built-in plane and NIXL move pages for themselves (runtime PYTHON); all five libraries move pieces through
staging buffers (runtime CPP). Ways: pages side by side, pages all over the pool, through bounce buffers, and slice by
slice while the prompt is computed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import pytest
from channel_peers import why_not

Pair = Any
"""tests/integration/transceiver/conftest.py"""

BOUNCE_MB: Final = 4
COUNT: Final = 40
"""Pages of a transfer; the staging buffers of the CPP runtime hold fewer, so that it goes in pieces."""
HOST_PAGES: Final = 48
STAGED_TOKENS: Final = 12 * 16


class Backend(NamedTuple):
    """A row of the matrix."""

    name: str
    settings: dict[str, Any]
    plane: str = "auto"

    @property
    def is_staged(self) -> bool:
        return self.settings.get("transceiver_runtime") == "CPP"

    @property
    def obstacle(self) -> str | None:
        """Why its tests cannot run here."""
        library = self.settings["backend"].lower()
        return None if library == "default" else why_not(library)


def staged(backend: str) -> dict[str, Any]:
    return {"backend": backend, "transceiver_runtime": "CPP", "max_tokens_in_buffer": STAGED_TOKENS}


BACKENDS: Final = (
    Backend("memfd", {"backend": "DEFAULT"}, "memfd"),
    Backend("tcp", {"backend": "DEFAULT"}, "tcp"),
    Backend("nixl", {"backend": "NIXL"}),
    Backend("staged memfd", staged("DEFAULT"), "memfd"),
    Backend("staged tcp", staged("DEFAULT"), "tcp"),
    Backend("staged nixl", staged("NIXL")),
    Backend("staged ucx", staged("UCX")),
    Backend("staged mooncake", staged("MOONCAKE")),
    Backend("staged mpi", staged("MPI")),
)


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    chosen: Backend = request.param
    if (reason := chosen.obstacle) is not None:
        pytest.skip(reason)
    return chosen


def start(make_pair: Callable[..., Pair], backend: Backend, **transceiver: Any) -> Pair:
    settings = {**backend.settings, "kv_transfer_timeout_ms": 60_000, **transceiver}
    pair = make_pair("memfd", transceiver=settings, plane=backend.plane)
    library = {"DEFAULT": "BUILTIN"}.get(backend.settings["backend"], backend.settings["backend"])
    assert pair.context.backend == pair.generation.backend == (f"CPP/{library}" if backend.is_staged else library)
    return pair


def contiguous(chance: random.Random) -> list[int]:
    first = chance.randrange(96 - COUNT)
    return list(range(first, first + COUNT))


def scattered(chance: random.Random) -> list[int]:
    return chance.sample(range(96), COUNT)


@pytest.mark.parametrize("lie", [contiguous, scattered])
def test_pages_arrive(
    make_pair: Callable[..., Pair], backend: Backend, lie: Callable[[random.Random], list[int]]
) -> None:
    chance = random.Random(5)
    pair = start(make_pair, backend)
    untouched = list(range(96))
    for transfer in range(1, 4):
        source, target = lie(chance), lie(chance)
        others = [page for page in untouched if page not in target]
        before = pair.generation.digest(pages=others)
        pair.move(transfer, source, target)
        assert pair.generation.digest(pages=others) == before, "nothing else is written"
    check_quiet(pair)


def test_pages_arrive_through_bounce_regions(make_pair: Callable[..., Pair], backend: Backend) -> None:
    """§6.6: what lies scattered goes in one piece, what lies together does not; the CPP runtime ignores the setting."""
    chance = random.Random(7)
    pair = start(make_pair, backend, kv_cache_bounce_size_mb=BOUNCE_MB)
    for transfer in range(1, 4):
        pair.move(transfer, scattered(chance), scattered(chance))
    pair.move(4, contiguous(chance), contiguous(chance))
    pair.move(5, list(range(96)), chance.sample(range(96), 96))
    sent, received = pair.context.stats(), pair.generation.stats()
    if backend.is_staged:
        assert sent["bounced_total"] == 0
        assert sent["bounce_fallbacks"] == received["bounce_fallbacks"] == {}
    else:
        # The last one is larger than the region.
        assert sent["bounced_total"] == 3
        assert sent["bounce_fallbacks"] == {"contiguous": 1, "not_offered": 1}
        assert received["bounce_fallbacks"] == {"no_room": 1}
        assert sent["staging_capacity_bytes"] == received["staging_capacity_bytes"] == BOUNCE_MB << 20
    check_quiet(pair)


def test_slices_arrive_while_the_rest_is_computed(make_pair: Callable[..., Pair], backend: Backend) -> None:
    """§6.5; generation first, with one slice where the receiver reads."""
    chance = random.Random(6)
    pipelined = backend.name == "nixl"
    pair = start(make_pair, backend, enable_pipelined_transfer=pipelined)
    for transfer in range(1, 4):
        source, target = scattered(chance), scattered(chance)
        pair.context.promise(transfer=transfer, blocks=COUNT)
        pair.generation.claim(transfer=transfer, address=pair.context.address(), pages=target)
        deadline_s = time.monotonic() + 20
        while pair.context.claimed() != [transfer]:
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        ends = [7, 8, 30, COUNT] if pipelined else [COUNT]
        for first, end in zip([0, *ends], ends, strict=False):
            assert pair.context.send_slice(transfer=transfer, pages=source[:end], first=first, is_last=end == COUNT)
        received = pair.settle(pair.generation, "generation", {transfer})
        assert received["completed"] == [transfer], received
        assert pair.generation.aux(transfer=transfer) == [1]
        assert pair.settle(pair.context, "context", {transfer})["completed"] == [transfer]
        assert pair.generation.digest(pages=target) == pair.context.digest(pages=source)
    check_quiet(pair)


def test_pages_of_the_host_tier_arrive_on_the_device(make_pair: Callable[..., Pair], backend: Backend) -> None:
    """Some of the owner's pages lie in its host tier, and are read, or written, from there."""
    chance = random.Random(8)
    settings = {**backend.settings, "kv_transfer_timeout_ms": 60_000}
    pair = make_pair("memfd", transceiver=settings, plane=backend.plane, host_pages=HOST_PAGES)
    for transfer, in_host in enumerate((COUNT, COUNT // 2, 1), start=1):
        source = chance.sample(range(96), COUNT - in_host) + chance.sample(range(96, 96 + HOST_PAGES), in_host)
        chance.shuffle(source)
        target = scattered(chance)
        handoff = pair.context.offer(transfer=transfer, pages=source)
        pair.generation.ask(transfer=transfer, handoff=handoff, pages=target)
        received: list[int] = []
        deadline_s = time.monotonic() + 20
        while not received:
            # Where pages are is looked up by the owner's executor, once somebody asks for them.
            pair.context.step(side="context")
            step = pair.generation.step(side="generation")
            assert step["failed"] == step["cancelled"] == []
            received = step["completed"]
            assert time.monotonic() < deadline_s
        assert pair.generation.digest(pages=target) == pair.context.digest(pages=source)
    check_quiet(pair)


def check_quiet(pair: Pair) -> None:
    """Nothing is held any more, and both ends leave in good order."""
    for peer, side in ((pair.context, "context"), (pair.generation, "generation")):
        pair.release(peer, side)
        stats = peer.stats()
        assert stats["quarantined_pages"] == stats["send_sessions"] == stats["receive_sessions"] == 0
        assert stats["failed_total"] == stats["cancelled_total"] == 0
        assert peer.end() == 0
