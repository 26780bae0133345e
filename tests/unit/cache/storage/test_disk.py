"""Files of the disk tier: damage, dead owners, and disks that are full or broken."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from storages import content, fill, slots

from kvmesh.cache.errors import TierFailedError
from kvmesh.cache.storage import Storage, disk
from kvmesh.cache.storage.disk import FILE_PREFIX, PageFile, sweep
from kvmesh.cache.storage.memory import PageMemory

MakeStorage = Callable[..., Storage]
EVERY = np.arange(8, dtype=np.int32)
LEVELS = ((8, 8), (8, 8), (8, 8))


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.name.startswith(FILE_PREFIX))


def file_of_pool_0(directory: Path) -> Path:
    """The file with 512-byte pages when only pool 0 has been written."""
    (path,) = (path for path in files(directory) if path.stat().st_size)
    return path


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


class TestDamage:
    @pytest.mark.parametrize("to", [0, 1, 2])
    def test_a_flipped_bit_is_found_wherever_the_page_goes(
        self, make_storage: MakeStorage, tmp_path: Path, to: int
    ) -> None:
        storage = make_storage(((8, 8), (8, 8), (16, 8)))
        before = fill(storage)
        storage.move(0, 0, EVERY, 2, EVERY)
        flip(file_of_pool_0(tmp_path), 5 * 512 + 511)
        there = EVERY + 8 if to == 2 else EVERY
        assert storage.move(0, 2, EVERY, to, there).tolist() == [slot != 5 for slot in range(8)]
        if to:
            content(storage)[:] = 0
            assert storage.move(0, to, there, 0, EVERY).tolist() == [slot != 5 for slot in range(8)]
        good = EVERY[EVERY != 5]
        assert np.array_equal(content(storage)[good], before[good])

    def test_a_truncated_file(self, make_storage: MakeStorage, tmp_path: Path) -> None:
        storage = make_storage()
        before = fill(storage)
        storage.move(0, 0, EVERY, 2, EVERY)
        path = file_of_pool_0(tmp_path)
        os.truncate(path, 3 * 512 + 100)
        assert storage.move(0, 2, EVERY, 0, EVERY).tolist() == [True] * 3 + [False] * 5
        # Writing makes it long again: what is in between is a hole, not a page.
        content(storage)[:] = before
        assert storage.move(0, 0, slots(7), 2, slots(7)).all()
        assert storage.move(0, 2, EVERY, 1, EVERY).tolist() == [True] * 3 + [False] * 4 + [True]

    def test_a_lost_page_is_not_found_again_where_it_lay(self, make_storage: MakeStorage, tmp_path: Path) -> None:
        """The host slot that a truncated page is read into still has the page's bytes."""
        storage = make_storage()
        fill(storage)
        storage.move(0, 0, slots(0), 1, slots(3))
        storage.move(0, 1, slots(3), 2, slots(0))
        os.truncate(file_of_pool_0(tmp_path), 0)
        assert storage.move(0, 2, slots(0), 1, slots(3)).tolist() == [False]
        assert storage.move(0, 1, slots(3), 1, slots(4)).tolist() == [False]
        assert storage.move(0, 1, slots(4), 0, slots(1)).tolist() == [False]

    def test_a_deleted_file_holds_nothing_and_takes_nothing(self, make_storage: MakeStorage, tmp_path: Path) -> None:
        storage = make_storage()
        fill(storage)
        storage.move(0, 0, EVERY, 2, EVERY)
        path = file_of_pool_0(tmp_path)
        path.unlink()
        path.write_bytes(b"another's")
        assert not storage.move(0, 2, EVERY, 0, EVERY).any()
        assert storage.move(0, 0, EVERY[:0], 2, EVERY[:0]).tolist() == []
        with pytest.raises(TierFailedError, match="was deleted") as raised:
            storage.move(0, 0, EVERY, 2, EVERY)
        assert raised.value.level == 2
        storage.close()
        assert path.read_bytes() == b"another's"
        path.unlink()

    def test_damage_in_host_memory(self, make_storage: MakeStorage) -> None:
        storage = make_storage()
        fill(storage)
        storage.move(0, 0, EVERY, 1, EVERY)
        pool = storage._cold[0][0]
        assert isinstance(pool, PageMemory)
        pool.array[2 * 512] ^= 1
        assert storage.move(0, 1, slots(1, 2), 2, slots(1, 2)).tolist() == [True, False]
        assert storage.move(0, 1, slots(1, 2), 0, slots(1, 2)).tolist() == [True, False]

    def test_sectors_that_cannot_be_read(self, make_storage: MakeStorage, monkeypatch: pytest.MonkeyPatch) -> None:
        """An I/O error costs the pages it is about, not their neighbours."""
        storage = make_storage()
        before = fill(storage)
        storage.move(0, 0, EVERY, 2, EVERY)
        preadv, bad = os.preadv, 4 * 512

        def broken(fd: int, views: Sequence[memoryview], offset: int) -> int:
            if offset <= bad < offset + sum(view.nbytes for view in views):
                raise OSError(errno.EIO, "input/output error")
            return preadv(fd, views, offset)

        monkeypatch.setattr(disk.os, "preadv", broken)
        assert storage.move(0, 2, EVERY, 0, EVERY[::-1]).tolist() == [slot != 4 for slot in range(8)]
        kept = EVERY[EVERY != 3]
        assert np.array_equal(content(storage)[kept], before[::-1][kept])

    def test_reads_and_writes_that_stop_early_go_on(
        self, make_storage: MakeStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        storage = make_storage()
        before = fill(storage, 1)
        preadv, pwritev = os.preadv, os.pwritev

        def piecemeal(call: Callable[..., int]) -> Callable[..., int]:
            return lambda fd, views, offset: call(fd, [views[0][:700]], offset)

        monkeypatch.setattr(disk.os, "preadv", piecemeal(preadv))
        monkeypatch.setattr(disk.os, "pwritev", piecemeal(pwritev))
        assert storage.move(1, 0, EVERY, 2, slots(7, 0, 1, 2, 5, 6, 3, 4)).all()
        content(storage, 1)[:] = 0
        assert storage.move(1, 2, slots(7, 0, 1, 2, 5, 6, 3, 4), 0, EVERY).all()
        assert np.array_equal(content(storage, 1), before)


class TestFailingWrites:
    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
    @pytest.mark.parametrize("source", [0, 1])
    def test_nothing_counts_as_moved_and_the_tier_can_be_read(
        self, make_storage: MakeStorage, monkeypatch: pytest.MonkeyPatch, number: int, source: int
    ) -> None:
        storage = make_storage()
        before = fill(storage)
        storage.move(0, 0, EVERY, 1, EVERY)
        storage.move(0, 0, slots(0, 1), 2, slots(4, 0))

        def full(fd: int, views: Sequence[memoryview], offset: int) -> int:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(disk.os, "pwritev", full)
            with pytest.raises(TierFailedError, match=os.strerror(number)) as raised:
                storage.move(0, source, slots(2, 3), 2, slots(2, 3))
        assert raised.value.level == 2
        assert os.strerror(number) in raised.value.reason
        assert np.array_equal(content(storage), before)
        content(storage)[:] = 0
        assert storage.move(0, 1, EVERY, 0, EVERY).all()
        assert np.array_equal(content(storage), before)
        assert storage.move(0, 2, slots(4, 2, 3, 0), 0, EVERY[:4]).tolist() == [True, False, False, True]
        # The error, which somebody may keep, keeps no memory.
        storage.resize(1, 0, 40_000)
        assert storage.move(0, 1, EVERY, 0, EVERY).all()

    def test_a_write_without_progress(self, make_storage: MakeStorage, monkeypatch: pytest.MonkeyPatch) -> None:
        storage = make_storage()
        monkeypatch.setattr(disk.os, "pwritev", lambda fd, views, offset: 0)
        with pytest.raises(TierFailedError, match="after 0 bytes"):
            storage.move(0, 0, slots(0), 2, slots(0))

    def test_a_real_limit_of_the_file_system(self, tmp_path: Path) -> None:
        """RLIMIT_FSIZE: the kernel itself writes what fits and then refuses."""
        program = f"""
import resource, sys
from pathlib import Path
import numpy as np
from storages import content, fill, two_pools
from kvmesh.cache.device import CpuDevice
from kvmesh.cache.errors import TierFailedError
from kvmesh.cache.storage import Storage

storage = Storage(two_pools(), {LEVELS}, ("gpu", "host", "disk"), CpuDevice(1 << 20), disk_path=Path(sys.argv[1]))
before = fill(storage)
resource.setrlimit(resource.RLIMIT_FSIZE, (5 * 512 + 10, resource.RLIM_INFINITY))
first, rest = np.arange(3, dtype=np.int32), np.arange(3, 8, dtype=np.int32)
assert storage.move(0, 0, first, 2, first).all()
try:
    storage.move(0, 0, rest, 2, rest)
except TierFailedError as error:
    assert "File too large" in error.reason, error
else:
    raise AssertionError("a page was written beyond the limit")
assert np.array_equal(content(storage), before)
content(storage)[:] = 0
assert storage.move(0, 2, first, 0, first).all()
assert np.array_equal(content(storage)[first], before[first])
storage.close()
"""
        support = str(Path(__file__).parents[3] / "support")
        environment = {**os.environ, "PYTHONPATH": support}
        subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=120, env=environment)
        assert files(tmp_path) == []


class TestOwners:
    def test_files_are_private_and_not_inherited(self, make_storage: MakeStorage, tmp_path: Path) -> None:
        make_storage()
        assert len(files(tmp_path)) == 2
        for path in files(tmp_path):
            assert path.stat().st_mode & 0o777 == 0o600
            assert path.name.startswith(f"{FILE_PREFIX}{os.getpid()}-")
        descriptors = [
            int(link.name) for link in Path("/proc/self/fd").iterdir() if link.resolve() in files(tmp_path.resolve())
        ]
        assert len(descriptors) == 2
        assert not any(os.get_inheritable(fd) for fd in descriptors)

    def test_what_a_killed_process_leaves_is_swept_and_a_living_one_keeps_its_files(
        self, make_storage: MakeStorage, tmp_path: Path
    ) -> None:
        program = """
import sys, time
from pathlib import Path
from kvmesh.cache.storage.disk import PageFile
pages = [PageFile(Path(sys.argv[1]), 512) for _ in range(2)]
print("ready", flush=True)
sys.stdin.read()
"""
        others = [
            subprocess.Popen(
                [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(2)
        ]
        try:
            for process in others:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            owned = {process.pid: files(tmp_path) for process in others}
            for pid, paths in owned.items():
                owned[pid] = [path for path in paths if path.name.startswith(f"{FILE_PREFIX}{pid}-")]
            killed, living = others
            killed.send_signal(signal.SIGKILL)
            killed.wait(30)
            bystander = tmp_path / "notes.txt"
            bystander.write_text("not ours")
            (tmp_path / f"{FILE_PREFIX}directory").mkdir()
            make_storage()
            left = files(tmp_path)
            assert not set(owned[killed.pid]) & set(left)
            assert set(owned[living.pid]) <= set(left)
            assert bystander.exists()
            (tmp_path / f"{FILE_PREFIX}directory").rmdir()
        finally:
            for process in others:
                process.kill()
                process.communicate(timeout=30)
        assert len(sweep(tmp_path)) == 2

    def test_links_and_unreadable_things_are_left_alone(self, tmp_path: Path) -> None:
        target = tmp_path / "precious"
        target.write_text("x")
        link = tmp_path / f"{FILE_PREFIX}link"
        link.symlink_to(target)
        os.mkfifo(tmp_path / f"{FILE_PREFIX}pipe")
        assert sweep(tmp_path) == []
        assert link.is_symlink()
        assert target.exists()

    def test_a_sweeper_that_comes_before_the_lock(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The new file is swept between its creation and its lock: another one is made."""
        flock, swept = fcntl.flock, []

        def after_a_sweep(fd: int, operation: int) -> None:
            if not swept:
                swept.append(fd)
                assert len(sweep(tmp_path)) == 1
            flock(fd, operation)

        monkeypatch.setattr(disk.fcntl, "flock", after_a_sweep)
        pool = PageFile(tmp_path, 512)
        assert files(tmp_path) == [pool.path]
        monkeypatch.undo()
        assert sweep(tmp_path) == []
        pool.close()
        assert files(tmp_path) == []

    def test_a_sweeper_that_holds_the_lock(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        flock, refusals = fcntl.flock, iter([True, False])

        def taken_once(fd: int, operation: int) -> None:
            if next(refusals):
                raise BlockingIOError(errno.EWOULDBLOCK, "locked")
            flock(fd, operation)

        monkeypatch.setattr(disk.fcntl, "flock", taken_once)
        pool = PageFile(tmp_path, 512)
        assert files(tmp_path) == [pool.path]
        pool.close()

    def test_a_file_system_without_locks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def unsupported(fd: int, operation: int) -> None:
            raise OSError(errno.ENOLCK, "no locks available")

        monkeypatch.setattr(disk.fcntl, "flock", unsupported)
        with pytest.raises(OSError, match="no locks"):
            PageFile(tmp_path, 512)
        assert files(tmp_path) == []

    def test_others_that_remove_every_new_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def lost(fd: int, operation: int) -> None:
            raise BlockingIOError(errno.EWOULDBLOCK, "locked")

        monkeypatch.setattr(disk.fcntl, "flock", lost)
        with pytest.raises(OSError, match="in a row"):
            PageFile(tmp_path, 512)
        assert files(tmp_path) == []


def test_a_smaller_file_gives_its_space_back(tmp_path: Path) -> None:
    pages = PageMemory(np.full(8 * 4096, 7, dtype=np.uint8), 4096)
    pool = PageFile(tmp_path, 4096)
    pool.store(EVERY, pages, EVERY)
    assert pool.path.stat().st_size == 8 * 4096
    pool.resize(3)
    assert pool.path.stat().st_size == 3 * 4096
    pool.resize(8)
    assert pool.load(EVERY, pages, EVERY).tolist() == [True] * 3 + [False] * 5
    pool.close()


def test_neighbours_go_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = PageMemory(np.zeros(8 * 512, dtype=np.uint8), 512)
    pool = PageFile(tmp_path, 512)
    calls = []
    pwritev = os.pwritev
    monkeypatch.setattr(
        disk.os, "pwritev", lambda fd, views, offset: calls.append((offset, len(views))) or pwritev(fd, views, offset)
    )
    pool.store(slots(5, 3, 4, 0), pages, slots(2, 6, 7, 1))
    # Slots 3, 4, 5 follow each other; of their rows 6, 7, 2 the first two do.
    assert calls == [(0, 1), (3 * 512, 2)]
    pool.close()


def test_more_pieces_than_one_call_takes(tmp_path: Path) -> None:
    count = 2500
    pages = PageMemory(np.random.default_rng(0).integers(0, 256, 2 * count * 64, dtype=np.uint8), 64)
    pool = PageFile(tmp_path, 64)
    rows = np.random.default_rng(1).permutation(2 * count)[:count].astype(np.int32)
    wanted = pages.array.reshape(-1, 64)[rows].copy()
    pool.store(np.arange(count, dtype=np.int32), pages, rows)
    pages.array[:] = 0
    assert pool.load(np.arange(count, dtype=np.int32), pages, rows).all()
    assert np.array_equal(pages.array.reshape(-1, 64)[rows], wanted)
    pool.close()
