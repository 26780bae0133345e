"""What ``kvmesh up`` says while it works, and the block it ends with."""

from __future__ import annotations

import json
import shlex
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from kvmesh.cli.logs import LogLine
from kvmesh.cli.rundir import MeshState, RunDir

__all__ = ["Progress", "print_ready", "say_line", "table_console"]

UNBOUNDED = 10_000
"""Columns; no line of ours is as long."""

_COLOURS = {"warning": "yellow", "error": "red", "critical": "bold red"}


def table_console() -> Console:
    """A console for tables: in a pipe or a file nothing is cut, there are no columns to fit."""
    console = Console()
    if not console.is_terminal:
        console.width = UNBOUNDED
    return console


class Progress:
    """A spinner with the current step, and a line for everything that came up; plain lines without a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._started_s = time.monotonic()

    def __enter__(self) -> Self:
        """Show the spinner, where there is a terminal to show it on."""
        if self._console.is_terminal:
            self._status = self._console.status("")
            self._status.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove the spinner."""
        self.end()

    def end(self) -> None:
        """Remove the spinner; idempotent."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def step(self, text: str) -> None:
        """What is being done now."""
        if self._status is not None:
            self._status.update(escape(text))
        else:
            self._console.print(escape(text), highlight=False)

    def up(self, name: str) -> None:
        """Something came up."""
        elapsed_s = time.monotonic() - self._started_s
        self._console.print(f"  [green]up[/] {escape(name):16} [dim]{elapsed_s:5.1f} s[/]", highlight=False)


def say_line(console: Console, line: LogLine) -> None:
    """A child's warning, with its name in front."""
    colour = _COLOURS.get(line.level, "white")
    console.print(
        f"[dim]{escape(line.name)}[/] [{colour}]{line.level}[/] {escape(line.text)}", highlight=False, soft_wrap=True
    )


def print_ready(console: Console, state: MeshState, run_dir: RunDir, *, detached: bool, with_key: bool = False) -> None:
    """The ready block: URL, first answer, a line to copy (``with_key``: with an API key), and what to do next."""
    body = {"model": state.model, "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    console.print()
    console.print(f"[bold green]KVMesh is ready[/] at [bold]{escape(state.url)}[/]  (model {escape(state.model)})")
    console.print()
    if state.first_answer is not None:
        first = state.first_answer
        console.print(f"  [dim]Q[/] {escape(first.question)}", highlight=False)
        console.print(f"  [dim]A[/] {escape(first.answer)}", highlight=False)
        console.print(
            f"    first token after {first.ttft_ms:.0f} ms (TTFT), then {first.tpot_ms:.1f} ms a token (TPOT), "
            f"{first.tokens} tokens",
            style="dim",
            highlight=False,
        )
        console.print()
    # Written past rich's wrapping: the command must survive being copied.
    curl = f"curl -N --cacert {shlex.quote(state.tls['ca_file'])}" if "ca_file" in state.tls else "curl -N"
    if with_key:
        curl += ' -H "Authorization: Bearer $KVMESH_API_KEY"'
    console.file.write(
        f"  {curl} {state.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'\n\n"
    )
    end = "kvmesh down stops it" if detached else "Ctrl-C stops it"
    console.print(
        f"  kvmesh chat | status | events | bench      logs in {escape(str(run_dir.logs))}      {end}",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )
