"""The children's log files: kept small, and their warnings shown on the console of ``kvmesh up``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

__all__ = ["LogFollower", "LogLine", "tail"]

MAX_LOG_BYTES = 16 << 20
"""A log that grows beyond this is moved to ``NAME.log.1`` by copying: its writer keeps the file open."""

SHOWN_LEVELS = frozenset({"warning", "error", "critical"})

_HIDDEN_KEYS = frozenset({"event", "level", "timestamp", "service", "exception"})


class LogLine(NamedTuple):
    """A log line worth showing."""

    name: str
    level: str
    text: str


class LogFollower:
    """Reads what was appended to log files since the last call.

    Args:
        logs: file by process name; a file that does not exist yet is empty.
    """

    def __init__(self, logs: Iterable[tuple[str, Path]]) -> None:
        self._logs = tuple(logs)
        self._offsets = {name: path.stat().st_size if path.exists() else 0 for name, path in self._logs}

    @staticmethod
    def whole(logs: Iterable[tuple[str, Path]]) -> list[LogLine]:
        """Warnings and errors in all that the files hold now."""
        follower = LogFollower(logs)
        follower._offsets = dict.fromkeys(follower._offsets, 0)
        return follower.poll()

    def poll(self) -> list[LogLine]:
        """New warnings and errors, in order within each file."""
        return [line for name, path in self._logs for line in self._poll_one(name, path)]

    def _poll_one(self, name: str, path: Path) -> list[LogLine]:
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            return []
        if size == self._offsets[name]:
            return []
        start = self._offsets[name] if size > self._offsets[name] else 0  # smaller: it was truncated
        with path.open("rb") as file:
            file.seek(start)
            data = file.read()
        complete, _, rest = data.rpartition(b"\n")
        self._offsets[name] = start + len(data) - len(rest)
        if size > MAX_LOG_BYTES:
            self._rotate(name, path)
        return [line for raw in complete.splitlines() if (line := _shown(name, raw)) is not None]

    def _rotate(self, name: str, path: Path) -> None:
        path.with_name(path.name + ".1").write_bytes(path.read_bytes())
        os.truncate(path, 0)
        self._offsets[name] = 0


def tail(path: Path, lines: int = 20) -> str:
    """The last lines of a file, as text."""
    try:
        data = path.read_bytes()[-64_000:]
    except FileNotFoundError:
        return ""
    return "\n".join(_readable(raw) for raw in data.splitlines()[-lines:])


def _shown(name: str, raw: bytes) -> LogLine | None:
    """A structured line of level warning or above; other output (libraries' chatter, tracebacks) stays in the file."""
    fields = _fields(raw)
    if fields is None or fields.get("level") not in SHOWN_LEVELS:
        return None
    return LogLine(name, str(fields["level"]), _text(fields))


def _readable(raw: bytes) -> str:
    fields = _fields(raw)
    return raw.decode(errors="replace") if fields is None else f"{fields.get('level', '')}: {_text(fields)}"


def _fields(raw: bytes) -> dict[str, Any] | None:
    if not raw.startswith(b"{"):
        return None
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except msgspec.DecodeError:
        return None


def _text(fields: dict[str, Any]) -> str:
    details = " ".join(f"{key}={value}" for key, value in fields.items() if key not in _HIDDEN_KEYS)
    return f"{fields.get('event', '')} {details}".strip()
