"""The NIXL plane writes pieces of pages into pools whose pages are of another size, as unequal peers need (§6.7)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvmesh.cache.device import CpuDevice
from kvmesh.transceiver.planes import nixl
from kvmesh.transceiver.planes.base import MoveJob, Part, PlaneError
from kvmesh.transceiver.planes.nixl import NixlPlane
from kvmesh.transceiver.types import PeerKey, PoolMemory

COUNT = 40


class End:
    """A plane over two pools."""

    def __init__(self, name: str, page_bytes: tuple[int, int], seed: int) -> None:
        self.device = CpuDevice(1 << 24)
        self.buffers = [self.device.allocate(COUNT * size) for size in page_bytes]
        self.pages = [buffer.array.reshape(COUNT, size) for buffer, size in zip(self.buffers, page_bytes, strict=True)]
        for pages in self.pages:
            pages[:] = np.random.default_rng(seed).integers(0, 256, pages.shape, dtype=np.uint8)
        pools = [
            PoolMemory(address=buffer.address, nbytes=buffer.nbytes, num_pages=COUNT, page_bytes=size, fd=buffer.fd)
            for buffer, size in zip(self.buffers, page_bytes, strict=True)
        ]
        self.plane = NixlPlane(pools, name=f"{name}#1", bind_host="127.0.0.1", connect_timeout_s=10.0)

    def close(self) -> None:
        self.plane.close()
        for buffer in self.buffers:
            self.device.free(buffer)


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    made = (End("owner", (8192, 4096), 1), End("receiver", (4096, 16384), 2))
    yield made
    for end in made:
        end.close()


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, dtype=np.int32)


def test_pieces_land_where_they_belong_and_nothing_else_changes(ends: tuple[End, End]) -> None:
    owner, receiver = ends
    peer = PeerKey("receiver", 1)
    receiver.plane.session_opened()
    owner.plane.attach(peer, receiver.plane.describe(), "owner")
    rng = np.random.default_rng(3)
    parts = [
        Part(0, ids(*rng.permutation(COUNT)[:20]), 1, ids(*rng.permutation(COUNT)[:20]), 2048, 1024, 12288),
        Part(0, ids(7, 7), 0, ids(3, 5), 4096, 4096, 0),
        Part(1, ids(1, 2), 0, ids(30, 31), 4096),
        Part(1, ids(), 1, ids(), 64),
    ]
    expected = [pages.copy() for pages in receiver.pages]
    for part in parts:
        for source, target in zip(part.local, part.remote, strict=True):
            piece = owner.pages[part.local_pool][source, part.local_offset : part.local_offset + part.nbytes]
            expected[part.remote_pool][target, part.remote_offset : part.remote_offset + part.nbytes] = piece
    job = MoveJob(transfer_id=7, session=1, parts=parts)
    assert owner.plane.move(peer, job) == job.num_bytes == 20 * 2048 + 4 * 4096
    receiver.plane.session_closed()
    for pages, wanted in zip(receiver.pages, expected, strict=True):
        assert np.array_equal(pages, wanted)


@pytest.mark.parametrize("change", [{"remote_pool": 2}, {"remote_offset": 4095}, {"remote": ids(COUNT)}])
def test_pieces_outside_the_receivers_pages_are_not_written(ends: tuple[End, End], change: dict[str, object]) -> None:
    owner, receiver = ends
    peer = PeerKey("receiver", 1)
    receiver.plane.session_opened()
    owner.plane.attach(peer, receiver.plane.describe(), "owner")
    receiver.plane.session_closed()
    part = Part(0, ids(1), 0, ids(1), 64)._replace(**change)  # type: ignore[arg-type]
    with pytest.raises(PlaneError, match=r"of the peer|the peer's (pages|pool)"):
        owner.plane.move(peer, MoveJob(transfer_id=7, session=1, parts=[part]))


def test_closing_does_not_wait_for_whoever_is_stuck_in_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """See :meth:`DataPlane.close`: bounded."""
    monkeypatch.setattr(nixl, "CLOSE_S", 0.05)
    end = End("stuck", (4096, 4096), 1)
    with end.plane._lock:
        end.plane.session_opened()
        end.plane.close()
    # What was left behind is released as if the process had ended.
    end.plane._thread.join(20)
    assert not end.plane._thread.is_alive()
    end.plane._closed = False
    end.close()
