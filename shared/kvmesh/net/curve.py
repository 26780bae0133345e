"""ZMQ CURVE: keys from files, sockets that speak it, and who may connect.

A pair is two files in ZeroMQ's certificate format: ``NAME.key`` may be given away, ``NAME.key_secret`` may not.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple, Self

import zmq
from zmq.utils import z85

from kvmesh.config.curve import CurveSettings
from kvmesh.config.errors import ConfigError
from kvmesh.net.private_files import is_public
from kvmesh.telemetry import get_logger

__all__ = ["ClientKeys", "CurveKeys", "CurveSecurity", "create_key_pair", "read_key_pair", "read_public_key"]

PUBLIC_SUFFIX = ".key"
SECRET_SUFFIX = ".key_secret"  # noqa: S105 - of a file name

ZAP_DOMAIN = b"kvmesh"

_KEY_CHARACTERS = 40
"""Of a 32-byte key in Z85."""
_REMEDY = "'kvmesh keys curve DIR' makes a pair"

_log = get_logger("curve")


class CurveKeys(NamedTuple):
    """A key pair, each key as 40 characters of Z85."""

    public: bytes
    secret: bytes


def create_key_pair(directory: Path, name: str = "kvmesh") -> tuple[Path, Path]:
    """Make ``NAME.key`` and ``NAME.key_secret`` in a directory, which is made where it is missing.

    Raises:
        FileExistsError: one of the files is there already; keys are never overwritten.
        OSError: the files cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    public_path, secret_path = directory / f"{name}{PUBLIC_SUFFIX}", directory / f"{name}{SECRET_SUFFIX}"
    for path in (public_path, secret_path):
        if path.exists():
            raise FileExistsError(f"{path} is there already; remove it first, or choose another --name")
    public, secret = zmq.curve_keypair()
    head = "#   ZeroMQ CURVE **{}** certificate, made by 'kvmesh keys curve'\n{}\nmetadata\ncurve\n"
    keys = f'    public-key = "{public.decode()}"\n'
    _write(public_path, 0o644, head.format("Public", "#   This file may be given away.") + keys)
    secret_text = head.format("Secret", "#   Whoever reads this file reads the streams: keep it to the services.")
    _write(secret_path, 0o600, secret_text + keys + f'    secret-key = "{secret.decode()}"\n')
    return public_path, secret_path


def read_key_pair(path: str | Path) -> CurveKeys:
    """The pair in a ``*.key_secret`` file; the public key may be left out, for it follows from the other.

    Raises:
        ConfigError: it cannot be read, others may read it, or it holds no pair; the message says what to do.
    """
    try:
        Path(path).stat()
    except OSError as error:
        raise ConfigError(f"curve.key_file {path} cannot be read: {error.strerror or error}; {_REMEDY}") from error
    values = _read(path, "curve.key_file")
    if "secret-key" not in values:
        raise ConfigError(f"curve.key_file {path} holds no secret key; name the file that ends in {SECRET_SUFFIX}")
    if is_public(path):
        raise ConfigError(f"curve.key_file {path} may be read by others, or changed by its group; chmod 600 {path}")
    secret = _key(values, "secret-key", path)
    public = zmq.curve_public(secret)
    if "public-key" in values and _key(values, "public-key", path) != public:
        raise ConfigError(f"curve.key_file {path}: the public key is not that of the secret key; {_REMEDY}")
    return CurveKeys(public, secret)


def read_public_key(path: str | Path, setting: str) -> bytes:
    """The public key in a ``*.key`` file, or in a ``*.key_secret`` file.

    Args:
        path: of the file.
        setting: that names it, for the message.

    Raises:
        ConfigError: it cannot be read or holds no public key.
    """
    return _key(_read(path, setting), "public-key", path)


class ClientKeys:
    """The public keys that may connect now.

    Args:
        path: a file of one key, or a directory of ``*.key`` files; None: only ``own``.
        own: key that may connect where no path is given.

    Raises:
        ConfigError: there is no key there, or one cannot be read.
    """

    def __init__(self, path: str | Path | None, own: bytes) -> None:
        self._path = None if path is None else Path(path)
        self._keys = frozenset({own})
        self._stamp: object = None
        if self._path is not None:
            self._keys, self._stamp = self._read(self._path), self._stamp_of(self._path)

    def __call__(self) -> frozenset[bytes]:
        """As 40 characters of Z85 each. Files that went bad keep the last good keys and are reported."""
        if self._path is not None:
            try:
                stamp = self._stamp_of(self._path)
                if stamp != self._stamp:
                    self._stamp = stamp
                    self._keys = self._read(self._path)
                    _log.info("CURVE client keys reloaded", keys=len(self._keys))
            except (OSError, ConfigError) as error:
                _log.warning("CURVE client keys not reloaded; the last good ones stay", error=str(error))
        return self._keys

    @staticmethod
    def _read(path: Path) -> frozenset[bytes]:
        files = sorted(path.glob(f"*{PUBLIC_SUFFIX}")) if path.is_dir() else [path]
        if not files:
            raise ConfigError(f"curve.client_keys {path} holds no *{PUBLIC_SUFFIX} file; put the clients' keys there")
        return frozenset(read_public_key(file, "curve.client_keys") for file in files)

    @staticmethod
    def _stamp_of(path: Path) -> object:
        files = [path, *sorted(path.glob(f"*{PUBLIC_SUFFIX}"))] if path.is_dir() else [path]
        stats = [file.stat() for file in files]
        return [(str(file), each.st_mtime_ns, each.st_ino) for file, each in zip(files, stats, strict=True)]


class CurveSecurity(NamedTuple):
    """What a service's sockets need to speak CURVE."""

    own: CurveKeys
    server_key: bytes
    """Public key of the services that this one connects to."""
    client_keys: ClientKeys

    @classmethod
    def load(cls, settings: CurveSettings) -> Self | None:
        """From a service's settings; None where its sockets are plain.

        Raises:
            ConfigError: a key cannot be used; the message says what to do.
        """
        if settings.key_file is None:
            return None
        own = read_key_pair(settings.key_file)
        if settings.server_key_file is None:
            server_key = own.public
        else:
            server_key = read_public_key(settings.server_key_file, "curve.server_key_file")
        return cls(own, server_key, ClientKeys(settings.client_keys, own.public))

    def apply_server(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket refuse whoever has no allowed key; before it is bound.

        Its context needs a :class:`~kvmesh.net.zap.ZapServer`; without one nobody can connect.
        """
        socket.curve_server = True
        socket.curve_secretkey = self.own.secret
        socket.zap_domain = ZAP_DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def apply_client(self, socket: zmq.Socket[Any], server_key: bytes | None = None) -> None:
        """Make a socket speak to services that have ``server_key`` (unset: that of the mesh) only; before it connects.

        Also right for a ``zmq.asyncio`` socket.
        """
        socket.curve_serverkey = self.server_key if server_key is None else server_key
        socket.curve_publickey = self.own.public
        socket.curve_secretkey = self.own.secret


def _write(path: Path, mode: int, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        os.fchmod(file.fileno(), mode)
        file.write(text)


def _read(path: str | Path, setting: str) -> dict[str, str]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{setting} {path} cannot be read: {reason}; {_REMEDY}") from error
    pairs = (line.partition("=") for line in lines if not line.lstrip().startswith("#"))
    return {name.strip(): value.strip().strip("\"'") for name, equals, value in pairs if equals}


def _key(values: dict[str, str], name: str, path: str | Path) -> bytes:
    key = values.get(name, "").encode()
    try:
        if len(key) == _KEY_CHARACTERS and len(z85.decode(key)) == 32:
            return key
    except (KeyError, ValueError):
        pass
    raise ConfigError(f"{path} holds no {name.replace('-', ' ')}; {_REMEDY}")
