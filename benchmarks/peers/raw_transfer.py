"""Pages moved between two processes by a transfer library alone, on the workload of benchmarks/transfer.py.

Each library is used as its makers mean it to be: NIXL and Mooncake write every page for itself in one batch, MPI posts
a message for each page and waits for all, UCX (ucxx) sends messages of 8 MiB of memory that is in one piece (there is
nothing to gather with), TCP sends from and receives into 64 pages in one system call.

``raw_transfer.py`` starts its own second process; MPI needs ``mpiexec -n 2``. One JSON line when both are ready, then
one round for each line on stdin: ``scattered``, ``contiguous`` or ``one`` goes in, seconds come out.

    python benchmarks/peers/raw_transfer.py '{"library": "nixl", "pages": 2048, "page_bytes": 65536}'
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import mmap
import multiprocessing
import os
import socket
import sys
import time
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

MESSAGE_BYTES = 8 << 20
IOVECS = 64
SOCKET_BUFFER_BYTES = 4 << 20


class Pool:
    """A pool of twice the pages that move, and which of them do.

    Its memory is of the kind that a server's pools are: shared, and so in pages of 4 KiB where the system gives shared
    memory no huge ones.
    """

    def __init__(self, pages: int, page_bytes: int, seed: int) -> None:
        self.moving, self.page_bytes = pages, page_bytes
        nbytes = 2 * pages * page_bytes
        fd = os.memfd_create("pool")
        os.ftruncate(fd, nbytes)
        self.memory = np.frombuffer(mmap.mmap(fd, nbytes), dtype=np.uint8)
        self.memory[:] = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
        self.address = self.memory.ctypes.data
        self._order = np.random.default_rng(seed)

    def ids(self, kind: str) -> np.ndarray:
        """Page ids of a round."""
        if kind == "one":
            return self._order.integers(0, 2 * self.moving, 1, dtype=np.int32)
        if kind == "contiguous":
            return np.arange(self.moving, dtype=np.int32)
        return self._order.permutation(2 * self.moving)[: self.moving].astype(np.int32)

    def addresses(self, base: int, ids: np.ndarray) -> list[int]:
        """Of pages of a pool like this one."""
        return [base + int(page) * self.page_bytes for page in ids]

    def views(self, ids: np.ndarray) -> list[memoryview]:
        """Of pages, neighbours merged."""
        whole = self.memory.data
        cuts = np.flatnonzero(np.diff(ids) != 1) + 1
        return [
            whole[int(run[0]) * self.page_bytes : (int(run[-1]) + 1) * self.page_bytes] for run in np.split(ids, cuts)
        ]


class Library(Protocol):
    """Moves pages of ``pool`` to the other process; ``run`` is the end that measures, ``serve`` the other."""

    def run(self, kind: str) -> float:
        """Seconds of one round."""


class Nixl:
    """WRITE from prepared lists of all pages."""

    def __init__(self, pool: Pool, pipe: Connection) -> None:
        self._pool, self._agent = pool, _nixl_agent("writer", pool)
        base, metadata = pipe.recv()
        self._peer = self._agent.add_remote_agent(metadata)
        self._local = _nixl_pages(self._agent, "NIXL_INIT_AGENT", pool, pool.address)
        self._remote = _nixl_pages(self._agent, self._peer, pool, base)

    def run(self, kind: str) -> float:
        """See :class:`Library`."""
        local, remote = self._pool.ids(kind), self._pool.ids(kind)
        start_s = time.perf_counter()
        handle = self._agent.make_prepped_xfer("WRITE", self._local, local, self._remote, remote, b"")
        state = self._agent.transfer(handle)
        while state == "PROC":
            time.sleep(50e-6)
            state = self._agent.check_xfer_state(handle)
        taken_s = time.perf_counter() - start_s
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(state)
        return taken_s

    @staticmethod
    def serve(pool: Pool, pipe: Connection) -> None:
        """The target: lets the library make progress."""
        agent = _nixl_agent("target", pool)
        pipe.send((pool.address, agent.get_agent_metadata()))
        while not pipe.poll(0.001):
            agent.get_new_notifs()
        os._exit(0)


def _nixl_agent(name: str, pool: Pool) -> Any:
    nixl = _nixl()
    agent = nixl.nixl_agent(
        name, nixl.nixl_agent_config(enable_prog_thread=False, enable_listen_thread=False, backends=["UCX"])
    )
    agent.register_memory([(pool.address, pool.memory.nbytes, 0, "")], "DRAM")
    return agent


def _nixl() -> Any:
    for name in ("nixl_cu13", "nixl_cu12"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError("nixl-cu13")


def _nixl_pages(agent: Any, whose: Any, pool: Pool, base: int) -> Any:
    pages = np.zeros((2 * pool.moving, 3), dtype=np.uint64)
    pages[:, 0] = np.uint64(base) + np.arange(2 * pool.moving, dtype=np.uint64) * np.uint64(pool.page_bytes)
    pages[:, 1] = pool.page_bytes
    return agent.prep_xfer_dlist(whose, pages, "DRAM")


class Mooncake:
    """``batch_transfer_sync_write``."""

    def __init__(self, pool: Pool, pipe: Connection) -> None:
        self._pool, self._engine = pool, _mooncake(pool)
        self._peer, self._base = pipe.recv()

    def run(self, kind: str) -> float:
        """See :class:`Library`."""
        pool, ids = self._pool, self._pool.ids(kind)
        start_s = time.perf_counter()
        local, remote = pool.addresses(pool.address, ids), pool.addresses(self._base, pool.ids(kind))
        status = self._engine.batch_transfer_sync_write(self._peer, local, remote, [pool.page_bytes] * len(local))
        if status != 0:
            raise RuntimeError(f"status {status}")
        return time.perf_counter() - start_s

    @staticmethod
    def serve(pool: Pool, pipe: Connection) -> None:
        """The target."""
        engine = _mooncake(pool)
        pipe.send((f"127.0.0.1:{engine.get_rpc_port()}", pool.address))
        pipe.recv()
        os._exit(0)


def _mooncake(pool: Pool) -> Any:
    engine = importlib.import_module("mooncake.engine").TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise RuntimeError("the engine did not start")
    if engine.register_memory(pool.address, pool.memory.nbytes) != 0:
        raise RuntimeError("the memory was not registered")
    return engine


class Tcp:
    """One request and ``sendmsg``/``recvmsg_into``; the receiver measures."""

    def __init__(self, pool: Pool, pipe: Connection) -> None:
        self._pool = pool
        self._socket = socket.create_connection(("127.0.0.1", pipe.recv()))
        _tune(self._socket)

    def run(self, kind: str) -> float:
        """See :class:`Library`."""
        views = self._pool.views(self._pool.ids(kind))
        start_s = time.perf_counter()
        self._socket.sendall(kind[:1].encode())
        while views:
            _consume(views, self._socket.recvmsg_into(views[:IOVECS])[0])
        return time.perf_counter() - start_s

    @staticmethod
    def serve(pool: Pool, pipe: Connection) -> None:
        """The sender."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            pipe.send(listener.getsockname()[1])
            connection, _address = listener.accept()
        _tune(connection)
        kinds = {b"s": "scattered", b"c": "contiguous", b"o": "one"}
        while kind := connection.recv(1):
            views = pool.views(pool.ids(kinds[kind]))
            while views:
                _consume(views, connection.sendmsg(views[:IOVECS]))


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)


def _consume(views: list[memoryview], count: int) -> None:
    if count == 0:
        raise ConnectionResetError
    done = 0
    while done < len(views) and count >= len(views[done]):
        count -= len(views[done])
        done += 1
    del views[:done]
    if count:
        views[0] = views[0][count:]


class Ucx:
    """Tagged messages of :data:`MESSAGE_BYTES` of contiguous memory, and an answer when all have come."""

    def __init__(self, pool: Pool, pipe: Connection) -> None:
        self._pool = pool
        self._loop = asyncio.new_event_loop()
        self._endpoint = self._loop.run_until_complete(self._connect(pipe.recv()))
        self._word = np.zeros(1, dtype=np.int64)

    async def _connect(self, port: int) -> Any:
        ucxx = importlib.import_module("ucxx")
        ucxx.init()
        return await ucxx.create_endpoint("127.0.0.1", port, endpoint_error_handling=True)

    def run(self, kind: str) -> float:
        """See :class:`Library`."""
        nbytes = self._pool.page_bytes * (1 if kind == "one" else self._pool.moving)
        return self._loop.run_until_complete(self._send(nbytes))

    async def _send(self, nbytes: int) -> float:
        start_s = time.perf_counter()
        self._word[0] = nbytes
        await self._endpoint.send(self._word)
        await asyncio.gather(*(self._endpoint.send(part) for part in _messages(self._pool, nbytes)))
        await self._endpoint.recv(self._word)
        return time.perf_counter() - start_s

    @staticmethod
    def serve(pool: Pool, pipe: Connection) -> None:
        """The receiver."""
        asyncio.run(_receive_ucx(pool, pipe))


async def _receive_ucx(pool: Pool, pipe: Connection) -> None:
    ucxx, errors = importlib.import_module("ucxx"), importlib.import_module("ucxx.exceptions")
    ucxx.init()
    word = np.zeros(1, dtype=np.int64)

    async def rounds(endpoint: Any) -> None:
        with contextlib.suppress(errors.UCXError):  # The other process has left.
            while True:
                await endpoint.recv(word)
                await asyncio.gather(*(endpoint.recv(part) for part in _messages(pool, int(word[0]))))
                await endpoint.send(word)

    listener = ucxx.create_listener(rounds)
    pipe.send(listener.port)
    await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
    os._exit(0)


def _messages(pool: Pool, nbytes: int) -> list[np.ndarray]:
    return [pool.memory[at : min(at + MESSAGE_BYTES, nbytes)] for at in range(0, nbytes, MESSAGE_BYTES)]


class Mpi:
    """``Isend``/``Irecv`` for each page, then ``Waitall`` and an answer; rank 0 measures."""

    def __init__(self, pool: Pool) -> None:
        self._mpi = importlib.import_module("mpi4py.MPI")
        self._world = self._mpi.COMM_WORLD
        self._pool = pool

    @property
    def measures(self) -> bool:
        """Whether this is the process that does."""
        return bool(self._world.Get_rank() == 0)

    def run(self, kind: str) -> float:
        """See :class:`Library`."""
        views = self._pages(kind)
        start_s = time.perf_counter()
        self._world.send(kind, dest=1)
        self._mpi.Request.Waitall([self._world.Isend([view, self._mpi.BYTE], dest=1) for view in views])
        self._world.recv(source=1)
        return time.perf_counter() - start_s

    def serve(self) -> None:
        """The receiver."""
        while (kind := self._next()) != "end":
            views = self._pages(kind)
            self._mpi.Request.Waitall([self._world.Irecv([view, self._mpi.BYTE], source=0) for view in views])
            self._world.send(None, dest=0)

    def end(self) -> None:
        """Let the other process go."""
        self._world.send("end", dest=1)

    def _next(self) -> str:
        # A receive that waits spins, beside what is measured.
        while not self._world.iprobe(source=0):
            time.sleep(50e-6)
        return str(self._world.recv(source=0))

    def _pages(self, kind: str) -> list[np.ndarray]:
        if kind == "contiguous":
            return [self._pool.memory[: self._pool.moving * self._pool.page_bytes]]
        pages = self._pool.memory.reshape(-1, self._pool.page_bytes)
        return [pages[page] for page in self._pool.ids(kind)]


LIBRARIES: dict[str, Any] = {"nixl": Nixl, "mooncake": Mooncake, "tcp": Tcp, "ucx": Ucx}


def _serve(library: str, pages: int, page_bytes: int, pipe: Connection) -> None:
    LIBRARIES[library].serve(Pool(pages, page_bytes, 1), pipe)


def _answer_rounds(library: Library, answers: Any) -> None:
    library.run("scattered")
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps({"s": library.run(json.loads(line)["kind"])}), file=answers, flush=True)


def main() -> None:
    options = json.loads(sys.argv[1])
    name, pages, page_bytes = options["library"], options["pages"], options["page_bytes"]
    answers, sys.stdout = sys.stdout, sys.stderr
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    os.environ.setdefault("UCX_MODULES", "^ib")
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    os.environ.setdefault("UCXPY_PROGRESS_MODE", "blocking")  # The others spin, beside what is measured.
    if name == "mpi":
        mpi = Mpi(Pool(pages, page_bytes, int(os.environ.get("PMI_RANK", "0"))))
        if not mpi.measures:
            mpi.serve()
            return
        _answer_rounds(mpi, answers)
        mpi.end()
        return
    processes = multiprocessing.get_context("spawn")
    pipe, theirs = processes.Pipe()
    other = processes.Process(target=_serve, args=(name, pages, page_bytes, theirs), daemon=True)
    other.start()
    _answer_rounds(LIBRARIES[name](Pool(pages, page_bytes, 0), pipe), answers)
    pipe.send(None)
    other.join(5)
    os._exit(0)


if __name__ == "__main__":
    main()
