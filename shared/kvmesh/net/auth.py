"""API keys from a file, one a line, re-read when the file changes."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvmesh.config.errors import ConfigError
from kvmesh.net.private_files import warn_if_public
from kvmesh.telemetry import get_logger

__all__ = ["NAME", "UNNAMED", "ApiKeys", "KeyMetrics", "read_keys"]

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""What a key can be called."""

UNNAMED = "unnamed"
"""What a key without a name is called in metrics."""

_log = get_logger("auth")


class ApiKeys:
    """The keys that are accepted now; calling it gives them. No keys at all means that none is asked for.

    Args:
        path: file of keys, see :func:`read_keys`; None for none.
        fixed: further keys, from settings.

    Raises:
        ConfigError: the file cannot be read, or holds no key (an empty file must not open the door).
    """

    def __init__(self, path: str | Path | None = None, fixed: Iterable[str] = ()) -> None:
        self._path = None if path is None else Path(path)
        self._fixed = dict.fromkeys(fixed, UNNAMED)
        self._stamp: tuple[int, int, int] | None = None
        self._broken: str | None = None
        self._requests: dict[str, int] = {}
        self._refused = 0
        self._take(self._fixed)
        if self._path is not None:
            self._stamp = _stamp(self._path)
            self._take({**self._fixed, **read_keys(self._path)})
            warn_if_public("api_keys_file", self._path)

    def __call__(self) -> frozenset[str]:
        """The accepted keys. A file that went bad keeps its last good keys and is reported once."""
        self._refresh()
        return self._keys

    @property
    def own(self) -> str | None:
        """The key that this process sends to others of its mesh: the first of them; None without keys."""
        self._refresh()
        return self._own

    @property
    def asked(self) -> bool:
        """Whether a key is asked for; never changes, since a file without keys is not taken in."""
        return bool(self._keys)

    def admit(self, given: str) -> str | None:
        """The name of the key ``given``, None when it is none that is accepted; counts both.

        Every key is compared in constant time, and all of them are: how long it takes says nothing about which is
        close, or which it was.
        """
        self._refresh()
        offered = given.encode(errors="surrogateescape")  # a header's bytes need not be UTF-8
        found: str | None = None
        for key, name in self._encoded:
            if hmac.compare_digest(offered, key):
                found = name
        if found is None:
            self._refused += 1
        else:
            self._requests[found] = self._requests.get(found, 0) + 1
        return found

    def requests_by_name(self) -> Mapping[str, int]:
        """Requests admitted since the start, by the name of their key."""
        return self._requests

    @property
    def refused_total(self) -> int:
        """Requests without an accepted key since the start."""
        return self._refused

    def _take(self, names: Mapping[str, str]) -> None:
        self._keys = frozenset(names)
        self._own = min(names, default=None)
        self._encoded = [(key.encode(), name) for key, name in names.items()]

    def _refresh(self) -> None:
        if self._path is None:
            return
        try:
            stamp = _stamp(self._path)
            if stamp == self._stamp and self._broken is None:
                return
            names = read_keys(self._path)
        except ConfigError as error:
            if self._broken is None:
                _log.warning("API keys not reloaded; the last good ones stay", error=str(error))
            self._broken = str(error)
            return
        self._stamp, self._broken = stamp, None
        self._take({**self._fixed, **names})
        _log.info("API keys reloaded", keys=len(self._keys))


class KeyMetrics(Collector):
    """Who sends requests, by the names of the keys; the keys themselves appear nowhere."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    def collect(self) -> Iterable[Metric]:
        """See ``prometheus_client.registry.Collector``."""
        admitted = CounterMetricFamily("kvmesh_api_key_requests", "requests admitted by an API key", labels=["key"])
        for name, count in self._keys.requests_by_name().items():
            admitted.add_metric([name], count)
        yield admitted
        yield CounterMetricFamily(
            "kvmesh_api_key_refused", "requests without an accepted API key", value=self._keys.refused_total
        )


def read_keys(path: Path) -> dict[str, str]:
    """Names by key. A line is ``KEY``, or ``NAME KEY``; ``#`` starts a comment.

    Raises:
        ConfigError: the file cannot be read, holds no key, or a line is neither; the message holds no key.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"api_keys_file {path} cannot be read: {reason}") from error
    names: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        *name, key = words
        if len(name) > 1 or (name and not NAME.fullmatch(name[0])):
            raise ConfigError(f"api_keys_file {path}, line {number}: neither KEY nor NAME KEY")
        names[key] = name[0] if name else UNNAMED
    if not names:
        raise ConfigError(f"api_keys_file {path} holds no key; put one on each line, or leave the setting out")
    return names


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size
