"""The fault matrix: who is hurt how at which point of a transfer, and what must hold afterwards.

A case holds a transfer up at its point, hurts the victim, lets the rest go on, and mends the victim again. Then:

- the client has its answer, or an error, by its deadline; an answer is the right one;
- no page is lost on the servers that lived through it, and none later on the victim;
- the next request, of another prompt, is answered rightly.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import psutil
from meshes.by_hand import is_idle
from meshes.faulty import FaultyMesh
from meshes.process import request, until

from kvmesh.models.store import DEFAULT_MODEL

__all__ = [
    "EXCLUDED",
    "KINDS",
    "NOT_BROUGHT_ABOUT",
    "PLANES",
    "POINTS",
    "STAGED",
    "VICTIMS",
    "Bench",
    "Case",
    "Footprint",
    "Outcome",
    "cases_of",
    "golden_items",
    "is_excluded",
]

Victim = Literal["sender", "receiver", "coordinator", "router"]
Kind = Literal["kill", "freeze", "freeze past its lease", "term", "cut", "block"]
Point = Literal["before send", "first slice", "between slices", "last slice", "before acknowledgement"]

PLANES: Final = ("memfd", "tcp", "nixl", "cpp", "cpp ucx", "cpp mooncake", "cpp mpi")
STAGED: Final = frozenset(PLANES[3:])
"""Those of the CPP runtime: the same protocol over several libraries, and hurt in fewer ways."""
STAGED_KINDS: Final = frozenset({"kill", "freeze", "term"})
STAGED_VICTIMS: Final = frozenset({"sender", "receiver"})
STAGED_POINTS: Final = frozenset({"before send", "between slices", "before acknowledgement"})
VICTIMS: Final[tuple[Victim, ...]] = ("sender", "receiver", "coordinator", "router")
KINDS: Final[tuple[Kind, ...]] = ("kill", "freeze", "freeze past its lease", "term", "cut", "block")
POINTS: Final[tuple[Point, ...]] = (
    "before send",
    "first slice",
    "between slices",
    "last slice",
    "before acknowledgement",
)
SERVICE_OF: Final[dict[Victim, str]] = {
    "sender": "context",
    "receiver": "generation",
    "coordinator": "coordinator",
    "router": "router",
}
EXCLUDED: Final = {
    ("memfd", "block"): "pages cross no port",
    ("coordinator", "block"): "has no data port",
    ("router", "block"): "has no data port",
    ("coordinator", "freeze past its lease"): "has no lease",
    ("router", "freeze past its lease"): "holds no pages",
}
"""What makes no sense, and why."""

GOLDEN: Final = Path(__file__).parents[1] / "data" / "golden" / "smollm2.json"
SAFE_MARGIN: Final = 1e-3
ANSWER_TOKENS: Final = 8
LATE_S: Final = 4.0
"""What a busy machine may need beyond a deadline to say so."""
FREE_S: Final = 12.0
"""Bound for pages to be free again once nothing stands still or is cut off and no request runs."""
LONGEST_CUT_S: Final = 10.0
"""How long a cut lasts at most while a survivor still holds pages for the victim."""
BACK_S: Final = 60.0
"""Bound for everybody to be back, which includes starting a server again."""
POLL_S: Final = 0.05
SETTLING_CASES: Final = 3
FLAT_MIB: Final = 24.0
FLAT_THREADS: Final = 3
FLAT_FILES: Final = 6
"""What a process may come to hold more of after its first cases: room for what happens to be under way."""
NEVER: Final = 1_000_000
COMPUTE_TRIES: Final = 3
NOT_BROUGHT_ABOUT: Final = "not brought about"
"""Begins the problem of a case that never came to its fault: on a busy machine it says nothing."""


@dataclass(frozen=True, slots=True)
class Case:
    """One cell of the matrix."""

    plane: str
    victim: Victim
    kind: Kind
    point: Point

    @property
    def name(self) -> str:
        """Unique; key of the results."""
        return f"{self.plane}: {self.victim}, {self.kind}, {self.point}"


@dataclass(slots=True)
class Outcome:
    """What came of a case."""

    case: str
    answer: str = ""
    """``right``, or status and code of the error."""
    answered_s: float = 0.0
    """From the fault to the client's answer."""
    free_s: float | None = None
    """From the fault to the last page of the survivors being free; None when it took the victim's return."""
    recovered_s: float = 0.0
    """From the fault until everything was whole, the victim too."""
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether all that must hold does."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """For the file of results."""
        return asdict(self)


def cases_of(plane: str, *, network: bool) -> Iterator[Case]:
    """The matrix of a plane; without a network of several hosts nothing can be cut off."""
    for kind in KINDS:
        if kind in ("cut", "block") and not network:
            continue
        for victim in VICTIMS:
            for point in POINTS:
                if not is_excluded(plane, victim, kind, point):
                    yield Case(plane, victim, kind, point)


def is_excluded(plane: str, victim: Victim, kind: Kind, point: Point) -> bool:
    """Whether the matrix leaves a case out."""
    if plane in STAGED and not (kind in STAGED_KINDS and victim in STAGED_VICTIMS and point in STAGED_POINTS):
        return True
    return (plane, kind) in EXCLUDED or (victim, kind) in EXCLUDED


def golden_items() -> list[dict[str, Any]]:
    """Prompts with their greedy continuation, the longest last."""
    items = json.loads(GOLDEN.read_text())["items"]
    for item in items:
        unsure = next((i for i, margin in enumerate(item["top2_margin"]) if margin < SAFE_MARGIN), ANSWER_TOKENS)
        item["certain"] = item["greedy_ids"][: min(unsure, ANSWER_TOKENS)]
    return sorted(items, key=lambda item: len(item["prompt_ids"]))


def where(plane: str, point: Point, slices: int) -> tuple[str, str, int]:
    """The server, the fault point in it and the hit that a point of a transfer of so many slices is."""
    mover = "context" if plane == "nixl" else "generation"
    moving = "transceiver.during_transfer"
    return {
        "before send": ("context", "transceiver.before_send", 1),
        "first slice": (mover, moving, 1),
        "between slices": (mover, moving, slices // 2 + 1),
        "last slice": (mover, moving, slices),
        "before acknowledgement": ("generation", "transceiver.before_ack", 1),
    }[point]


class Asker(threading.Thread):
    """A client of the router, beside it, so that a cut of the router's host leaves the two together."""

    def __init__(self, mesh: FaultyMesh, item: dict[str, Any], salt: str, timeout_s: float) -> None:
        super().__init__(name="client", daemon=True)
        self._mesh = mesh
        self._item = item
        self._salt = salt
        self._timeout_s = timeout_s
        self.answer = "none"
        self.ended_s = 0.0

    def run(self) -> None:
        """Ask once."""
        with self._mesh.at("router"):
            self.answer = ask(self._mesh, self._item, self._timeout_s, salt=self._salt)
        self.ended_s = time.monotonic()


def ask(
    mesh: FaultyMesh, item: dict[str, Any], timeout_s: float, *, salt: str = "", tokens: int = ANSWER_TOKENS
) -> str:
    """Ask for a continuation; ``right``, or what was wrong. Without a salt, nothing of any cache can serve it."""
    body = {
        "model": DEFAULT_MODEL,
        "prompt": item["prompt_ids"],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "cache_salt": salt or uuid.uuid4().hex,
    }
    try:
        status, data = request(f"{mesh['router'].url}/v1/completions", body, timeout_s)
    except TimeoutError:
        return "none"
    if status == 0:
        return "connection closed"
    answer = json.loads(data)
    if status != 200:
        return f"{status} {answer['error']['code']}"
    got = answer["choices"][0]["token_ids"]
    certain = item["certain"][:tokens]
    return "right" if got[: len(certain)] == certain and len(got) == tokens else f"wrong: {got}"


@dataclass(slots=True)
class Bench:
    """A mesh that runs cases, one after the other.

    Attributes:
        mesh: as it stands between cases: whole and idle.
        victims_item: the prompt whose transfer is hurt, long enough to be under way in several slices.
        next_item: the prompt asked next.
        slices: that the first one moves in.
        deadline_s: of requests.
        freeze_s: how long what is frozen stands still.
        cut_s: how long a cut lasts at least.
    """

    mesh: FaultyMesh
    deadline_s: float
    freeze_s: float
    cut_s: float
    victims_item: dict[str, Any]
    next_item: dict[str, Any]
    slices: int = 0
    footprints: dict[tuple[str, int], list[Footprint]] = field(default_factory=dict)

    def warm_up(self) -> None:
        """Ask once, and learn in how many slices a transfer goes."""
        mover = "context" if self.mesh.plane == "nixl" else "generation"
        salt = self._compute()
        with self.mesh.at():
            self.mesh.hold(mover, "transceiver.during_transfer", NEVER)
            answer = ask(self.mesh, self.victims_item, self.deadline_s, salt=salt)
            assert answer == "right", answer
            # The last look is after the last slice.
            self.slices = self.mesh.hits(mover, "transceiver.during_transfer") - 1
            self.mesh.release(mover)
            answer = ask(self.mesh, self.next_item, self.deadline_s)
            assert answer == "right", answer
            self.mesh.wait_idle()

    def run(self, case: Case) -> Outcome:
        """Run one case; the mesh is whole again afterwards, or a problem of the outcome says why not."""
        outcome = Outcome(case.name)
        try:
            self._run(case, outcome)
        except AssertionError as error:
            outcome.problems.append(str(error)[:2000])
        return outcome

    def _run(self, case: Case, outcome: Outcome) -> None:
        mesh, victim = self.mesh, SERVICE_OF[case.victim]
        holder, point, hit = where(mesh.plane, case.point, self.slices)
        logs = {name: process.log.stat().st_size for name, process in mesh.processes.items()}
        client = self._bring_about(holder, point, hit)
        fault_s = time.monotonic()
        _hurt(mesh, victim, case.kind)
        mesh.release(holder)
        try:
            outcome.free_s = self._wait_free(case, victim, client, fault_s)
            if case.kind.startswith("freeze"):
                time.sleep(max(0.0, fault_s + self.freeze_s - time.monotonic()))
            elif case.kind in ("cut", "block"):
                client.join(self._until_late(case, fault_s))
                time.sleep(max(0.0, fault_s + self.cut_s - time.monotonic()))
        finally:
            if case.kind.startswith("freeze"):
                mesh.signal(victim, signal.SIGCONT)
            elif case.kind in ("cut", "block"):
                mesh.mend(victim)
        client.join(self._until_late(case, fault_s))
        outcome.answer, outcome.answered_s = client.answer, client.ended_s - fault_s
        if client.is_alive():
            outcome.problems.append("the client waits past its deadline")
        elif client.answer.startswith(("wrong", "none")):
            outcome.problems.append(f"the client was answered: {client.answer}")
        if outcome.free_s is None:
            outcome.remarks.append("survivors held pages until the victim was back")
        self._recover(case, victim, outcome)
        outcome.recovered_s = time.monotonic() - fault_s
        outcome.remarks += _errors(mesh, logs)
        self._note_footprints()

    def _compute(self) -> str:
        """Have the context server compute the prompt, so that a busy machine costs the case none of its time.

        Returns:
            The salt under which it has done so.
        """
        salt = uuid.uuid4().hex
        with self.mesh.at():
            # One token never touches the generation server.
            answers = [ask(self.mesh, self.victims_item, self.deadline_s, salt=salt, tokens=1)]
            while answers[-1] != "right" and len(answers) < COMPUTE_TRIES:
                answers.append(ask(self.mesh, self.victims_item, self.deadline_s, salt=salt, tokens=1))
            assert answers[-1] == "right", f"the prompt cannot be computed: {answers}"
            self.mesh.wait_idle()
        return salt

    def _bring_about(self, holder: str, point: str, hit: int) -> Asker:
        """Have a transfer stand at a point; the client that waits for it."""
        mesh = self.mesh
        try:
            salt = self._compute()
            mesh.hold(holder, point, hit)
            client = Asker(mesh, self.victims_item, salt, self.deadline_s + self.freeze_s + LATE_S)
            client.start()
            try:
                mesh.wait_held(holder, point)
            except AssertionError as error:
                raise AssertionError(f"{error}; the client was answered: {client.answer}") from None
            with mesh.at():
                until(lambda: all(server.stats()["in_transfer"] for server in mesh.workers()), "both servers say so")
        except AssertionError as error:
            raise AssertionError(f"{NOT_BROUGHT_ABOUT}: {error}") from None
        return client

    def _until_late(self, case: Case, fault_s: float) -> float:
        """Seconds until the client must have been answered; a frozen router answers when it is back."""
        more_s = self.freeze_s if case.victim == "router" and case.kind == "freeze" else 0.0
        return max(0.0, fault_s + self.deadline_s + more_s + LATE_S - time.monotonic())

    def _wait_free(self, case: Case, victim: str, client: Asker, fault_s: float) -> float | None:
        """Seconds until every page of the survivors is free for good; None when they are not while the fault lasts."""
        names = [name for name in ("context", "generation") if name != victim]
        standing = case.kind not in ("kill", "term")
        bound_s = (
            self.freeze_s if case.kind.startswith("freeze") else LONGEST_CUT_S if standing else self.deadline_s + FREE_S
        )
        busy_s = fault_s
        idle = False
        with self.mesh.at():
            while time.monotonic() < fault_s + bound_s:
                idle = all(is_idle(self.mesh[name].stats()) for name in names)
                if not idle:
                    busy_s = time.monotonic()
                elif not client.is_alive():
                    break
                time.sleep(POLL_S)
            assert idle or standing, f"pages are not free {bound_s:g} s later: {[self.mesh[n].stats() for n in names]}"
        return busy_s - fault_s if idle else None

    def _recover(self, case: Case, victim: str, outcome: Outcome) -> None:
        mesh = self.mesh
        if case.kind in ("kill", "term"):
            mesh.restart(victim)
        with mesh.at():
            until(lambda: self._is_whole(outcome), f"everybody is back: {mesh.members()}", BACK_S)
            tries: list[str] = []
            until(lambda: self._serves_next(tries), f"the next request is served; {tries}", FREE_S)
            if len(tries) > 1:
                outcome.remarks.append(f"the next request was served at try {len(tries)}, after {tries[0]}")
            mesh.wait_idle(FREE_S)

    def _is_whole(self, outcome: Outcome) -> bool:
        """Whether all services run and know each other, and no page is lent out. What has ended is started again."""
        mesh = self.mesh
        for name, process in list(mesh.processes.items()):
            if process.popen.poll() is not None:
                mesh.restart(name)
                outcome.remarks.append(f"{name} ended, and was started again")
        members = mesh.members()
        for server in mesh.workers():
            status, info = request(f"{server.url}/server_info", timeout_s=5.0)
            if status != 200 or members.get(server.name) != json.loads(info)["epoch"] or not is_idle(server.stats()):
                return False
        return request(f"{mesh['router'].url}/ready", timeout_s=5.0)[0] == 200

    def _serves_next(self, tries: list[str]) -> bool:
        tries.append(ask(self.mesh, self.next_item, self.deadline_s))
        assert not tries[-1].startswith("wrong"), tries
        return tries[-1] == "right"

    def growth(self) -> list[str]:
        """What processes have come to hold more of, from their third case on."""
        grown = []
        for (name, pid), marks in self.footprints.items():
            first, last = marks[min(SETTLING_CASES, len(marks) - 1)], marks[-1]
            more = Footprint(*(after - before for before, after in zip(first, last, strict=True)))
            if more.anonymous_mib > FLAT_MIB or more.threads > FLAT_THREADS or more.files > FLAT_FILES:
                grown.append(f"{name} ({pid}) grew in {len(marks)} cases: {first} to {last}")
        return grown

    def _note_footprints(self) -> None:
        for name, process in self.mesh.processes.items():
            for one in process.family():
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.footprints.setdefault((name, one.pid), []).append(footprint(one.pid))


class Footprint(NamedTuple):
    """What a process holds."""

    anonymous_mib: float
    threads: int
    files: int


def footprint(pid: int) -> Footprint:
    """Of a process now. Cache memory is shared memory and not counted: pages are touched bit by bit."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return Footprint(int(fields["RssAnon"].split()[0]) / 1024, int(fields["Threads"]), files)


def _hurt(mesh: FaultyMesh, service: str, kind: Kind) -> None:
    if kind == "cut":
        mesh.cut(service)
    elif kind == "block":
        mesh.block_data(service)
    else:
        number = {"kill": signal.SIGKILL, "term": signal.SIGTERM}.get(kind, signal.SIGSTOP)
        mesh.signal(service, number)


def _errors(mesh: FaultyMesh, since: dict[str, int]) -> list[str]:
    """What services have logged as errors since."""
    found = []
    for name, process in mesh.processes.items():
        text = process.log.read_bytes()[since.get(name, 0) :].decode(errors="replace")
        for line in text.splitlines():
            if not line.startswith("{"):
                if "Traceback" in line or "Error" in line:
                    found.append(f"{name}: {line[:200]}")
                continue
            entry = json.loads(line)
            if entry["level"] in ("error", "critical"):
                found.append(f"{name}: {entry['event']}")
    return found
