"""Channels in processes of their own, driven by a test."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import itertools
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, wait
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from forked import PROCESSES

from kvmesh.transceiver.channels.base import Region
from kvmesh.transceiver.channels.factory import create_channel
from kvmesh.transceiver.planes.base import MoveControl, MoveStoppedError, PlaneError
from kvmesh.transceiver.types import PeerKey

__all__ = ["BACKENDS", "ChannelPeer", "why_not"]

BACKENDS = ("builtin-memfd", "builtin-tcp", "nixl", "ucx", "mooncake", "mpi")
"""The backends by name, the built-in one by way."""

_LIBRARIES = {
    "nixl": ("nixl_cu13", "engine"),
    "ucx": ("ucxx", "ucx"),
    "mooncake": ("mooncake", "mooncake"),
    "mpi": ("mpi4py", "mpi"),
}
"""Module and extra."""
_SYSTEM_LIBRARIES = {"mooncake": ("libibverbs.so.1", "libnuma.so.1", "libcurl.so.4")}

REGION_BYTES = 32 << 20
ANSWER_S = 90.0
CONNECT_S = 5.0
LOOK_S = 0.2
_ERRORS = {"PlaneError": PlaneError, "MoveStoppedError": MoveStoppedError}


def why_not(backend: str) -> str | None:
    """Why the tests of this backend cannot run here; None when they can."""
    from kvmesh.transceiver.channels.mooncake import APT_PACKAGES

    library, extra = _LIBRARIES.get(backend, ("kvmesh", ""))
    if importlib.util.find_spec(library) is None:
        return f"needs make venv EXTRAS={extra}"
    for name in _SYSTEM_LIBRARIES.get(backend, ()):
        try:
            ctypes.CDLL(name)
        except OSError:
            return f"needs {name}: apt-get install {APT_PACKAGES}"
    return None


class _Forked:
    """A process that :func:`main` runs in, with the methods of ``subprocess.Popen`` that are used here."""

    def __init__(self, argv: list[str]) -> None:
        self._process = PROCESSES.Process(target=main, args=(argv,))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if (status := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("a forked process", timeout)
        return status


def _under_mpiexec(argv: list[str]) -> subprocess.Popen[bytes]:
    from kvmesh.engine.launching import MPIEXEC_OPTIONS, find_mpiexec

    command = [str(find_mpiexec()), *MPIEXEC_OPTIONS, sys.executable, __file__, *argv]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)


class ChannelPeer:
    """One engine's channel in a child process.

    Methods of :class:`Channel` are called with :meth:`call`, or with :meth:`start` to go on meanwhile. Beside them:
    ``wait`` and ``cancel`` (of an expectation's number, which ``expect`` returns), ``control`` (a new
    :class:`MoveControl`'s number, which ``send`` and ``wait`` take), ``stop``, ``abandon``, ``fill`` and ``read``
    (``"send"`` or ``"receive"``, an offset, and bytes or a length), ``processor_s``.
    """

    def __init__(
        self,
        backend: str,
        name: str,
        *,
        epoch: int = 1,
        region_bytes: int = REGION_BYTES,
    ) -> None:
        self.key = PeerKey(name, epoch)
        self.region_bytes = region_bytes
        self._directory = tempfile.TemporaryDirectory(prefix="kvm-ch-")
        path = str(Path(self._directory.name) / "s")
        with Listener(path) as listener:
            argv = [path, backend, str(self.key), str(region_bytes)]
            self.process: _Forked | subprocess.Popen[bytes] = (
                _under_mpiexec(argv) if backend == "mpi" else _Forked(argv)
            )
            answer: Future[Connection] = Future()
            threading.Thread(target=lambda: answer.set_result(listener.accept()), daemon=True).start()
            deadline_s = time.monotonic() + ANSWER_S
            while not answer.done():
                if self.process.poll() is not None or time.monotonic() > deadline_s:
                    self.process.kill()
                    self.process.wait(ANSWER_S)
                    self._directory.cleanup()
                    raise RuntimeError(f"the process of {self.key} did not start ({self.process.returncode})")
                wait([answer], LOOK_S)
            self._connection = answer.result()
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {-1: Future()}
        self._lock = threading.Lock()
        started = self._waiting[-1]
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.pid: int = started.result(ANSWER_S)
            self.descriptor: bytes = self.call("describe")
        except BaseException:
            self.end()
            raise

    def start(self, method: str, *args: Any) -> Future[Any]:
        """Call without waiting."""
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = future
            self._connection.send((number, method, args))
        return future

    def call(self, method: str, *args: Any) -> Any:
        """Call and wait."""
        return self.start(method, *args).result(ANSWER_S)

    def attach(self, other: ChannelPeer, side: str) -> None:
        """This engine is ``side`` for ``other``."""
        self.call("attach", other.key, other.descriptor, side)

    def kill(self) -> None:
        """End the process as a crash would."""
        os.kill(self.pid, 9)
        self.process.wait(ANSWER_S)

    def end(self) -> None:
        """End the process, if it still runs, and forget it."""
        with suppress(OSError):
            self.start("exit")
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        self._connection.close()
        self._directory.cleanup()

    def _read(self) -> None:
        while True:
            try:
                number, failed, value = self._connection.recv()
            except (EOFError, OSError, TypeError):
                break
            future = self._waiting.pop(number)
            if failed:
                kind, text = value
                future.set_exception(_ERRORS.get(kind, RuntimeError)(text))
            else:
                future.set_result(value)
        for future in list(self._waiting.values()):
            future.set_exception(EOFError("the process has ended"))


class _Child:
    def __init__(self, backend: str, name: str, region_bytes: int) -> None:
        self._memory: dict[str, memoryview] = {}
        regions = {}
        for which in ("send", "receive"):
            fd = os.memfd_create(f"kvmesh-test-{which}", os.MFD_CLOEXEC)
            os.truncate(fd, region_bytes)
            mapped = mmap.mmap(fd, region_bytes)
            self._memory[which] = memoryview(mapped)
            address = importlib.import_module("numpy").frombuffer(mapped, dtype="uint8").ctypes.data
            regions[which] = Region(address, region_bytes, fd)
        library, _, choice = backend.partition("-")
        self.channel: Any = create_channel(
            library.upper(),  # type: ignore[arg-type]
            regions["send"],
            regions["receive"],
            name=name,
            bind_host="127.0.0.1",
            connect_timeout_s=CONNECT_S,
            choice=choice or "auto",  # type: ignore[arg-type]
        )
        self._controls: dict[int, MoveControl] = {}
        self._incoming: dict[int, Any] = {}
        self._numbers = itertools.count()

    def control(self) -> int:
        self._controls[number := next(self._numbers)] = MoveControl()
        return number

    def stop(self, control: int) -> None:
        self._controls[control].stop()

    def abandon(self, control: int) -> None:
        self._controls[control].abandon()

    def expect(self, *args: Any) -> int:
        self._incoming[number := next(self._numbers)] = self.channel.expect(*args)
        return number

    def wait(self, incoming: int, control: int | None = None) -> None:
        self._incoming[incoming].wait(MoveControl() if control is None else self._controls[control])

    def cancel(self, incoming: int) -> bool:
        return self._incoming[incoming].cancel()

    def send(self, peer: Any, tag: int, src: int, dst: int, nbytes: int, control: int | None = None) -> None:
        stopper = MoveControl() if control is None else self._controls[control]
        self.channel.send(peer, tag, src, dst, nbytes, stopper)

    def fill(self, which: str, offset: int, data: bytes) -> None:
        self._memory[which][offset : offset + len(data)] = data

    def read(self, which: str, offset: int, nbytes: int) -> bytes:
        return bytes(self._memory[which][offset : offset + nbytes])

    def processor_s(self) -> float:
        return time.process_time()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.channel, name)


def _serve(connection: Connection, backend: str, name: str, region_bytes: int) -> None:
    writing = threading.Lock()

    def answer(number: int, failed: bool, value: Any) -> None:
        with writing, suppress(OSError):
            connection.send((number, failed, value))

    def run(number: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            value = getattr(child, method)(*args)
        except Exception as error:
            answer(number, True, (type(error).__name__, str(error)))
        else:
            answer(number, False, value)

    try:
        child = _Child(backend, name, region_bytes)
    except Exception as error:
        answer(-1, True, (type(error).__name__, str(error)))
        return
    answer(-1, False, os.getpid())
    while True:
        try:
            number, method, args = connection.recv()
        except (EOFError, OSError):
            break
        if method == "exit":
            break
        threading.Thread(target=run, args=(number, method, args), daemon=True).start()
    child.channel.close()


def main(argv: list[str]) -> None:
    """A child: where its parent listens, the backend, its name, and how large its regions are."""
    path, backend, name, region_bytes = argv
    _serve(Client(path), backend, name, int(region_bytes))
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
