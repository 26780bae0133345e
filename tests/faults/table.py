"""The table of the fault matrix in docs/faults.md, between its markers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from fault_cases import KINDS, NOT_BROUGHT_ABOUT, PLANES, POINTS, VICTIMS, is_excluded

PAGE: Final = Path(__file__).parents[2] / "docs" / "faults.md"
BEGIN: Final = "<!-- made by make fault-matrix: begin -->"
END: Final = "<!-- made by make fault-matrix: end -->"


def write_table(outcomes: dict[str, dict[str, Any]]) -> None:
    """Put the table of these outcomes, by name of their case, in its place."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    table = "\n".join(_lines(outcomes))
    PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n{END}{after}")


def is_void(outcome: dict[str, Any]) -> bool:
    """Whether a case never came to its fault."""
    problems: list[str] = outcome["problems"]
    return bool(problems) and problems[0].startswith(NOT_BROUGHT_ABOUT)


def _lines(outcomes: dict[str, dict[str, Any]]) -> Iterator[str]:
    run = [outcome for outcome in outcomes.values() if not is_void(outcome)]
    yield f"{len(run)} cases, {sum(bool(outcome['problems']) for outcome in run)} failed."
    yield ""
    for plane in PLANES:
        yield f"### {plane}"
        yield ""
        yield f"| victim | fault | {' | '.join(POINTS)} |"
        yield f"|{'---|' * (2 + len(POINTS))}"
        for victim in VICTIMS:
            for kind in KINDS:
                if all(is_excluded(plane, victim, kind, point) for point in POINTS):
                    continue
                cells = [
                    ""
                    if is_excluded(plane, victim, kind, point)
                    else _cell(outcomes.get(f"{plane}: {victim}, {kind}, {point}"))
                    for point in POINTS
                ]
                yield f"| {victim} | {kind} | {' | '.join(cells)} |"
        yield ""


def _cell(outcome: dict[str, Any] | None) -> str:
    if outcome is None or is_void(outcome):
        return "not run"
    if outcome["problems"]:
        return "**failed**"
    free_s = outcome["free_s"]
    free = "on return" if free_s is None else f"{free_s:.1f} s"
    return f"{outcome['answer']}, {outcome['answered_s']:.1f} s; {free}"
