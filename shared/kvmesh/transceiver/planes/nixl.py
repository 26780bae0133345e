"""The NIXL plane: the owner writes exactly the pages that were asked for, one-sidedly, into the receiver's pool.

The agent runs without NIXL's own progress thread, which spins. Progress is made by whoever waits for a write, and by
one thread here that ticks only while this engine has receive sessions open: a write may need the target's help.
All calls to the agent are serialised; those that copy release the interpreter.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvmesh.telemetry import get_logger
from kvmesh.transceiver.planes.base import MoveControl, MoveJob, MoveStoppedError, PlaneError
from kvmesh.transceiver.planes.nixl_agent import load_nixl, nixl_errors
from kvmesh.transceiver.runs import slices
from kvmesh.transceiver.types import PageIds, PeerKey, PoolMemory

__all__ = ["NixlPlane"]

SLICE_BYTES: Final = 32 << 20
"""One write: a stop is noticed between writes, and a copy on the same host holds the agent for that long."""
TICK_S: Final = 0.001
FIRST_POLLS: Final = 200
FIRST_POLL_S: Final = 50e-6
"""A busy loop starves the transport on small machines; this is short against any network round trip."""
SCRATCH_BYTES: Final = 64
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
    num_pages: list[int]


class NixlPlane:
    """See the module.

    Args:
        pools: this engine's pools.
        pool_of_group: for every layer group the index of its pool.
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
        pool_of_group: Sequence[int],
        *,
        name: str,
        bind_host: str,
        connect_timeout_s: float,
    ) -> None:
        nixl = load_nixl(bind_host)
        self._errors = nixl_errors(nixl)
        self._pools = tuple(pools)
        self._pool_of_group = tuple(pool_of_group)
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

    def describe(self) -> bytes:
        """See :meth:`DataPlane.describe`."""
        pools = [_remote(pool) for pool in self._pools]
        return msgspec.msgpack.encode(_Descriptor(self._metadata, pools, self._scratch.ctypes.data))

    def attach(self, peer: PeerKey, descriptor: bytes) -> str:
        """See :meth:`DataPlane.attach`. Ends with a real write: the first one to a peer sets the connection up."""
        if peer in self._attached:
            return "nixl"
        try:
            theirs = msgspec.msgpack.decode(descriptor, type=_Descriptor)
        except msgspec.MsgspecError as error:
            raise PlaneError(f"the peer's description of its memory cannot be read: {error}") from error
        sizes = [pool.page_bytes for pool in theirs.pools]
        if sizes != (ours := [pool.page_bytes for pool in self._pools]):
            raise PlaneError(f"the peer's pools have pages of {sizes} bytes, this engine's {ours}")
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
        self._attached[peer] = _Attached(agent_name, pages, [pool.num_pages for pool in theirs.pools])
        return "nixl"

    def detach(self, peer: PeerKey) -> None:
        """See :meth:`DataPlane.detach`."""
        if (attached := self._attached.pop(peer, None)) is not None:
            self._remove(attached.agent_name, attached.pages)

    def grant(self, transfer_id: int, session: int, pages: Sequence[PageIds]) -> bytes:  # noqa: ARG002
        """Not for a plane that pushes."""
        raise PlaneError("the NIXL plane writes; nothing is granted")

    def revoke(self, transfer_id: int, session: int) -> None:
        """Nothing was granted."""

    def move(self, peer: PeerKey, job: MoveJob) -> int:
        """See :meth:`DataPlane.move`. A write that has been posted is waited for even when the move is stopped."""
        attached = self._attached.get(peer)
        if attached is None:
            raise PlaneError(f"{peer} is not attached")
        for group, pages in enumerate(job.remote):
            count = attached.num_pages[self._pool_of_group[group]]
            if len(pages) and not 0 <= int(pages.min()) <= int(pages.max()) < count:
                raise PlaneError(f"pages outside the receiver's pool of {count} pages were asked for (group {group})")
        moved = 0
        most = [max(1, SLICE_BYTES // self._pools[pool].page_bytes) for pool in self._pool_of_group]
        try:
            for group, part in slices([len(pages) for pages in job.local], most):
                job.control.checkpoint()
                pool = self._pool_of_group[group]
                local, remote = job.local[group][part], job.remote[group][part]
                self._write(self._local[pool], local, attached.pages[pool], remote, job.control)
                moved += len(local) * self._pools[pool].page_bytes
        except self._errors as error:
            raise PlaneError(f"writing to {peer} failed: {error}") from error
        job.control.checkpoint()
        return moved

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
        self._thread.join()
        for peer in list(self._attached):
            self.detach(peer)
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
        self._write(self._local_scratch, first, scratch, first, MoveControl(), deadline_s)
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
        descriptors: NDArray[np.uint64] = np.empty((pool.num_pages, 3), dtype=np.uint64)
        descriptors[:, 0] = pool.address + np.arange(pool.num_pages, dtype=np.uint64) * np.uint64(pool.page_bytes)
        descriptors[:, 1] = pool.page_bytes
        descriptors[:, 2] = pool.device_id
        return self._agent.prep_xfer_dlist(agent_name, descriptors, _MEMORY_KIND[pool.device])

    def _write(
        self,
        local: Any,
        local_ids: PageIds,
        remote: Any,
        remote_ids: PageIds,
        control: MoveControl,
        deadline_s: float = float("inf"),
    ) -> None:
        with self._lock:
            handle = self._agent.make_prepped_xfer("WRITE", local, local_ids, remote, remote_ids, b"")
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
            time.sleep(TICK_S)


def _remote(pool: PoolMemory) -> _RemotePool:
    return _RemotePool(pool.address, pool.num_pages, pool.page_bytes, pool.device, pool.device_id)


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name
