"""Named points in product code at which a test can pause, fail, stop or kill the process.

A point costs one dictionary look-up while nothing is armed. Arm points from outside with
``KVMESH_FAULTS="transceiver.before_send=kill,engine.step=pause:0.5"`` or inside a test with :func:`arm`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["FaultInjectedError", "arm", "arm_from_environment", "disarm", "fault_point", "injected"]

FAULTS_VARIABLE = "KVMESH_FAULTS"

_armed: dict[str, Callable[[], None]] = {}


class FaultInjectedError(RuntimeError):
    """Raised at a point armed with ``fail``."""


def fault_point(name: str) -> None:
    """Do what is armed at ``name``; nothing otherwise."""
    if _armed and (action := _armed.get(name)) is not None:
        action()


def arm(name: str, action: Callable[[], None]) -> None:
    """Run ``action`` whenever ``name`` is reached in this process."""
    _armed[name] = action


def disarm(name: str) -> None:
    """Forget what was armed at ``name``."""
    _armed.pop(name, None)


@contextmanager
def injected(name: str, action: Callable[[], None]) -> Iterator[None]:
    """Arm a point for the length of a ``with`` block."""
    arm(name, action)
    try:
        yield
    finally:
        disarm(name)


def arm_from_environment(environment: dict[str, str] | None = None) -> list[str]:
    """Arm the points named in ``KVMESH_FAULTS``; every process of the mesh calls this once at start.

    Returns:
        The names that were armed.

    Raises:
        ValueError: an entry is not ``name=kill|stop|fail|pause:SECONDS``.
    """
    text = (environment if environment is not None else dict(os.environ)).get(FAULTS_VARIABLE, "")
    names = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, action = entry.partition("=")
        arm(name, _action(name, action))
        names.append(name)
    return names


def _action(name: str, text: str) -> Callable[[], None]:
    kind, _, argument = text.partition(":")
    if kind == "kill":
        return lambda: os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stop":
        return lambda: os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "fail":
        return lambda: _fail(name)
    if kind == "pause":
        seconds = float(argument)
        return lambda: time.sleep(seconds)
    raise ValueError(f"{FAULTS_VARIABLE}: {name}={text!r} is not kill, stop, fail or pause:SECONDS")


def _fail(name: str) -> None:
    raise FaultInjectedError(f"injected fault at {name}")
