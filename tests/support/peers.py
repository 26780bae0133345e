"""Other projects' code as processes beside the tests, set up by ``make peers``; without it such tests are skipped."""

from __future__ import annotations

import json
import os
import select
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

__all__ = ["PEER_SCRIPTS", "JsonProcess", "needs_peer", "peer_path", "peer_python"]

PEERS = Path(os.environ.get("PEERS", "~/.cache/kvmesh-peers")).expanduser()
PEER_SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "peers"


def peer_path(name: str) -> Path:
    return PEERS / name


def peer_python(environment: str) -> Path:
    return PEERS / environment / "bin" / "python"


def needs_peer(environment: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not peer_python(environment).exists(), reason="`make peers` sets it up")


class JsonProcess:
    """A process that answers each line on stdin with one on stdout, both JSON."""

    def __init__(self, *command: str | Path, timeout_s: float = 60.0) -> None:
        self._command = [str(word) for word in command]
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)
        self._process.stdout.close()

    def read(self) -> Any:
        """The next line."""
        stdout = self._process.stdout
        assert stdout is not None
        line = bytearray()
        while not line.endswith(b"\n"):
            assert select.select([stdout], [], [], self._timeout_s)[0], f"{self._command} does not answer"
            piece = stdout.read(1 << 16)
            assert piece, f"{self._command} has ended"
            line += piece
        return json.loads(line)

    def ask(self, **command: Any) -> Any:
        """Carry one command out."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        return self.read()
