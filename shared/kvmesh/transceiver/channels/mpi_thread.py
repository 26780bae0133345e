"""The one thread that makes all calls to MPI: those it is asked for, and those that make progress.

It polls only while a message is on its way, less often the longer nothing happens, and looks ten times a second for
messages that nobody waits for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvmesh.telemetry import get_logger
from kvmesh.transceiver.borders import isolated
from kvmesh.transceiver.channels.mailbox import Mailbox, Operation
from kvmesh.transceiver.channels.mpi_library import MpiError, connect_bounded, load_mpi
from kvmesh.transceiver.planes.base import PlaneError

__all__ = ["CONNECT_S", "Link", "MpiThread"]

START_S: Final = 60.0
CONNECT_S: Final = 3
"""Other messages wait while a connection is made: milliseconds, or this long when the peer dies in the middle."""
MOVING_S: Final = ((0.003, 0.0), (0.030, 50e-6), (float("inf"), 0.001))
"""While something is posted. Until so long after the last progress: the pause between two looks, each of which moves
some 100 KiB of a large message.
"""
EXPECTING_S: Final = ((0.002, 50e-6), (0.030, 200e-6), (float("inf"), 0.001))
"""The same while something is expected that has not come."""
IDLE_S: Final = 0.1
DRAIN_S: Final = 0.25
"""For receives that have begun to end, when their peer is detached."""
CLOSE_S: Final = 5.0

_Result = TypeVar("_Result")


@dataclass(slots=True, eq=False)
class Link:
    """One direction of a peer: an intercommunicator, in which the peer is rank 0.

    Attributes:
        communicator: MPI's.
        source: the peer's number in the mailbox.
    """

    communicator: Any
    source: int


@dataclass(slots=True, eq=False)
class _Posted:
    request: Any
    operation: Operation
    link: Link
    memory: NDArray[np.uint8]
    """Kept alive while MPI may touch it."""
    receives: bool


class MpiThread:
    """See the module. Methods may be called from any other thread.

    Args:
        bind_host: a loopback address keeps MPICH on loopback.
        mailbox: has what is expected.
        rooms: the receive region.

    Raises:
        PlaneError: MPI is not installed, does not work here, or this process was not started by mpiexec.
    """

    def __init__(self, bind_host: str, mailbox: Mailbox, rooms: NDArray[np.uint8]) -> None:
        self._log = get_logger("transceiver.mpi")
        self._mailbox = mailbox
        self._rooms = rooms
        self._incoming: list[Link] = []
        self._posted: list[_Posted] = []
        self._left: list[_Posted] = []
        """Posted for peers that were detached; of those that have died, MPI never says that it has ended."""
        self._sources = 0
        self._calls: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._wanted = threading.Condition()
        self._ended: str | None = None
        """Why nothing is done any more."""
        started: Future[Any] = Future()
        self._thread = threading.Thread(target=self._run, args=(bind_host, started), name="kvmesh-mpi", daemon=True)
        self._thread.start()
        try:
            self.mpi: Any = started.result(START_S)
        except TimeoutError:
            raise PlaneError(f"MPI did not start within {START_S:g} s") from None

    def check(self) -> None:
        """Raise when MPI is not used any more.

        Raises:
            PlaneError: with the reason.
        """
        if self._ended is not None:
            raise PlaneError(self._ended)

    def wake(self) -> None:
        """Something is expected that was not before."""
        with self._wanted:
            self._wanted.notify()

    def open_port(self) -> str:
        """A new MPI port, by its name. Raises PlaneError."""
        port: str = self._do(lambda: self.mpi.Open_port())
        return port

    def accept(self, port: str) -> Link:
        """The link to the receiver that connects to ``port`` now. Raises PlaneError."""

        def accept() -> Link:
            link = self._meet(lambda info: self.mpi.COMM_SELF.Accept(port, info))
            # Not after a failure: its tag would be given to another port, and a late peer would write into its call.
            self.mpi.Close_port(port)
            return link

        return self._do(accept)

    def connect(self, port: str) -> Link:
        """The link from the owner that accepts at ``port`` now. Raises PlaneError."""

        def connect() -> Link:
            link = self._meet(lambda info: self.mpi.COMM_SELF.Connect(port, info))
            self._incoming.append(link)
            return link

        return self._do(connect)

    def send(self, link: Link, memory: NDArray[np.uint8], tag: int) -> Operation:
        """Begin to send. Raises PlaneError when MPI is not used any more."""
        operation = Operation()

        def post() -> None:
            try:
                request = link.communicator.Isend([memory, self.mpi.BYTE], 0, tag)
            except self.mpi.Exception as error:
                operation.settle(f"MPI: {error}")
            else:
                self._posted.append(_Posted(request, operation, link, memory, receives=False))

        self._ask(post)
        return operation

    def part(self, link: Link, reason: str) -> None:
        """Give up a link and what is under way on it; bounded, also with a dead peer."""
        if self._ended is None:
            self._do(lambda: self._part(link, reason))

    def close(self) -> None:
        """End the thread. MPI itself ends with the process. Idempotent."""
        with self._wanted:
            self._ended = self._ended or "the MPI channel is closed"
            self._wanted.notify()
        self._thread.join(CLOSE_S)

    def _ask(self, call: Callable[[], _Result]) -> Future[_Result]:
        future: Future[_Result] = Future()
        with self._wanted:
            self.check()
            self._calls.append((call, future))
            self._wanted.notify()
        return future

    def _do(self, call: Callable[[], _Result]) -> _Result:
        try:
            return self._ask(call).result(4 * CONNECT_S + CLOSE_S)
        except TimeoutError:
            raise PlaneError("MPI does not answer") from None

    # From here on everything runs on the thread.

    def _run(self, bind_host: str, started: Future[Any]) -> None:
        try:
            self.mpi = load_mpi(bind_host)
        except PlaneError as error:
            started.set_exception(error)
            return
        started.set_result(self.mpi)
        last_progress_s = time.monotonic()
        while True:
            with self._wanted:
                pause_s = self._pause(time.monotonic() - last_progress_s)
                if pause_s != 0 and not self._calls and self._ended is None:
                    self._wanted.wait(pause_s)
                if self._ended is not None:
                    break
                calls, self._calls = self._calls, []
            for call, future in calls:
                self._answer(call, future)
            try:
                arrived = self._turn()
            except Exception as error:
                # Nothing can be said about what is under way; its memory stays in use until the process ends.
                self._ended = f"MPI has failed ({error!r}); transfers over MPI need this server to be restarted"
                isolated(self._log, "MPI has failed; transfers over it fail from here on")
                break
            if arrived or calls:
                last_progress_s = time.monotonic()
        self._end(self._ended)

    def _pause(self, quiet_s: float) -> float | None:
        if self._posted or self._mailbox.expecting:
            steps = MOVING_S if self._posted else EXPECTING_S
            return next(pause_s for until_s, pause_s in steps if quiet_s < until_s)
        return IDLE_S if self._sources else None

    def _answer(self, call: Callable[[], Any], future: Future[Any]) -> None:
        try:
            if self._ended is not None:
                raise PlaneError(self._ended)
            future.set_result(call())
        except TimeoutError:
            self._ended = "MPICH hangs; transfers over MPI need this server to be restarted"
            self._log.error(self._ended)
            future.set_exception(PlaneError(self._ended))
        except (self.mpi.Exception, MpiError, PlaneError) as error:
            future.set_exception(PlaneError(str(error)))
        except Exception as error:
            # The border of error isolation: one call has failed, others go on.
            isolated(self._log, "a call to MPI has failed")
            future.set_exception(PlaneError(f"a call to MPI has failed: {error!r}"))

    def _turn(self) -> bool:
        """Take what has arrived and settle what has ended; returns whether there was any."""
        if self._ended is not None:
            return False
        arrived = False
        for link in self._incoming:
            while self._take(link):
                arrived = True
        self._left = [one for one in self._left if not self._settle(one)]
        before = len(self._posted)
        self._posted = [one for one in self._posted if not self._settle(one)]
        return arrived or len(self._posted) < before

    def _take(self, link: Link) -> bool:
        status = self.mpi.Status()
        message = link.communicator.Improbe(0, self.mpi.ANY_TAG, status)
        if message is None:
            return False
        nbytes = status.Get_count(self.mpi.BYTE)
        expected = self._mailbox.claim(link.source, status.tag, nbytes)
        if expected is None:
            memory = np.empty(nbytes, dtype=np.uint8)
        else:
            memory = self._rooms[expected.offset : expected.offset + nbytes]
        request = message.Irecv([memory, self.mpi.BYTE])
        self._posted.append(_Posted(request, expected or Operation(), link, memory, receives=True))
        return True

    def _settle(self, one: _Posted) -> bool:
        try:
            if not one.request.Test():
                return False
        except self.mpi.Exception as error:
            one.operation.settle(f"MPI: {error}")
        else:
            one.operation.settle()
        return True

    def _meet(self, call: Callable[[Any], Any]) -> Link:
        communicator = connect_bounded(self.mpi, call, CONNECT_S)
        self._sources += 1
        return Link(communicator, self._sources)

    def _part(self, link: Link, reason: str) -> None:
        self._mailbox.fail(link.source, reason)
        self._incoming = [one for one in self._incoming if one is not link]
        deadline_s = time.monotonic() + DRAIN_S
        while any(one.receives and one.link is link for one in self._posted) and time.monotonic() < deadline_s:
            self._posted = [one for one in self._posted if not self._settle(one)]
            time.sleep(MOVING_S[-1][1])
        for one in self._posted:
            if one.link is link:
                self._left.append(one)
                if not one.receives:  # Into the room of a receive that has begun, its sender may yet write.
                    one.operation.settle(reason)
        self._posted = [one for one in self._posted if one.link is not link]
        # Local in MPICH, also with requests under way; Disconnect would wait for the peer.
        link.communicator.Free()

    def _end(self, reason: str) -> None:
        with self._wanted:
            calls, self._calls = self._calls, []
        for _, future in calls:
            future.set_exception(PlaneError(reason))
        for link in self._incoming:
            self._mailbox.fail(link.source, reason)
        for one in self._posted:
            one.operation.settle(reason)
