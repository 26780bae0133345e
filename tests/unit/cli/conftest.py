from __future__ import annotations

import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from kvmesh.cli.supervisor import Child, ChildEvent, Supervisor


class Family:
    """A supervisor over small Python programs, and what happened to them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.events: list[ChildEvent] = []

    def child(self, name: str, program: str, stop_rank: int = 0) -> Child:
        script = self.directory / f"{name}.py"
        script.write_text(textwrap.dedent(program))
        return Child(name, [sys.executable, "-S", str(script)], self.directory / f"{name}.log", stop_rank)

    @asynccontextmanager
    async def running(self, *children: Child, **arguments: object) -> AsyncIterator[Supervisor]:
        fields = {"backoff_s": 0.02, "backoff_max_s": 0.1, "drain_s": 5.0, **arguments}
        supervisor = Supervisor(children, env={"DIRECTORY": str(self.directory)}, on_event=self.events.append, **fields)
        async with anyio.create_task_group() as tasks:
            supervisor.start(tasks)
            try:
                yield supervisor
            finally:
                with anyio.CancelScope(shield=True):
                    await supervisor.stop()
                tasks.cancel_scope.cancel()

    def happened(self, kind: str, name: str) -> list[ChildEvent]:
        return [event for event in self.events if event.kind == kind and event.name == name]


@pytest.fixture
def family(tmp_path: Path) -> Family:
    return Family(tmp_path)
