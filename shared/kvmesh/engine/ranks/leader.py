"""The leader's side of an engine's ranks: starts the followers, shares the KV pages with them, and computes with them.

Everything but computing is the leader's alone: requests, the cache's bookkeeping, sampling, transfers, events.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from kvmesh.cache.device import DeviceBuffer
from kvmesh.cache.layout import PageLayout
from kvmesh.config import ConfigError, WorkerSettings
from kvmesh.engine.exits import how_it_ended
from kvmesh.engine.ranks.codec import encode_common, encode_tables
from kvmesh.engine.ranks.errors import RanksLostError
from kvmesh.engine.ranks.links import StepLinks
from kvmesh.engine.ranks.pools import pools_of
from kvmesh.engine.ranks.wire import Kind, RankSocket
from kvmesh.engine.rendezvous import private_directory
from kvmesh.engine.step import StepInputs
from kvmesh.models.config import ModelConfig
from kvmesh.models.sharding import ModelShard, shard_of
from kvmesh.telemetry import get_logger

__all__ = ["RankGroup", "RankStartError"]

LOAD_TIMEOUT_S = 280.0
"""For followers to load their parts; the front waits 300 s for the whole engine."""

JOIN_TIMEOUT_S = 60.0
"""For all ranks to meet once they have loaded."""

STEP_TIMEOUT_S = 120.0
"""Longest wait for another rank within a step; a stage waits for all that are before it."""

LEAVE_TIMEOUT_S = 2.0
"""For a follower to end by itself; it has nothing to finish."""

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"

_log = get_logger("engine.ranks")


class RankStartError(RuntimeError):
    """A rank cannot work with these settings on this machine; the message says which and why."""


class _Follower(NamedTuple):
    rank: int
    process: subprocess.Popen[bytes]
    socket: RankSocket

    def ending(self) -> str:
        """How the process has ended, in words."""
        code = self.process.poll()
        return "has closed its connection" if code is None else f"has ended ({how_it_ended(code)})"


class RankGroup:
    """All ranks of an engine, of which this process is rank 0.

    Args:
        settings: the worker's.
        config: of its model.

    Raises:
        ModelError: the model cannot be shared between so many ranks.
        ConfigError: ranks do not work with these settings.
        OSError: a process cannot be started.
        RanksLostError: a process has ended at once.
    """

    def __init__(self, settings: WorkerSettings, config: ModelConfig, device: torch.device) -> None:
        tp_size, pp_size = settings.tensor_parallel_size, settings.pipeline_parallel_size
        if device.type != "cpu":
            raise ConfigError(
                f"tensor_parallel_size {tp_size} and pipeline_parallel_size {pp_size} need device cpu: the leader "
                "allocates the KV pages of all ranks, which works in host memory only; set both to 1 for CUDA"
            )
        self.size = tp_size * pp_size
        self.shard: ModelShard = shard_of(config, tp_size, pp_size, 0)
        for rank in range(1, self.size):
            shard_of(config, tp_size, pp_size, rank)  # What cannot be is said before processes are started.
        self.links = StepLinks(config, self.shard, STEP_TIMEOUT_S)
        self._settings = settings
        self._groups: dict[int, tuple[int, ...]] = {}
        self._closing = threading.Event()
        # Ranks are on one host, and what they say to each other concerns nobody else.
        os.environ.setdefault(INTERFACE_VARIABLE, "lo")
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._watcher: threading.Thread | None = None
        self._followers: list[_Follower] = []
        try:
            for rank in range(1, self.size):
                self._followers.append(self._start(rank))
        except BaseException:
            self.close()
            raise

    def await_loaded(self) -> None:
        """Wait until every follower has its part of the model.

        Raises:
            RankStartError: one could not.
            RanksLostError: one has died, or takes too long.
        """
        self._await(Kind.LOADED, "loaded its part of the model", LOAD_TIMEOUT_S)

    def share(self, layout: PageLayout, pools: Sequence[DeviceBuffer], dtype: torch.dtype) -> None:
        """Give the followers their pages, and meet.

        Args:
            layout: of the engine's pages.
            pools: the memory of each pool of the layout.
            dtype: of the model's activations.

        Raises:
            RankStartError: a follower cannot map them.
            RanksLostError: a follower has died, or not all ranks have met in time.
        """
        for rank in range(self.size):
            self._groups[rank] = tuple(group.group_id for group in layout.groups if group.rank == rank)
        with private_directory() as directory:
            meeting_point = directory / "ranks"
            for follower in self._followers:
                self._give_pools(follower, layout, pools, meeting_point, dtype)
            if (reason := self._meet(meeting_point, dtype)) is not None:
                self._await(Kind.JOINED, "joined the other ranks", LEAVE_TIMEOUT_S)
                raise RanksLostError(f"the engine's {self.size} ranks have not met: {reason}")
            self._await(Kind.JOINED, "joined the other ranks", JOIN_TIMEOUT_S)
        for follower in self._followers:
            follower.socket.limit(STEP_TIMEOUT_S)

    def run(self, step: StepInputs, compute: Callable[[StepInputs], torch.Tensor]) -> torch.Tensor:
        """See :class:`kvmesh.engine.runner.OtherRanks`.

        Raises:
            StepFailedError: another rank could not compute its part.
            RanksLostError: another rank has gone, or has not answered in time.
        """
        common = encode_common(step)
        for follower in self._followers:
            try:
                follower.socket.send(Kind.STEP, common, encode_tables(step, self._groups[follower.rank]))
            except OSError as error:
                raise RanksLostError(f"engine rank {follower.rank} {follower.ending()}: {error}") from error
        return self.links.run(len(step.token_ids), len(step.logits_rows), lambda: compute(step))

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Call ``on_lost``, in a thread of its own, as soon as a follower ends without having been told to."""
        self._watcher = threading.Thread(target=self._watch, args=(on_lost,), name="kvmesh-ranks", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """End all followers; what does not leave is killed."""
        self._closing.set()
        os.eventfd_write(self._wake_fd, 1)
        if self._watcher is not None:
            self._watcher.join()
        for follower in self._followers:
            with contextlib.suppress(OSError):
                follower.socket.limit(LEAVE_TIMEOUT_S)
                follower.socket.tell(Kind.LEAVE)
            follower.socket.close()
        until_s = time.monotonic() + LEAVE_TIMEOUT_S
        for follower in self._followers:
            try:
                follower.process.wait(max(0.0, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                follower.process.kill()
                follower.process.wait()
        self._followers.clear()
        os.close(self._wake_fd)

    def _start(self, rank: int) -> _Follower:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            process = subprocess.Popen(  # noqa: S603 - our own module
                [
                    sys.executable,
                    "-m",
                    "kvmesh.engine.ranks.follower",
                    *map(str, (theirs.fileno(), rank, os.getpid())),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        follower = _Follower(rank, process, RankSocket(ours))
        follower.socket.limit(JOIN_TIMEOUT_S)
        facts = {"settings": self._settings.model_dump_json(), "step_timeout_s": STEP_TIMEOUT_S}
        try:
            follower.socket.tell(Kind.SETTINGS, facts)
        except OSError as error:
            ending = follower.ending()
            follower.socket.close()
            process.kill()
            process.wait()
            raise RanksLostError(f"engine rank {rank} {ending}") from error
        return follower

    def _give_pools(
        self,
        follower: _Follower,
        layout: PageLayout,
        pools: Sequence[DeviceBuffer],
        meeting_point: Path,
        dtype: torch.dtype,
    ) -> None:
        mine = [pools[index] for index in pools_of(layout, follower.rank)]
        facts = {
            "layout": msgspec.json.encode(layout).decode(),
            "pool_bytes": [pool.reserve_bytes for pool in mine],
            "meeting_point": str(meeting_point),
            "join_timeout_s": JOIN_TIMEOUT_S,
            "dtype": str(dtype).removeprefix("torch."),
        }
        try:
            follower.socket.tell(Kind.POOLS, facts, [pool.fd for pool in mine if pool.fd is not None])
        except OSError as error:
            raise RanksLostError(f"engine rank {follower.rank} {follower.ending()}") from error

    def _meet(self, meeting_point: Path, dtype: torch.dtype) -> str | None:
        """Meet the followers; why that has failed, None when it has not. One that ends meanwhile is seen at once."""
        outcomes: list[str | None] = []
        over_fd = os.eventfd(0, os.EFD_CLOEXEC)
        told_fd = os.dup(over_fd)  # the thread's own, for it may outlive this call

        def join() -> None:
            try:
                self.links.join(meeting_point, JOIN_TIMEOUT_S, dtype)
                outcomes.append(None)
            except Exception as error:
                outcomes.append(str(error) or type(error).__name__)
            finally:
                os.eventfd_write(told_fd, 1)
                os.close(told_fd)

        # Gloo waits where nothing can wake it: left alone, the thread ends with its timeout.
        threading.Thread(target=join, name="kvmesh-ranks-join", daemon=True).start()
        pidfds = [os.pidfd_open(follower.process.pid) for follower in self._followers]
        try:
            poller = select.poll()
            for fd in (over_fd, *pidfds):
                poller.register(fd, select.POLLIN)
            if all(fd != over_fd for fd, _event in poller.poll()):
                return "one of them has ended"
            return outcomes[0]
        finally:
            for fd in (over_fd, *pidfds):
                os.close(fd)

    def _await(self, kind: Kind, what: str, timeout_s: float) -> None:
        """Wait for a frame of ``kind`` from every follower; the first that refuses or dies is heard at once."""
        until_s = time.monotonic() + timeout_s
        waiting = {follower.socket.fileno(): follower for follower in self._followers}
        poller = select.poll()
        for fd in waiting:
            poller.register(fd, select.POLLIN)
        while waiting:
            ready = poller.poll(max(0, round((until_s - time.monotonic()) * 1000)))
            if not ready:
                late = ", ".join(str(follower.rank) for follower in waiting.values())
                raise RanksLostError(f"engine rank {late} has not {what} within {timeout_s:g} s")
            for fd, _event in ready:
                follower = waiting.pop(fd)
                poller.unregister(fd)
                _take_answer(follower, kind)

    def _watch(self, on_lost: Callable[[str], None]) -> None:
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        pidfds = {os.pidfd_open(follower.process.pid): follower for follower in self._followers}
        for fd in pidfds:
            poller.register(fd, select.POLLIN)
        try:
            ready = poller.poll()
            if not self._closing.is_set():
                lost = [pidfds[fd] for fd, _event in ready if fd in pidfds]
                on_lost("; ".join(f"engine rank {follower.rank} {follower.ending()}" for follower in lost))
        finally:
            for fd in pidfds:
                os.close(fd)


def _take_answer(follower: _Follower, kind: Kind) -> None:
    try:
        frame = follower.socket.receive(JOIN_TIMEOUT_S)
    except (OSError, EOFError):
        with contextlib.suppress(subprocess.TimeoutExpired):
            follower.process.wait(LEAVE_TIMEOUT_S)
        raise RanksLostError(f"engine rank {follower.rank} {follower.ending()} before it could serve") from None
    error = frame.facts().get("error")
    if frame.kind is not kind or error is not None:
        raise RankStartError(f"engine rank {follower.rank}: {error}")
