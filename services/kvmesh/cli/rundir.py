"""The run directory of a mesh on this machine: who runs, where, and their logs.

``~/.kvmesh`` or ``$KVMESH_RUN_DIR``. One mesh a directory: its supervisor holds a lock on ``lock`` for as long as it
lives. ``state.json`` is what ``down`` and ``status`` read. ``logs/`` outlives the mesh, everything else goes with it
but the empty ``lock``: were it removed, one process could hold the removed file and another a new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from kvmesh.cli.errors import UserError

__all__ = ["FirstAnswer", "MeshState", "ProcessState", "RunDir", "RunDirBusyError", "is_running", "start_ticks"]

RUN_DIR_VARIABLE = "KVMESH_RUN_DIR"
STATE_VERSION = 1


class ProcessState(msgspec.Struct, kw_only=True):
    """A process, told apart from a later one with the same pid by when it started."""

    name: str
    pid: int
    start_ticks: int
    restarts: int = 0


class FirstAnswer(msgspec.Struct, kw_only=True):
    """The first question the mesh answered, and how fast."""

    question: str
    answer: str
    ttft_ms: float
    tpot_ms: float
    tokens: int


class MeshState(msgspec.Struct, kw_only=True):
    """``state.json``."""

    phase: Literal["starting", "ready", "stopping"]
    supervisor: ProcessState
    url: str
    coordinator_url: str
    indexer_url: str
    model: str
    temp_dir: str
    children: list[ProcessState] = []
    message: str = ""
    """What it is doing, while it starts."""
    first_answer: FirstAnswer | None = None
    tls: dict[str, str] = {}
    """Files, and the name, that the mesh's certificates are verified by and that its clients present."""
    curve: dict[str, str] = {}
    """Files of the keys that readers of the mesh's events need."""
    version: int = STATE_VERSION


class RunDirBusyError(RuntimeError):
    """A mesh runs in this directory already."""


class RunDir:
    """Paths and state below one run directory; the constructor touches nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"
        self.configs = path / "config"
        self._state = path / "state.json"
        self._lock = path / "lock"

    @classmethod
    def from_environment(cls, env: Mapping[str, str] | None = None) -> RunDir:
        """``$KVMESH_RUN_DIR``, or ``~/.kvmesh``.

        Raises:
            UserError: it begins with the home directory of a user who does not exist.
        """
        given = (os.environ if env is None else env).get(RUN_DIR_VARIABLE)
        try:
            return cls(Path(given).expanduser() if given else Path.home() / ".kvmesh")
        except RuntimeError as error:
            raise UserError(f"{RUN_DIR_VARIABLE}={given or ''}: {error}") from error

    def prepare(self) -> None:
        """Make the directory and that of the logs, for this user only.

        Raises:
            UserError: that is not possible here.
        """
        with self._usable():
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            # One by one: a parent that mkdir makes on the way gets the default mode.
            self.logs.mkdir(exist_ok=True, mode=0o700)

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Be the one mesh of this directory; at the end the logs stay, and the lock.

        Raises:
            RunDirBusyError: another one is.
            UserError: the directory cannot be used.
        """
        with self._usable():
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunDirBusyError(str(self.path)) from None
            self.prepare()
            with self._usable():
                self.configs.mkdir(exist_ok=True, mode=0o700)
            try:
                yield
            finally:
                shutil.rmtree(self.configs, ignore_errors=True)
                self._state.unlink(missing_ok=True)
        finally:
            os.close(descriptor)

    def clear(self) -> None:
        """Remove what a mesh that was killed has left, unless another one runs here by now."""
        with contextlib.suppress(RunDirBusyError), self.claimed():
            pass

    def log_of(self, name: str) -> Path:
        """Where the process ``name`` logs."""
        return self.logs / f"{name}.log"

    def write(self, state: MeshState) -> None:
        """Replace the state, atomically."""
        temporary = self._state.with_suffix(".tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o600)  # one that was left behind keeps its mode
            file.write(msgspec.json.format(msgspec.json.encode(state), indent=1))
        temporary.replace(self._state)

    def read(self) -> MeshState | None:
        """The state, or None when no mesh was started here (or it ended well).

        Raises:
            UserError: the directory cannot be read.
        """
        try:
            with self._usable():
                return msgspec.json.decode(self._state.read_bytes(), type=MeshState)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    @contextmanager
    def _usable(self) -> Iterator[None]:
        """What the file system refuses, as a sentence; a file that is absent where one is read stays what it is."""
        try:
            yield
        except OSError as error:
            if isinstance(error, FileNotFoundError) and error.filename == str(self._state):
                raise
            raise UserError(
                f"the run directory {self.path} cannot be used ({error.strerror}: {error.filename}); "
                f"set {RUN_DIR_VARIABLE} to a directory of your own"
            ) from error


def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 when there is none with this pid or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] in ("Z", "X") else int(fields[19])


def is_running(process: ProcessState) -> bool:
    """Whether this very process still runs."""
    return process.pid > 0 and process.start_ticks != 0 and start_ticks(process.pid) == process.start_ticks
