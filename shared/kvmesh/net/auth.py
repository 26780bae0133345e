"""API keys from a file, one a line, re-read when the file changes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kvmesh.telemetry import get_logger

__all__ = ["ApiKeys"]

_log = get_logger("auth")


class ApiKeys:
    """The keys that are accepted now; calling it gives them. No keys at all means that none is asked for.

    Args:
        path: file of keys, ``#`` starts a comment; None for none.
        fixed: further keys, from settings.

    Raises:
        ValueError: the file cannot be read, or holds no key (an empty file must not open the door).
    """

    def __init__(self, path: str | Path | None = None, fixed: Iterable[str] = ()) -> None:
        self._path = None if path is None else Path(path)
        self._fixed = frozenset(fixed)
        self._stamp: tuple[int, int] | None = None
        self._keys = self._fixed
        if self._path is not None:
            self._reload(self._path)

    def __call__(self) -> frozenset[str]:
        """The accepted keys. A file that went bad keeps its last good keys and is reported once."""
        if self._path is not None:
            try:
                stat = self._path.stat()
                if (stat.st_mtime_ns, stat.st_ino) != self._stamp:
                    self._stamp = (stat.st_mtime_ns, stat.st_ino)
                    self._reload(self._path)
                    _log.info("API keys reloaded", keys=len(self._keys))
            except (OSError, ValueError) as error:
                if self._stamp is not None:
                    _log.warning("API keys not reloaded; the last good ones stay", error=str(error))
                self._stamp = None
        return self._keys

    def _reload(self, path: Path) -> None:
        try:
            stat = path.stat()
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"api_keys_file {path} cannot be read: {error}") from error
        keys = frozenset(filter(None, (line.partition("#")[0].strip() for line in lines)))
        if not keys:
            raise ValueError(f"api_keys_file {path} holds no key; put one on each line, or leave the setting out")
        self._keys = self._fixed | keys
        self._stamp = (stat.st_mtime_ns, stat.st_ino)
