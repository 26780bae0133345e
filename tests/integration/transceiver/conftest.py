"""Pairs of engine processes that move pages between them for real."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("engine_process.py")
ANSWER_TIMEOUT_S = 60.0
NUM_PAGES = 96
PAGE_KIB = 64

WAYS = {
    "memfd": ({"backend": "DEFAULT"}, "memfd"),
    "tcp": ({"backend": "DEFAULT"}, "tcp"),
    "nixl": ({"backend": "NIXL"}, "auto"),
}


class RemoteError(Exception):
    """An ApiError in the process: (status, code, message)."""


class Peer:
    """An engine process; its methods are those of ``EngineProcess``."""

    def __init__(self, name: str, way: str, environment: dict[str, str] | None = None, **settings: Any) -> None:
        transceiver, plane = WAYS[way]
        transceiver = {**transceiver, **settings.pop("transceiver", {})}
        self.name = name
        arguments = {
            "name": name,
            "num_pages": NUM_PAGES,
            "page_kib": PAGE_KIB,
            "plane": settings.pop("plane", plane),
            "checksums": True,
            "transceiver": transceiver,
            **settings,
        }
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
        )

    def wait_ready(self) -> None:
        self.backend = self._answer()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps([name, arguments]).encode() + b"\n")
            self.process.stdin.flush()
            return self._answer()

        return call

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], ANSWER_TIMEOUT_S)
        assert ready, f"{self.name} does not answer"
        line = self.process.stdout.readline()
        assert line, f"{self.name} has ended with {self.process.wait(10)}"
        answer = json.loads(line)
        if "error" in answer:
            raise RemoteError(*answer["error"])
        return answer["result"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> None:
        """SIGSTOP; returns when the process has stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def proceed(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> int:
        """Leave in an orderly way; returns the exit status."""
        self.shutdown()
        return self.process.wait(20)

    def clean_up(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


class Pair:
    """A context and a generation process, and what executors do with them."""

    def __init__(self, way: str, context: dict[str, Any], generation: dict[str, Any]) -> None:
        self.way = way
        self.context = Peer("context", way, **context)
        self.generation = Peer("generation", way, **generation)

    def start(self) -> Pair:
        self.context.wait_ready()
        self.generation.wait_ready()
        self.context.fill(seed=1)
        self.generation.fill(seed=2)
        return self

    def stop(self) -> None:
        self.context.clean_up()
        self.generation.clean_up()

    def move(self, transfer: int, source: list[int], target: list[int], first: int = 0) -> None:
        """One whole transfer, checked."""
        self.generation.ask(
            transfer=transfer, handoff=self.context.offer(transfer=transfer, pages=source), pages=target, first=first
        )
        received = self.settle(self.generation, "generation", {transfer})
        assert received["completed"] == [transfer], received
        assert self.settle(self.context, "context", {transfer})["completed"] == [transfer]
        assert self.generation.digest(pages=target[first:]) == self.context.digest(pages=source[first:])

    def settle(self, peer: Peer, side: str, transfers: set[int], timeout_s: float = 20.0) -> dict[str, list[Any]]:
        """Step an executor until ``transfers`` have ended, cancelling what is overdue."""
        total: dict[str, list[Any]] = {"completed": [], "failed": [], "cancelled": [], "timed_out": [], "overdue": []}
        deadline_s = time.monotonic() + timeout_s
        cancelling: set[int] = set()
        while True:
            step = peer.step(side=side)
            for key, values in step.items():
                total[key] += values
            cancelling |= set(step["overdue"])
            cancelling = {transfer for transfer in cancelling if not peer.cancel(transfer=transfer)}
            ended = {*total["completed"], *total["cancelled"], *(failure[0] for failure in total["failed"])}
            if transfers <= ended:
                return total
            assert time.monotonic() < deadline_s, f"{side}: {transfers - ended} have not ended: {total}"
            time.sleep(0.005)

    def release(self, peer: Peer, side: str, timeout_s: float = 20.0) -> None:
        """Step an executor until no lease is held."""
        deadline_s = time.monotonic() + timeout_s
        while held := peer.held():
            peer.step(side=side)
            for transfer in held:
                peer.cancel(transfer=transfer)
            assert time.monotonic() < deadline_s, f"{side}: pages of {held} are lost"
            time.sleep(0.005)


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Pair]]:
    """Starts pairs; ``make_pair("memfd", timeout_ms=300)``."""
    pairs: list[Pair] = []

    def make(
        way: str,
        *,
        timeout_ms: int = 60_000,
        context: dict[str, Any] | None = None,
        generation: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Pair:
        settings = {"transceiver": {"kv_transfer_timeout_ms": timeout_ms}, **settings}
        pair = Pair(way, {**settings, **(context or {})}, {**settings, **(generation or {})})
        pairs.append(pair)
        return pair.start()

    yield make
    for pair in pairs:
        pair.stop()


@pytest.fixture(scope="module", params=list(WAYS))
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A pair that the tests of a module share and leave whole, over each way."""
    pair = Pair(request.param, {}, {})
    try:
        yield pair.start()
    finally:
        pair.stop()
