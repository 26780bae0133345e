"""Pairs of engine processes that move pages between them for real."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import pytest
from forked import PROCESSES
from freezing import freeze

from kvmesh.engine.launching import MPIEXEC_OPTIONS, find_mpiexec

SCRIPT = Path(__file__).with_name("engine_process.py")
ANSWER_TIMEOUT_S = 60.0
NUM_PAGES = 96
PAGE_KIB = 64

WAYS = {
    "memfd": ({"backend": "DEFAULT"}, "memfd"),
    "tcp": ({"backend": "DEFAULT"}, "tcp"),
    "nixl": ({"backend": "NIXL"}, "auto"),
    "staged-memfd": ({"backend": "DEFAULT", "transceiver_runtime": "CPP", "max_tokens_in_buffer": 64}, "memfd"),
    "staged-tcp": ({"backend": "DEFAULT", "transceiver_runtime": "CPP", "max_tokens_in_buffer": 64}, "tcp"),
    "staged-nixl": ({"backend": "NIXL", "transceiver_runtime": "CPP", "max_tokens_in_buffer": 64}, "auto"),
}


class RemoteError(Exception):
    """An ApiError in the process: (status, code, message)."""


class UnderMpiexec:
    """A process that is an MPI world of its own, with the methods of one of ``multiprocessing`` that tests use."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="kvm-mpi-")
        self._listener = Listener(str(Path(self._directory.name) / "s"))
        argv = [str(find_mpiexec()), *MPIEXEC_OPTIONS, sys.executable, str(SCRIPT), str(self._listener.address)]
        self._popen = subprocess.Popen(argv, stdin=subprocess.DEVNULL)

    def connect(self) -> Connection:
        """The pipe to it; a process that does not come is noticed when nothing answers."""
        with self._listener:
            return self._listener.accept()

    @property
    def exitcode(self) -> int | None:
        return self._popen.returncode

    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def kill(self) -> None:
        """mpiexec, and its process with it."""
        self._popen.terminate()

    def join(self, timeout_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout_s)
        self._directory.cleanup()


class Peer:
    """An engine process; its methods are those of ``EngineProcess``."""

    def __init__(self, name: str, way: str, **settings: Any) -> None:
        transceiver, plane = WAYS[way]
        transceiver = {**transceiver, **settings.pop("transceiver", {})}
        self.name = name = settings.pop("called", name)
        arguments = {
            "name": name,
            "num_pages": NUM_PAGES,
            "page_kib": PAGE_KIB,
            "plane": settings.pop("plane", plane),
            "checksums": True,
            "transceiver": transceiver,
            **settings,
        }
        self.process: Any
        if transceiver["backend"] == "MPI":
            self.process = UnderMpiexec()
            self._pipe = self.process.connect()
            self._pipe.send(arguments)
            return
        self._pipe, theirs = PROCESSES.Pipe()
        self.process = PROCESSES.Process(
            target=runpy.run_path,
            args=(str(SCRIPT),),
            kwargs={"init_globals": {"PIPE": theirs, "SETTINGS": arguments}, "run_name": "__main__"},
        )
        self.process.start()
        theirs.close()

    def wait_ready(self) -> None:
        self.backend = self._answer()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            self._pipe.send((name, arguments))
            return self._answer()

        return call

    def _answer(self) -> Any:
        assert self._pipe.poll(ANSWER_TIMEOUT_S), f"{self.name} does not answer"
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise AssertionError(f"{self.name} has ended with {self._join()}") from None
        if "error" in answer:
            raise RemoteError(*answer["error"])
        return answer["result"]

    def _join(self) -> int | None:
        self.process.join(20)
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()
        assert self._join() == -signal.SIGKILL

    def stop(self) -> None:
        """SIGSTOP; returns when the process has stopped."""
        freeze(self.process.pid or 0)

    def proceed(self) -> None:
        os.kill(self.process.pid or 0, signal.SIGCONT)

    def end(self) -> int | None:
        """Leave in an orderly way; returns the exit status."""
        assert self.stats()["isolated_errors_total"] == 0
        self.shutdown()
        return self._join()

    def clean_up(self) -> None:
        isolated = self._isolated_errors()
        if self.process.is_alive():
            self.process.kill()
        self._join()
        self._pipe.close()
        assert not isolated, f"{self.name} has isolated {isolated} defects; its log has the tracebacks"

    def _isolated_errors(self) -> int:
        """Of a process that can still be asked."""
        try:
            # Under mpiexec nobody stops it.
            if (pid := getattr(self.process, "pid", None)) is not None:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                if state in "TZ":
                    return 0
            if not self.process.is_alive():
                return 0
            self._pipe.send(("stats", {}))
            if not self._pipe.poll(ANSWER_TIMEOUT_S):
                return 0
            return int(self._pipe.recv()["result"]["isolated_errors_total"])
        except (OSError, EOFError):
            return 0


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
        try:
            self.context.clean_up()
        finally:
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

    def settle(
        self, peer: Peer, side: str, transfers: set[int], timeout_s: float = ANSWER_TIMEOUT_S
    ) -> dict[str, list[Any]]:
        """Step an executor until ``transfers`` have ended, cancelling what is overdue."""
        total: dict[str, list[Any]] = {"completed": [], "failed": [], "cancelled": [], "timed_out": [], "overdue": []}
        deadline_s = time.monotonic() + timeout_s
        cancelling: set[int] = set()
        while True:
            step = peer.step(side=side)
            for key, values in total.items():
                values += step[key]
            cancelling |= set(step["overdue"])
            cancelling = {transfer for transfer in cancelling if not peer.cancel(transfer=transfer)}
            ended = {*total["completed"], *total["cancelled"], *(failure[0] for failure in total["failed"])}
            if transfers <= ended:
                return total
            assert time.monotonic() < deadline_s, f"{side}: {transfers - ended} have not ended: {total}"
            time.sleep(0.005)

    def release(self, peer: Peer, side: str, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
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
    peers: list[Peer] = []

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
        peers.extend((pair.context, pair.generation))
        return pair.start()

    yield make
    for peer in peers:
        peer.clean_up()


@pytest.fixture(scope="module", params=list(WAYS))
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A pair that the tests of a module share and leave whole, over each way."""
    pair = Pair(request.param, {}, {})
    try:
        yield pair.start()
    finally:
        pair.stop()
