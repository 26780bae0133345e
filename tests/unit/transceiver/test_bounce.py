"""Bounce (§6.6): the gates, the regions, and whole transfers through them between two engines over a wire of queues."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.protocol.transfer import Run, TransferResult
from kvmesh.transceiver.bounce import BounceGates, BounceRegions, BounceRun, count_fragments, owner_obstacle, run_job
from kvmesh.transceiver.integrity import RunningChecksums
from kvmesh.transceiver.planes.base import MoveJob, Part
from kvmesh.transceiver.types import PoolMemory

REGION_BYTES = 64 << 10
GATES = BounceGates(min_pages=3, min_bytes=512)


def pool_of(memory: np.ndarray, page_bytes: int) -> PoolMemory:
    return PoolMemory(
        address=memory.ctypes.data, nbytes=memory.nbytes, num_pages=memory.nbytes // page_bytes, page_bytes=page_bytes
    )


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, dtype=np.int32)


# Decisions.


def test_gates_come_from_the_environment() -> None:
    assert BounceGates.from_environment({}) == BounceGates()
    told = {"TRTLLM_KV_CACHE_BOUNCE_MIN_BLOCKS": "2", "TRTLLM_KV_CACHE_BOUNCE_MIN_BYTES": "1000"}
    assert BounceGates.from_environment(told) == BounceGates(2, 1000)


@pytest.mark.parametrize("wrong", ["0", "-3", "many", ""])
def test_a_gate_that_is_no_positive_number_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"TRTLLM_KV_CACHE_BOUNCE_MIN_BYTES must be a positive integer"):
        BounceGates.from_environment({"TRTLLM_KV_CACHE_BOUNCE_MIN_BYTES": wrong})


@pytest.mark.parametrize(
    ("fragments", "num_bytes", "offered", "obstacle"),
    [
        (3, 512, 512, None),
        (3, 512, 4096, None),
        (3, 512, None, "not_offered"),
        (3, 513, 512, "no_room"),
        (9, 511, 511, "small"),
        (2, 4096, 4096, "contiguous"),
    ],
)
def test_what_the_owner_decides(fragments: int, num_bytes: int, offered: int | None, obstacle: str | None) -> None:
    run = None if offered is None else Run(1, 0, offered)
    assert owner_obstacle(fragments, num_bytes, run, GATES) == obstacle


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30), st.booleans())
def test_fragments_are_what_cannot_be_written_together(pairs: list[tuple[int, int]], whole: bool) -> None:
    local, remote = (np.array([pair[side] for pair in pairs], dtype=np.int32) for side in (0, 1))
    pools = [PoolMemory(address=0, nbytes=640, num_pages=10, page_bytes=64)]
    part = Part(0, local, 0, remote, 64 if whole else 32)
    joined = sum(after == (before[0] + 1, before[1] + 1) for before, after in itertools.pairwise(pairs))
    assert count_fragments([part, part], pools) == 2 * (len(pairs) - (joined if whole else 0))


# The regions.


@pytest.fixture
def regions() -> Iterator[BounceRegions]:
    made = BounceRegions(REGION_BYTES, [], GATES)
    yield made
    made.close()


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_runs_never_overlap_and_come_back(data: st.DataObject) -> None:
    regions = BounceRegions(REGION_BYTES, [], GATES)
    taken: list[BounceRun] = []
    for _ in range(data.draw(st.integers(1, 30))):
        if taken and data.draw(st.booleans()):
            taken.pop(data.draw(st.integers(0, len(taken) - 1))).give()
        elif (run := regions.reserve(10, data.draw(st.integers(512, REGION_BYTES + 512)))) is not None:
            taken.append(run)
        spans = sorted((run.where.offset, run.where.offset + run.where.nbytes) for run in taken)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
        assert all(0 <= begin < end <= REGION_BYTES for begin, end in spans)
        assert regions.receive_used_bytes >= sum(end - begin for begin, end in spans)
    for run in taken:
        run.give()
        run.give()  # A run that was given back already is nobody's business any more.
    assert regions.receive_used_bytes == regions.send_used_bytes == 0
    whole = regions.reserve(10, REGION_BYTES)
    assert whole is not None
    whole.give()
    regions.close()


def test_what_does_not_fit_or_pay_is_not_reserved(regions: BounceRegions) -> None:
    assert regions.reserve(2, 4096) is None
    assert regions.reserve(3, 511) is None
    assert regions.reserve(3, REGION_BYTES + 1) is None
    whole = regions.reserve(3, REGION_BYTES)
    assert whole is not None
    assert regions.reserve(3, 512) is None
    whole.give()
    assert regions.reserve(3, 512) is not None
    assert regions.fallbacks == {"small": 2, "no_room": 2}


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_what_is_gathered_is_scattered_with_its_checksums(data: st.DataObject) -> None:
    """Any parts: pieces of pages, several pools, other offsets and strides at the other end."""
    random = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    ours, theirs = (random.integers(0, 256, 40 * 256, dtype=np.uint8) for _ in range(2))
    our_pool, their_pool = pool_of(ours, 256), pool_of(theirs, 512)
    owner_parts, receiver_parts, expected = [], [], theirs.reshape(20, 512).copy()
    free = list(random.permutation(20))
    for _ in range(data.draw(st.integers(1, 3))):
        count, nbytes = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 256))
        of, to = ids(*random.integers(0, 40, count)), ids(*(int(free.pop()) for _ in range(count)))
        from_offset, to_offset = data.draw(st.integers(0, 256 - nbytes)), data.draw(st.integers(0, 512 - nbytes))
        owner_parts.append(Part(0, of, 0, to, nbytes, from_offset, to_offset))
        receiver_parts.append(Part(0, to, 0, of, nbytes, to_offset, from_offset))
        expected[to, to_offset : to_offset + nbytes] = ours.reshape(40, 256)[of, from_offset : from_offset + nbytes]
    gates = BounceGates(1, 1)
    sender, receiver = BounceRegions(1 << 20, [our_pool], gates), BounceRegions(1 << 20, [their_pool], gates)
    job = MoveJob(transfer_id=1, session=1, parts=owner_parts)
    run = sender.gather(job, Run(2, 0, 1 << 20))
    if job.num_bytes == 0:
        assert run is None
        return
    assert run is not None
    assert run.where == Run(1, 0, job.num_bytes)
    sums = RunningChecksums([their_pool], receiver_parts)
    receiver.scatter(run, receiver_parts, sums)
    assert np.array_equal(theirs.reshape(20, 512), expected)
    for part, encoded in zip(receiver_parts, sums.encoded(), strict=True):
        pieces = expected[part.local, part.local_offset : part.local_offset + part.nbytes]
        assert np.frombuffer(encoded, "<u8").tolist() == [xxhash.xxh3_64_intdigest(one.tobytes()) for one in pieces]
    sender.close()
    receiver.close()


def test_a_run_is_one_piece() -> None:
    job = MoveJob(transfer_id=1, session=1, parts=[Part(0, ids(4, 9), 0, ids(1, 5), 256)], access=b"key")
    moved = run_job(job, Run(1, 64, 512), Run(2, 128, 512))
    (part,) = moved.parts
    assert (part.local_pool, part.remote_pool, part.local_offset, part.remote_offset) == (1, 2, 64, 128)
    assert (part.local.tolist(), part.remote.tolist(), part.nbytes) == ([0], [0], 512)
    assert (moved.control, moved.access) == (job.control, b"key")


# Whole transfers. Pages of 256 bytes; a transfer moves four of them, at 10, 12, ... into 20, 23, ...

SOURCE, TARGET = [10, 12, 14, 16], [20, 23, 26, 29]


def real_wire(tools: SimpleNamespace, direction: str, times: Any, *, context_bytes: int, generation_bytes: int) -> Any:
    """A wire whose engines have memory, bounce regions of that size, and a plane that copies."""
    sizes = {"context": context_bytes, "generation": generation_bytes}

    class RealWire(tools.Wire):
        def _engine(self, name: str, *arguments: Any) -> Any:
            engine = super()._engine(name, *arguments)
            memory = np.random.default_rng(len(name)).integers(0, 256, engine.pools[0].nbytes, dtype=np.uint8)
            setattr(self, f"{name}_memory", memory.reshape(-1, 256))
            pools = [pool_of(memory, 256)]
            bounce = BounceRegions(sizes[name], pools, GATES) if sizes[name] else None
            engine.plane.pools = [*pools, *(bounce.pools if bounce is not None else [])]
            engine.plane.during = lambda: None
            return dataclasses.replace(engine, pools=pools, bounce=bounce)

    wire = RealWire(direction, times, 1)
    owner_moves = direction == "push"
    mover, other = (
        (wire.context_plane, wire.generation_plane) if owner_moves else (wire.generation_plane, wire.context_plane)
    )
    told = mover.move

    def move(peer: Any, job: MoveJob) -> int:
        moved: int = told(peer, job)
        for part in job.parts:
            here, there = mover.pools[part.local_pool], other.pools[part.remote_pool]
            for local, remote in zip(part.local, part.remote, strict=True):
                ends = [
                    here.address + int(local) * here.page_bytes + part.local_offset,
                    there.address + int(remote) * there.page_bytes + part.remote_offset,
                ]
                source, target = ends if owner_moves else reversed(ends)
                memory_at(target, part.nbytes)[:] = memory_at(source, part.nbytes)
        return moved

    mover.move = move
    wire.mover = mover
    wire.pair()
    return wire


def memory_at(address: int, nbytes: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=np.uint8)


@pytest.fixture
def make_real_wire(tools: SimpleNamespace, make_wire: Callable[..., Any]) -> Callable[..., Any]:
    times = make_wire().context.times

    def make(direction: str, context_bytes: int = REGION_BYTES, generation_bytes: int = REGION_BYTES) -> Any:
        return real_wire(tools, direction, times, context_bytes=context_bytes, generation_bytes=generation_bytes)

    return make


def descriptors(wire: Any) -> int:
    """Pieces in which the last transfer moved."""
    return sum(len(part.local) for part in wire.mover.moved[-1].parts)


def arrived(wire: Any) -> bool:
    return bool(np.array_equal(wire.generation_memory[TARGET], wire.context_memory[SOURCE]))


def nothing_taken(wire: Any) -> bool:
    regions = [engine.bounce for engine in (wire.context, wire.generation) if engine.bounce is not None]
    return all(one.send_used_bytes == one.receive_used_bytes == 0 for one in regions)


def finish(wire: Any, transfer_id: int) -> None:
    wire.pump()
    assert wire.receiver.poll(0).completed == [transfer_id]
    assert wire.sender.poll(0).completed == [transfer_id]
    assert wire.released(transfer_id) == (1, 1)
    assert nothing_taken(wire)


@pytest.mark.parametrize("direction", ["pull", "push"])
def test_pages_go_in_one_piece(make_real_wire: Callable[..., Any], direction: str) -> None:
    """§6.6: eligible, exactly one descriptor and a byte-identical destination."""
    wire = make_real_wire(direction)
    before = wire.generation_memory.copy()
    wire.ask(7, wire.offer(7, SOURCE), TARGET)
    finish(wire, 7)
    assert descriptors(wire) == 1
    assert arrived(wire)
    others = np.setdiff1d(np.arange(len(before)), TARGET)
    assert np.array_equal(wire.generation_memory[others], before[others])
    assert wire.context.bounce.bounced_total == 1


@pytest.mark.parametrize("direction", ["pull", "push"])
@pytest.mark.parametrize(("context_bytes", "generation_bytes"), [(0, 0), (REGION_BYTES, 0), (0, REGION_BYTES)])
def test_off_at_either_side_means_page_by_page(
    make_real_wire: Callable[..., Any], direction: str, context_bytes: int, generation_bytes: int
) -> None:
    """§6.6: 0 gives one write for each fragment."""
    wire = make_real_wire(direction, context_bytes, generation_bytes)
    wire.ask(7, wire.offer(7, SOURCE), TARGET)
    finish(wire, 7)
    assert descriptors(wire) == len(SOURCE)
    assert arrived(wire)
    if context_bytes:
        assert wire.context.bounce.fallbacks["not_offered"] > 0


@pytest.mark.parametrize("direction", ["pull", "push"])
@pytest.mark.parametrize("side", ["context", "generation"])
def test_a_full_region_means_page_by_page(make_real_wire: Callable[..., Any], direction: str, side: str) -> None:
    """§6.6: region exhausted, N descriptors, and the request still succeeds."""
    wire = make_real_wire(direction)
    if side == "generation":
        assert wire.generation.bounce.reserve(9, REGION_BYTES) is not None
    else:
        scattered = ids(*range(0, 64, 2), *range(0, 64, 2))
        job = MoveJob(transfer_id=0, session=0, parts=[Part(0, scattered, 0, scattered, 256)])
        while wire.context.bounce.gather(job, Run(2, 0, REGION_BYTES)) is not None:
            pass
    fallbacks = getattr(wire, side).bounce.fallbacks["no_room"]
    wire.ask(7, wire.offer(7, SOURCE), TARGET)
    wire.pump()
    assert wire.receiver.poll(0).completed == [7]
    assert descriptors(wire) == len(SOURCE)
    assert arrived(wire)
    assert getattr(wire, side).bounce.fallbacks["no_room"] > fallbacks


def test_neighbours_are_not_gathered(make_real_wire: Callable[..., Any]) -> None:
    wire = make_real_wire("push")
    before = wire.context.bounce.fallbacks["contiguous"]
    wire.ask(7, wire.offer(7, [10, 11, 12, 13]), [20, 21, 22, 23])
    finish(wire, 7)
    assert descriptors(wire) == 4
    assert wire.context.bounce.fallbacks["contiguous"] == before + 1


def test_an_owner_that_reads_nothing_any_more_has_its_run_back_at_once(make_real_wire: Callable[..., Any]) -> None:
    wire = make_real_wire("push")
    wire.ask(7, wire.offer(7, SOURCE), TARGET)
    wire.deliver_to_context()
    wire.context.workers.run()
    assert wire.context.bounce.send_used_bytes == 0
    assert wire.generation.bounce.receive_used_bytes > 0
    finish(wire, 7)


def test_what_is_read_stays_gathered_until_the_reader_says_so(make_real_wire: Callable[..., Any]) -> None:
    wire = make_real_wire("pull")
    wire.ask(7, wire.offer(7, SOURCE), TARGET)
    wire.deliver_to_context()
    wire.context.workers.run()
    wire.deliver_to_generation()
    wire.sender.cancel(7)
    wire.sender.poll(0)
    assert wire.context.bounce.send_used_bytes > 0
    wire.pump()
    wire.receiver.poll(0)
    wire.sender.poll(0)
    wire.sender.sweep()
    assert nothing_taken(wire)


@pytest.mark.parametrize("quiet", ["answers", "dies"])
def test_a_cancelled_run_is_not_reused_before_the_owner_is_quiet(
    make_real_wire: Callable[..., Any], quiet: str
) -> None:
    """§6.6: drain before release."""
    wire = make_real_wire("push")
    wire.ask(7, wire.offer(7, SOURCE), TARGET)
    wire.deliver_to_context()  # The owner is about to write.
    assert not wire.receiver.cancel(7)
    assert wire.receiver.poll(0).cancelled == [7]
    assert wire.receiver.table.quarantine.holds(7)
    assert wire.generation.bounce.receive_used_bytes > 0
    assert wire.generation.bounce.reserve(9, REGION_BYTES) is None
    if quiet == "answers":
        wire.pump()
    else:
        wire.receiver.lives.peer_dead("context", 1)
    wire.receiver.sweep()
    assert wire.generation.bounce.receive_used_bytes == 0


def test_a_failed_write_gives_both_runs_back(make_real_wire: Callable[..., Any]) -> None:
    wire = make_real_wire("push")
    wire.context_plane.move_error = "the cable is out"
    wire.ask(7, wire.offer(7, SOURCE), TARGET)
    wire.pump()
    assert [failure.message for failure in wire.receiver.poll(0).failed] == ["the cable is out"]
    assert wire.sender.poll(0).failed
    assert nothing_taken(wire)


def test_another_run_than_was_reserved_fails_the_transfer(make_real_wire: Callable[..., Any]) -> None:
    wire = make_real_wire("push")
    before = wire.generation_memory.copy()
    wire.ask(7, wire.offer(7, SOURCE), TARGET)
    wire.deliver_to_context()
    wire.context.workers.run()
    (index,) = [i for i, message in enumerate(wire.to_generation) if isinstance(message, TransferResult)]
    wire.to_generation[index].bounce = Run(2, 0, 9999)
    wire.pump()
    (failure,) = wire.receiver.poll(0).failed
    assert "another run" in failure.message
    assert np.array_equal(wire.generation_memory, before)
    wire.sender.poll(0)
    assert nothing_taken(wire)
