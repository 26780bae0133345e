"""Named points in product code at which a test can pause, fail, stop, kill or hold up the process.

A point costs one dictionary look-up while nothing is armed. Arm points from outside with
``KVMESH_FAULTS="transceiver.before_send=kill,engine.step=pause:0.5"`` or inside a test with :func:`arm`.

``hold:DIRECTORY`` leaves the choice to whoever shares the directory with the process, while it runs: a file
``NAME.armed`` with a number ``n`` in it holds up the thread that reaches the point for the ``n``-th time from then on.
The file is then called ``NAME.reached``, and the thread goes on when that is removed, or after :data:`MAX_HOLD_S`.
Meanwhile ``NAME.hits`` tells how often the point was reached since it was armed.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

__all__ = ["MAX_HOLD_S", "FaultInjectedError", "arm", "arm_from_environment", "disarm", "fault_point", "injected"]

FAULTS_VARIABLE = "KVMESH_FAULTS"

MAX_HOLD_S: Final = 60.0
HOLD_POLL_S: Final = 0.005

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
        ValueError: an entry is not ``name=kill|stop|fail[:TIMES]|pause:SECONDS|hold:DIRECTORY``.
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
        # To this thread: any other that takes the signal may come to do so late, and this one would run on.
        return lambda: signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    if kind == "fail":
        return _Fail(name, int(argument) if argument else None)
    if kind == "pause":
        seconds = float(argument)
        return lambda: time.sleep(seconds)
    if kind == "hold" and argument:
        return _Hold(Path(argument), name)
    raise ValueError(
        f"{FAULTS_VARIABLE}: {name}={text!r} is not kill, stop, fail[:TIMES], pause:SECONDS or hold:DIRECTORY"
    )


class _Fail:
    """Raises, always or the first ``times`` times."""

    def __init__(self, name: str, times: int | None) -> None:
        self._name = name
        self._left = times

    def __call__(self) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                return
        raise FaultInjectedError(f"injected fault at {self._name}")


class _Hold:
    """Holds up a thread as the files of a directory say; see the module."""

    def __init__(self, directory: Path, name: str) -> None:
        self._armed = directory / f"{name}.armed"
        self._reached = directory / f"{name}.reached"
        self._hits_file = directory / f"{name}.hits"
        self._lock = threading.Lock()
        self._arming = 0
        self._hits = 0

    def __call__(self) -> None:
        with self._lock:
            if not self._is_due():
                return
            self._armed.rename(self._reached)
        end_s = time.monotonic() + MAX_HOLD_S
        while self._reached.exists() and time.monotonic() < end_s:
            time.sleep(HOLD_POLL_S)

    def _is_due(self) -> bool:
        try:
            arming, wanted = self._armed.stat().st_mtime_ns, int(self._armed.read_text())
        except FileNotFoundError:
            return False
        if arming != self._arming:
            self._arming, self._hits = arming, 0
        self._hits += 1
        self._hits_file.write_text(str(self._hits))
        return self._hits == wanted
