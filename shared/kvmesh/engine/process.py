"""The engine process: ``python -m kvmesh.engine.process ENDPOINT EPOCH PARENT_PID RANK SIZE``.

``RANK`` of ``SIZE`` is its seat among the attention data-parallel ranks of its server; its settings come as JSON on
stdin.

It builds an engine, says that it is ready, and runs the loop until told to leave. It never outlives its front: the
kernel kills it when the front dies.
"""

from __future__ import annotations

import os
import signal
import sys

from kvmesh.config import WorkerSettings
from kvmesh.engine.build import Engine, EngineBuildError
from kvmesh.engine.channel import FrontChannel
from kvmesh.engine.exits import EXIT_DEFECT, EXIT_RANK_LOST
from kvmesh.engine.parent import die_with_parent
from kvmesh.engine.ranks.errors import RanksLostError
from kvmesh.net.clock import SystemClock
from kvmesh.net.faults import arm_from_environment
from kvmesh.protocol.engine import EngineFailed
from kvmesh.protocol.ranks import ALONE, DpSeat
from kvmesh.telemetry import configure_logging, get_logger

__all__ = ["engine_main"]

_log = get_logger("engine.process")


def engine_main(settings: WorkerSettings, endpoint: str, epoch: int, seat: DpSeat = ALONE) -> int:
    """Run an engine until its front tells it to leave.

    Args:
        settings: the worker's.
        endpoint: ZMQ endpoint that the front has bound.
        epoch: of this life of the engine.
        seat: among the attention data-parallel ranks of its server.

    Returns:
        The exit status: 0 after a shutdown, 1 when the engine could not start, :data:`EXIT_DEFECT` after a defect,
        :data:`EXIT_RANK_LOST` when one of its ranks is gone.
    """
    channel = FrontChannel(endpoint)
    try:
        try:
            engine = Engine.build(settings, channel, epoch=epoch, clock=SystemClock(), seat=seat)
        except EngineBuildError as error:
            channel.send(EngineFailed(str(error)))
            return 1
        except RanksLostError as error:
            _log.error("engine rank lost", reason=str(error))
            return EXIT_RANK_LOST
        channel.send(engine.ready)
        engine.watch_ranks(_rank_lost)
        try:
            engine.loop().run()
        except RanksLostError as error:
            _log.error("engine rank lost", reason=str(error))
            return EXIT_RANK_LOST
        except Exception:
            # The last border: an iteration failed in a way that nobody can mend here. The front sees the process end,
            # fails its requests and says so; the log says why.
            _log.exception("engine loop failed")
            return EXIT_DEFECT
        engine.close()
    finally:
        channel.close()
    return 0


def _rank_lost(reason: str) -> None:
    """End at once, from whichever thread: the loop may wait for the rank that is gone."""
    _log.error("engine rank lost", reason=reason)
    sys.stderr.flush()
    os._exit(EXIT_RANK_LOST)


def _main() -> int:
    endpoint = sys.argv[1]
    epoch, parent_pid, rank, size = map(int, sys.argv[2:6])
    die_with_parent(parent_pid)
    # Ctrl-C in a terminal, and service managers, signal the whole group; the front decides when its engine leaves.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    settings = WorkerSettings.model_validate_json(sys.stdin.buffer.read())
    service = "engine" if size == 1 else f"engine-{rank}"
    configure_logging(service, settings.log_level, settings.log_format)
    arm_from_environment()
    return engine_main(settings, endpoint, epoch, DpSeat(rank, size))


if __name__ == "__main__":
    status = _main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads of transfer libraries crash in the interpreter's teardown.
    os._exit(status)
