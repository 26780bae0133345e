"""The NIXL plane: the owner writes exactly the pages that were asked for, one-sidedly, into the receiver's pool.

The agent runs without NIXL's own progress thread, which spins. Progress is made by whoever waits for a write, and by
one thread here that ticks only while this engine has receive sessions open: a write may need the target's help.
All calls to the agent are serialised; those that copy release the interpreter.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvmesh.telemetry import get_logger
from kvmesh.transceiver.borders import isolated
from kvmesh.transceiver.planes.base import MoveControl, MoveJob, MoveStoppedError, Part, PlaneError, Side
from kvmesh.transceiver.planes.nixl_agent import load_nixl, nixl_errors
from kvmesh.transceiver.planes.pieces import check_remote, piece_slices
from kvmesh.transceiver.types import PageIds, PeerKey, PoolMemory

__all__ = ["NixlPlane"]

SLICE_BYTES: Final = 32 << 20
"""One write: a stop is noticed between writes, and a copy on the same host holds the agent for that long."""
TICK_S: Final = 0.001
FIRST_POLLS: Final = 200
FIRST_POLL_S: Final = 50e-6
"""A busy loop starves the transport on small machines; this is short against any network round trip."""
SCRATCH_BYTES: Final = 64
CLOSE_S: Final = 5.0
_MEMORY_KIND: Final = {"cpu": "DRAM", "cuda": "VRAM"}


class _RemotePool(msgspec.Struct, frozen=True, array_like=True):
    address: int
    num_pages: int
    page_bytes: int
    device: Literal["cpu", "cuda"]
    device_id: int


class _Descriptor(msgspec.Struct, frozen=True, array_like=True):
    metadata: bytes
    pools: list[_RemotePool]
    scratch_address: int


@dataclass(frozen=True, slots=True)
class _Attached:
    agent_name: str
    pages: list[Any]
    """Per pool: the prepared list of the peer's pages."""
    pools: list[_RemotePool]


class NixlPlane:
    """See the module.

    Args:
        pools: this engine's pools.
        name: of the agent, unique in the mesh.
        bind_host: where this engine listens; a loopback address keeps UCX on loopback.
        connect_timeout_s: bound of the first write to a peer.

    Raises:
        PlaneError: NIXL is not installed, or cannot use this memory.
    """

    name = "NIXL"

    def __init__(
        self,
        pools: Sequence[PoolMemory],
        *,
        name: str,
        bind_host: str,
        connect_timeout_s: float,
    ) -> None:
        nixl = load_nixl(bind_host)
        self._errors = nixl_errors(nixl)
        self._pools = tuple(pools)
        self._connect_timeout_s = connect_timeout_s
        self._log = get_logger("transceiver.nixl")
        self._lock = threading.Lock()
        self._attached: dict[PeerKey, _Attached] = {}
        self._scratch = np.zeros(SCRATCH_BYTES, dtype=np.uint8)
        try:
            self._agent: Any = nixl.nixl_agent(
                name, nixl.nixl_agent_config(enable_prog_thread=False, enable_listen_thread=False, backends=["UCX"])
            )
            self._registered = [
                self._agent.register_memory(
                    [(pool.address, pool.nbytes, pool.device_id, "")], _MEMORY_KIND[pool.device]
                )
                for pool in self._pools
            ]
            scratch = (self._scratch.ctypes.data, SCRATCH_BYTES, 0)
            self._registered.append(self._agent.register_memory([(*scratch, "")], "DRAM"))
            self._local = [self._prepare("NIXL_INIT_AGENT", _remote(pool)) for pool in self._pools]
            self._local_scratch = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", [scratch], "DRAM")
            self._metadata: bytes = self._agent.get_agent_metadata()
        except self._errors as error:
            raise PlaneError(f"NIXL cannot use this engine's memory: {error}") from error
        self._ticking = threading.Condition()
        self._open_sessions = 0
        self._closed = False
        self._thread = threading.Thread(target=self._tick, name="kvmesh-nixl-progress", daemon=True)
        self._thread.start()

    @property
    def direction(self) -> Literal["pull", "push"]:
        """The owner writes."""
        return "push"

    @property
    def attaches(self) -> Literal["owner"]:
        """The receiver waits to be written to."""
        return "owner"

    @property
    def loans(self) -> None:
        """Nothing is read unasked."""

    def describe(self) -> bytes:
        """See :meth:`DataPlane.describe`."""
        pools = [_remote(pool) for pool in self._pools]
        return msgspec.msgpack.encode(_Descriptor(self._metadata, pools, self._scratch.ctypes.data))

    def attach(self, peer: PeerKey, descriptor: bytes, side: Side) -> str:  # noqa: ARG002
        """See :meth:`DataPlane.attach`. Ends with a real write: the first one to a peer sets the connection up."""
        if peer in self._attached:
            return "nixl"
        try:
            theirs = msgspec.msgpack.decode(descriptor, type=_Descriptor)
        except msgspec.MsgspecError as error:
            raise PlaneError(f"the peer's description of its memory cannot be read: {error}") from error
        try:
            with self._lock:
                agent_name = _text(self._agent.add_remote_agent(theirs.metadata))
        except self._errors as error:
            raise PlaneError(f"NIXL cannot reach {peer}: {error}") from error
        failures: tuple[type[Exception], ...] = (PlaneError, *self._errors)
        try:
            if agent_name != str(peer):
                raise PlaneError(f"{peer} describes the memory of {agent_name}")
            pages = self._reach(agent_name, theirs)
        except failures as error:
            self._remove(agent_name, [])
            raise PlaneError(f"NIXL cannot reach {peer}: {error}") from error
        self._attached[peer] = _Attached(agent_name, pages, theirs.pools)
        return "nixl"

    def detach(self, peer: PeerKey, side: Side) -> None:
        """See :meth:`DataPlane.detach`."""
        if side == "owner" and (attached := self._attached.pop(peer, None)) is not None:
            self._remove(attached.agent_name, attached.pages)

    def grant(self, transfer_id: int, session: int, parts: Sequence[Part]) -> bytes:  # noqa: ARG002
        """Not for a plane that pushes."""
        raise PlaneError("the NIXL plane writes; nothing is granted")

    def revoke(self, transfer_id: int, session: int) -> None:
        """Nothing was granted."""

    def move(self, peer: PeerKey, job: MoveJob) -> int:
        """See :meth:`DataPlane.move`. A write that has been posted is waited for even when the move is stopped."""
        attached = self._attached.get(peer)
        if attached is None:
            raise PlaneError(f"{peer} is not attached")
        check_remote(job.parts, attached.pools)
        try:
            for index, pieces in piece_slices(job.parts, SLICE_BYTES):
                job.control.checkpoint()
                self._run(self._transfer_of(attached, job.parts[index], pieces), job.control)
        except self._errors as error:
            raise PlaneError(f"writing to {peer} failed: {error}") from error
        job.control.checkpoint()
        return job.num_bytes

    def is_quick(self, _peer: PeerKey, _nbytes: int) -> bool:
        """The library may wait for the peer."""
        return False

    def session_opened(self) -> None:
        """See :meth:`DataPlane.session_opened`."""
        with self._ticking:
            self._open_sessions += 1
            self._ticking.notify_all()

    def session_closed(self) -> None:
        """See :meth:`DataPlane.session_closed`."""
        with self._ticking:
            self._open_sessions -= 1

    def close(self) -> None:
        """See :meth:`DataPlane.close`."""
        with self._ticking:
            if self._closed:
                return
            self._closed = True
            self._ticking.notify_all()
        self._thread.join(CLOSE_S)
        # Whoever is stuck in the library holds the lock.
        if self._thread.is_alive() or not self._lock.acquire(timeout=CLOSE_S):
            self._log.warning("NIXL did not end in time; it ends with the process", seconds=CLOSE_S)
            return
        self._lock.release()
        for peer in list(self._attached):
            self.detach(peer, "owner")
        with self._lock:
            for handle in [*self._local, self._local_scratch]:
                self._agent.release_dlist_handle(handle)
            for registered in self._registered:
                self._agent.deregister_memory(registered)
            self._agent = None

    def _reach(self, agent_name: str, theirs: _Descriptor) -> list[Any]:
        with self._lock:
            pages = [self._prepare(agent_name, pool) for pool in theirs.pools]
            scratch = self._agent.prep_xfer_dlist(agent_name, [(theirs.scratch_address, SCRATCH_BYTES, 0)], "DRAM")
        first = np.zeros(1, dtype=np.int32)
        deadline_s = time.monotonic() + self._connect_timeout_s

        def warm_up() -> Any:
            return self._agent.make_prepped_xfer("WRITE", self._local_scratch, first, scratch, first, b"")

        self._run(warm_up, MoveControl(), deadline_s)
        with self._lock:
            self._agent.release_dlist_handle(scratch)
        return pages

    def _remove(self, agent_name: str, pages: list[Any]) -> None:
        with self._lock:
            try:
                for handle in pages:
                    self._agent.release_dlist_handle(handle)
                self._agent.remove_remote_agent(agent_name)
            except self._errors as error:
                # The peer is gone; what it leaves in the library is freed with the agent.
                self._log.debug("a peer was not removed cleanly", peer=agent_name, error=str(error))

    def _prepare(self, agent_name: str, pool: _RemotePool) -> Any:
        pages = _pieces(pool, np.arange(pool.num_pages, dtype=np.int32), 0, pool.page_bytes)
        return self._agent.prep_xfer_dlist(agent_name, pages, _MEMORY_KIND[pool.device])

    def _transfer_of(self, attached: _Attached, part: Part, pieces: slice) -> Callable[[], Any]:
        """What makes the handle of one write; whole pages were described to the library when the peer was attached."""
        ours, theirs = self._pools[part.local_pool], attached.pools[part.remote_pool]
        local, remote = part.local[pieces], part.remote[pieces]
        if part.nbytes == ours.page_bytes == theirs.page_bytes:
            prepared = (self._local[part.local_pool], local, attached.pages[part.remote_pool], remote)
            return lambda: self._agent.make_prepped_xfer("WRITE", *prepared, b"")
        from_list = _pieces(_remote(ours), local, part.local_offset, part.nbytes)
        to_list = _pieces(theirs, remote, part.remote_offset, part.nbytes)
        kinds = (_MEMORY_KIND[ours.device], _MEMORY_KIND[theirs.device])
        return lambda: self._agent.initialize_xfer(
            "WRITE",
            self._agent.get_xfer_descs(from_list, kinds[0]),
            self._agent.get_xfer_descs(to_list, kinds[1]),
            attached.agent_name,
            b"",
        )

    def _run(self, make: Callable[[], Any], control: MoveControl, deadline_s: float = float("inf")) -> None:
        with self._lock:
            handle = make()
            try:
                state = self._agent.transfer(handle)
            except self._errors:
                self._agent.release_xfer_handle(handle)
                raise
        polls = 0
        try:
            while state == "PROC":
                # Only the death of the peer makes it safe to leave a posted write behind.
                if control.abandoned:
                    raise MoveStoppedError
                if time.monotonic() >= deadline_s:
                    raise PlaneError(f"the peer did not answer within {self._connect_timeout_s:g} s")
                time.sleep(FIRST_POLL_S if polls < FIRST_POLLS else TICK_S)
                polls += 1
                with self._lock:
                    state = self._agent.check_xfer_state(handle)
        finally:
            self._release(handle)
        if state != "DONE":
            raise PlaneError(f"a NIXL write ended as {state}")

    def _release(self, handle: Any) -> None:
        with self._lock:
            try:
                self._agent.release_xfer_handle(handle)
            except self._errors as error:
                # NIXL keeps a handle that it cannot cancel and frees it with the agent.
                self._log.debug("a write was not released", error=str(error))

    def _tick(self) -> None:
        failed = False
        while True:
            with self._ticking:
                self._ticking.wait_for(lambda: self._closed or self._open_sessions > 0)
                if self._closed:
                    return
            with self._lock:
                try:
                    self._agent.get_new_notifs()
                except self._errors as error:
                    self._log.debug("a peer was lost", error=str(error))
                except Exception:
                    # Whose writes need the help fail by their deadline; the others must not miss it.
                    if not failed:
                        isolated(self._log, "NIXL makes no progress")
                    failed = True
            time.sleep(TICK_S)


def _remote(pool: PoolMemory) -> _RemotePool:
    return _RemotePool(pool.address, pool.num_pages, pool.page_bytes, pool.device, pool.device_id)


def _pieces(pool: _RemotePool, ids: PageIds, offset: int, nbytes: int) -> NDArray[np.uint64]:
    """Pieces of pages as NIXL describes memory: ``[n, 3]`` of address, bytes, device."""
    described: NDArray[np.uint64] = np.empty((len(ids), 3), dtype=np.uint64)
    described[:, 0] = ids.astype(np.uint64) * np.uint64(pool.page_bytes) + np.uint64(pool.address + offset)
    described[:, 1] = nbytes
    described[:, 2] = pool.device_id
    return described


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name
