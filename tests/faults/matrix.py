"""Runs the fault matrix: ``python tests/faults/matrix.py`` (``make fault-matrix``).

A run of all cases writes the table in docs/faults.md. Each plane runs in meshes of its own, several at a time. Results
go to a file as they come; what has passed is not run again, so an interrupted run goes on where it was. Nothing is
retried.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests" / "support"), str(Path(__file__).parent)]

from channel_peers import why_not  # noqa: E402
from fault_cases import PLANES, STAGED, Bench, Case, Outcome, cases_of, golden_items  # noqa: E402
from meshes.faulty import SERVICES, FaultyMesh  # noqa: E402
from meshes.hosts import Network, obstacle  # noqa: E402
from table import write_table  # noqa: E402

DIRECTORY: Final = ROOT / ".fault-matrix"
TIMEOUT_MS: Final = 4000
DEADLINE_S: Final = 12.0
FREEZE_S: Final = 10.0
CUT_S: Final = 7.0
"""Longer than the shorter lease."""
LEASES: Final[dict[str, tuple[float, frozenset[str]]]] = {
    # Renewed three times a lease: what stands still for ten seconds keeps it.
    "long": (16.0, frozenset({"freeze", "block"})),
    "short": (4.0, frozenset({"kill", "term", "cut", "freeze past its lease"})),
}
"""Meshes by the lease of their members: its seconds, and the kinds of faults that are shown there."""


def main() -> int:
    """Run what is asked for; the exit status is 1 when something failed."""
    parser = argparse.ArgumentParser(description="Run the fault matrix and write its table to docs/faults.md.")
    parser.add_argument("--only", action="append", default=[], help="run cases whose name has this text; repeatable")
    parser.add_argument("--again", action="store_true", help="run also what has passed already")
    parser.add_argument("--parallel", type=int, default=3, help="meshes at a time")
    parser.add_argument("--results", type=Path, default=DIRECTORY / "results.json")
    parser.add_argument("--list", action="store_true", help="print the names of the cases, of those of --only if given")
    parser.add_argument("--table", action="store_true", help="write the table also after --only")
    parser.add_argument("--table-only", action="store_true", help="write the table of the results that are there")
    parser.add_argument("--mesh", nargs=2, metavar=("PLANE", "LEASE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    # Both leave through the clean-up, also where a shell has started this with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    if options.mesh is not None:
        return _run_mesh(*options.mesh, names=set(json.load(sys.stdin)))
    names = [case.name for plane in PLANES for case in cases_of(plane, network=True) if _is_named(case, options)]
    for text in options.only:
        if not any(text in name for name in names):
            parser.error(f"no case has {text!r} in its name; --list prints them")
    if options.list:
        print(*names, sep="\n")
        return 0
    results = Results(options.results)
    if not options.table_only:
        _run_all(results, options)
    if options.table_only or options.table or not options.only:
        write_table(results.outcomes)
    failed = [name for name, outcome in results.outcomes.items() if outcome["problems"]]
    print(f"{len(results.outcomes) - len(failed)} cases passed, {len(failed)} failed", *failed, sep="\n  ")
    return 1 if failed else 0


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


class Results:
    """Outcomes by name of their case, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.running: list[subprocess.Popen[str]] = []
        """Processes whose outcomes come in."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.outcomes: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}

    def add(self, outcome: dict[str, Any]) -> None:
        """Take an outcome in."""
        self.outcomes[outcome["case"]] = outcome
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self.outcomes, indent=1, sort_keys=True))
        new.replace(self._path)


def _run_all(results: Results, options: argparse.Namespace) -> None:
    if reason := obstacle():
        print(f"without cuts and blocked ports: {reason}")
    groups = []
    for lease, (_seconds, kinds) in LEASES.items():
        for plane in PLANES:
            if reason := _missing_library(plane):
                print(f"without {plane}: {reason}")
                continue
            cases = [case for case in cases_of(plane, network=_has_hosts(plane)) if case.kind in kinds]
            names = [case.name for case in cases if _is_wanted(case, results, options)]
            if names:
                groups.append((plane, lease, names))
    print(f"{sum(len(names) for _, _, names in groups)} cases in {len(groups)} meshes")
    with ThreadPoolExecutor(options.parallel) as threads:
        waits = [threads.submit(_collect, results, *group) for group in groups]
        try:
            for wait in waits:
                wait.result()
        finally:
            for wait in waits:
                wait.cancel()
            for process in results.running:
                process.terminate()


def _has_hosts(plane: str) -> bool:
    """Whether each service gets a host of its own."""
    return plane not in STAGED and not obstacle()


def _missing_library(plane: str) -> str | None:
    return why_not(plane.removeprefix("cpp ")) if plane.startswith("cpp ") else None


def _is_named(case: Case, options: argparse.Namespace) -> bool:
    return not options.only or any(text in case.name for text in options.only)


def _is_wanted(case: Case, results: Results, options: argparse.Namespace) -> bool:
    known = results.outcomes.get(case.name)
    if not _is_named(case, options):
        return False
    return options.again or known is None or bool(known["problems"])


def _collect(results: Results, plane: str, lease: str, names: list[str]) -> None:
    argv = [sys.executable, __file__, "--mesh", plane, lease]
    log = DIRECTORY / f"{plane}-{lease}.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(names))
        process.stdin.close()
        results.running.append(process)
        for line in process.stdout:
            outcome = json.loads(line)
            results.add(outcome)
            state = "; ".join(outcome["problems"]).partition("\n")[0][:300] or outcome["answer"]
            print(f"{time.strftime('%H:%M:%S')} {outcome['case']}: {state} {'; '.join(outcome['remarks'])}", flush=True)
    if process.returncode != 0:
        print(f"{plane} with a {lease} lease ended with {process.returncode}; see {log}", flush=True)


def _run_mesh(plane: str, lease: str, names: set[str]) -> int:
    """In a process of its own: run cases, one outcome a line. A case that failed costs the mesh."""
    network = Network(SERVICES, apart=plane != "memfd") if _has_hosts(plane) else None
    try:
        waiting = [case for case in cases_of(plane, network=network is not None) if case.name in names]
        while waiting:
            _run_some(_make_bench(plane, LEASES[lease][0], network), waiting)
    finally:
        if network is not None:
            network.close()
    return 0


def _make_bench(plane: str, lease_s: float, network: Network | None) -> Bench:
    mesh = FaultyMesh(plane, timeout_ms=TIMEOUT_MS, request_timeout_s=DEADLINE_S, lease_s=lease_s, network=network)
    *shorter, longest = golden_items()
    return Bench(mesh, DEADLINE_S, FREEZE_S, CUT_S, longest, shorter[-1])


def _run_some(bench: Bench, waiting: list[Case]) -> None:
    """Run cases until one fails or none waits; they are taken from the list."""
    mesh = bench.mesh
    outcome: Outcome | None = None
    try:
        mesh.begin()
        bench.warm_up()
        while waiting and (outcome is None or outcome.passed):
            if outcome is not None:
                print(json.dumps(outcome.as_json()), flush=True)
            outcome = bench.run(waiting.pop(0))
    finally:
        if outcome is not None and not outcome.passed:
            _keep_logs(bench, outcome)
        try:
            mesh.stop()
        except AssertionError as error:
            if outcome is None:
                raise
            outcome.problems.append(f"stopping: {str(error)[-2000:]}")
        if outcome is not None:
            outcome.remarks += bench.growth()
            print(json.dumps(outcome.as_json()), flush=True)


def _keep_logs(bench: Bench, outcome: Outcome) -> None:
    kept = DIRECTORY / "logs" / outcome.case.replace(", ", "-").replace(": ", "-").replace(" ", "_")
    shutil.rmtree(kept, ignore_errors=True)
    if bench.mesh.logs.exists():
        shutil.copytree(bench.mesh.logs, kept)


if __name__ == "__main__":
    raise SystemExit(main())
