"""A follower: ``python -m kvmesh.engine.ranks.follower SOCKET_FD RANK PARENT_PID``.

It computes its part of every step that the leader sends, and blocks on the socket in between. It never outlives the
leader: the kernel kills it then.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import structlog
import torch

from kvmesh.cache.layout import PageLayout
from kvmesh.config import WorkerSettings
from kvmesh.engine.exits import EXIT_RANK_LOST
from kvmesh.engine.loading import load, take_threads
from kvmesh.engine.parent import die_with_parent
from kvmesh.engine.ranks.codec import StepDecoder
from kvmesh.engine.ranks.errors import RanksLostError, StepFailedError
from kvmesh.engine.ranks.links import StepLinks
from kvmesh.engine.ranks.pools import MappedPools, split_groups_of
from kvmesh.engine.ranks.wire import Kind, RankSocket
from kvmesh.engine.step import StepComputer
from kvmesh.models.base import CausalLM
from kvmesh.models.config import read_config
from kvmesh.models.errors import ModelError
from kvmesh.models.sharding import shard_of
from kvmesh.models.store import resolve_model
from kvmesh.net.faults import arm_from_environment, fault_point
from kvmesh.telemetry import configure_logging, get_logger

__all__ = ["Follower"]

CPU = torch.device("cpu")

_log = get_logger("engine.ranks.follower")


class Follower:
    """One rank other than 0.

    Args:
        rank: its number in the engine.
        leader: the connection to rank 0.
    """

    def __init__(self, rank: int, leader: RankSocket) -> None:
        self._rank = rank
        self._leader = leader

    def run(self) -> int:
        """Load, join the other ranks, and compute until told to leave; returns the exit status."""
        facts = self._leader.receive(None).facts()
        settings = WorkerSettings.model_validate_json(facts["settings"])
        configure_logging("engine", settings.log_level, settings.log_format)
        structlog.contextvars.bind_contextvars(rank=self._rank)
        arm_from_environment()
        try:
            threads = take_threads(settings, settings.ranks_per_engine)
            source = resolve_model(settings.model)
            config = read_config(source)
            shard = shard_of(config, settings.tensor_parallel_size, settings.pipeline_parallel_size, self._rank)
            links = StepLinks(config, shard, facts["step_timeout_s"])
            fault_point(f"engine.rank{self._rank}.load")
            model = load(settings, source, CPU, shard, links)
        except (ModelError, OSError, MemoryError, RuntimeError) as error:
            return self._refuse(Kind.LOADED, error)
        self._leader.tell(Kind.LOADED)

        frame = self._leader.receive(None)
        if frame.kind is Kind.LEAVE:  # the leader cannot start
            return 0
        facts = frame.facts()
        try:
            computer, decoder, pools = _prepare(settings, model, self._rank, facts, frame.fds)
            fault_point(f"engine.rank{self._rank}.join")
            links.join(Path(facts["meeting_point"]), facts["join_timeout_s"], getattr(torch, facts["dtype"]))
        except (OSError, RuntimeError) as error:
            return self._refuse(Kind.JOINED, error)
        self._leader.tell(Kind.JOINED)
        _log.info("rank ready", layers=f"{shard.layers[0]}-{shard.layers[-1]}", threads=threads)
        self._serve(links, computer, decoder)
        del pools
        return 0

    def _serve(self, links: StepLinks, computer: StepComputer, decoder: StepDecoder) -> None:
        fault = f"engine.rank{self._rank}.step"
        while True:
            frame = self._leader.receive(None)
            if frame.kind is Kind.LEAVE:
                return
            step = decoder.decode(frame.body)

            def part(step: Any = step) -> torch.Tensor:
                fault_point(fault)
                return computer.compute(step)

            try:
                links.run(len(step.token_ids), len(step.logits_rows), part)
            except RanksLostError:
                raise
            except StepFailedError as error:
                _log.warning("left a failed step", reason=str(error))
            except Exception:
                # The border of error isolation: the leader knows, and decides what becomes of the requests.
                _log.exception("step failed")

    def _refuse(self, kind: Kind, error: BaseException) -> int:
        self._leader.tell(kind, {"error": str(error) or type(error).__name__})
        return 1


def _prepare(
    settings: WorkerSettings, model: CausalLM, rank: int, facts: dict[str, Any], fds: list[int]
) -> tuple[StepComputer, StepDecoder, MappedPools]:
    layout = msgspec.json.decode(facts["layout"], type=PageLayout)
    pools = MappedPools(layout, rank, fds, facts["pool_bytes"])
    split = split_groups_of(layout, swa_scratch_reuse=settings.kv_cache_config.enable_swa_scratch_reuse)
    view = pools.view()
    computer = StepComputer(
        model,
        view,
        pools.view(split) if split else None,
        max_num_tokens=settings.max_num_tokens,
        device=CPU,
    )
    decoder = StepDecoder(
        view.groups,
        tokens_per_block=layout.tokens_per_block,
        max_batch_size=settings.max_batch_size,
        max_seq_len=model.max_seq_len,
    )
    return computer, decoder, pools


def _main() -> int:
    fd, rank, parent_pid = map(int, sys.argv[1:4])
    die_with_parent(parent_pid)
    # The leader decides when its followers leave, and its front when the leader does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    leader = RankSocket(socket.socket(fileno=fd))
    try:
        return Follower(rank, leader).run()
    except (EOFError, OSError, RanksLostError) as error:
        # Whoever is gone, the leader says so in its own words; this process only ends.
        _log.warning("rank ends", reason=str(error))
        return EXIT_RANK_LOST


if __name__ == "__main__":
    status = _main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: gloo's threads abort in the interpreter's teardown when a peer is gone.
    os._exit(status)
