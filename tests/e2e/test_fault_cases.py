"""Chosen cases of the fault matrix (``make fault-matrix`` runs all of it): what is frozen stands for a second only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fault_cases import Bench, Case, golden_items
from meshes.faulty import SERVICES, FaultyMesh
from meshes.hosts import Network, obstacle
from soaks import soak_only

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TIMEOUT_MS = 3000
DEADLINE_S = 10.0
LEASE_S = 5.0
FREEZE_S = 1.0
CUT_S = 1.0

CASES = [
    Case("memfd", "sender", "kill", "between slices"),
    Case("memfd", "receiver", "freeze", "between slices"),
    Case("memfd", "coordinator", "kill", "first slice"),
    Case("memfd", "router", "kill", "before acknowledgement"),
    Case("nixl", "sender", "kill", "between slices"),
    Case("nixl", "receiver", "kill", "between slices"),
]
MORE_CASES = [
    Case("memfd", "sender", "term", "before send"),
    Case("memfd", "receiver", "kill", "last slice"),
    Case("tcp", "receiver", "kill", "between slices"),
    Case("tcp", "sender", "freeze", "first slice"),
    Case("nixl", "receiver", "freeze", "before acknowledgement"),
]
CUT = Case("tcp", "sender", "cut", "between slices")


@pytest.fixture(scope="module")
def benches() -> Iterator[dict[str, Bench]]:
    """The bench of each plane, once a case has asked for it."""
    benches: dict[str, Bench] = {}
    yield benches
    problems = []
    for bench in benches.values():
        try:
            bench.mesh.stop()
        except AssertionError as error:
            problems.append(str(error))
    assert not problems, "\n".join(problems)


def make_bench(plane: str, network: Network | None = None) -> Bench:
    mesh = FaultyMesh(
        plane, timeout_ms=TIMEOUT_MS, request_timeout_s=DEADLINE_S, lease_s=LEASE_S, network=network
    ).begin()
    *shorter, longest = golden_items()
    bench = Bench(mesh, DEADLINE_S, FREEZE_S, CUT_S, longest, shorter[-1])
    bench.warm_up()
    return bench


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=soak_only) for case in MORE_CASES)],
    ids=lambda case: case.name,
)
def test_case(benches: dict[str, Bench], case: Case) -> None:
    if case.plane not in benches:
        benches[case.plane] = make_bench(case.plane)
    outcome = benches[case.plane].run(case)
    print(outcome)
    if not outcome.passed:
        # What is left of the mesh says nothing about the next case.
        benches.pop(case.plane).mesh.stop()
    assert outcome.problems == []


@pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "can be cut")
def test_a_host_is_cut_off() -> None:
    network = Network(SERVICES, apart=True)
    try:
        bench = make_bench(CUT.plane, network)
        try:
            assert bench.run(CUT).problems == []
        finally:
            bench.mesh.stop()
    finally:
        network.close()
