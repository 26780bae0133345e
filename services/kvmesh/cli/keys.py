"""``kvmesh keys tls|api|curve|events``: certificates and keys of a mesh, and keys of its clients."""

from __future__ import annotations

import argparse
import os
import secrets
from pathlib import Path

from kvmesh.cli.certificates import COMMON_NAMES, make_certificate
from kvmesh.cli.errors import UserError
from kvmesh.config import ConfigError
from kvmesh.events.keyed import StreamKey, generate_key
from kvmesh.net.auth import NAME, read_keys
from kvmesh.net.curve import create_key_pair

__all__ = ["add_arguments", "run"]

KEY_BYTES = 32


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:  # noqa: ARG001 - one command
    """The kinds of keys."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="tls|api|curve|events")
    tls = kinds.add_parser(
        "tls",
        help="make a private authority and a certificate for the services of a mesh",
        description="Make a private authority (ca.crt, ca.key) unless DIR has one, and a certificate (tls.crt, "
        "tls.key) for servers and clients alike. Run it again to replace the certificate: services notice.",
    )
    tls.add_argument("directory", type=Path, metavar="DIR", help="where the files go")
    tls.add_argument(
        "--name",
        action="append",
        default=[],
        metavar="HOST",
        help=f"host name or address that the certificate bears, beside {', '.join(COMMON_NAMES)}; may be repeated",
    )
    tls.add_argument("--days", type=float, default=365.0, help="how long the certificate is valid (default: 365)")
    tls.add_argument("--stem", default="tls", metavar="NAME", help="name of the two files (default: tls)")
    api = kinds.add_parser(
        "api",
        help="make an API key and add it to a file",
        description="Make an API key, add it to FILE (api_keys_file of the router) and print it.",
    )
    api.add_argument("file", type=Path, metavar="FILE", help="file of keys; made if missing, for its owner only")
    api.add_argument("name", metavar="NAME", help="whose key it is; metrics show this name")
    curve = kinds.add_parser(
        "curve",
        help="make a key pair for the ZeroMQ sockets of a mesh",
        description="Make a CURVE key pair: NAME.key, which may be given away, and NAME.key_secret, which is "
        "curve.key_file of workers, indexer and router. One pair for all of them is enough.",
    )
    curve.add_argument("directory", type=Path, metavar="DIR", help="where the files go")
    curve.add_argument("--name", default="kvmesh", metavar="NAME", help="of the two files (default: kvmesh)")
    events = kinds.add_parser(
        "events",
        help="make a key that KV events name blocks by instead of telling tokens",
        description="Make a key and put it first in FILE: events.key_file of workers, event_key_file of the indexer. "
        "Keys that FILE has already stay, for reading.",
    )
    events.add_argument("file", type=Path, metavar="FILE", help="file of keys; made if missing, for its owner only")


def run(args: argparse.Namespace) -> int:
    """Make what was asked for, and say where it is."""
    if args.kind == "api":
        print(_add_key(args.file, args.name))
        return 0
    if args.kind == "curve":
        print(*_make_pair(args.directory, args.name), sep="\n")
        return 0
    if args.kind == "events":
        print(_add_event_key(args.file))
        return 0
    if not args.days > 0:
        raise UserError(f"--days must be above 0, not {args.days:g}")
    if not NAME.fullmatch(args.stem):
        raise UserError(f"--stem {args.stem!r} is no plain file name")
    print(*make_certificate(args.directory, args.name, stem=args.stem, days=args.days), sep="\n")
    return 0


def _make_pair(directory: Path, name: str) -> tuple[Path, Path]:
    if not NAME.fullmatch(name):
        raise UserError(f"--name {name!r} is no plain file name")
    try:
        return create_key_pair(directory, name)
    except FileExistsError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"cannot write to {directory}: {error.strerror or error}") from error


def _add_event_key(path: Path) -> str:
    """Add a key before those that are there; gives its id, which is no secret."""
    key = generate_key()
    try:
        older = path.read_text(encoding="ascii") if path.exists() else ""
        replacement = path.with_name(f"{path.name}.new")
        descriptor = os.open(replacement, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(f"{key}\n{older}")
        replacement.replace(path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no file of keys") from error
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    return f"{path}: key {StreamKey(bytes.fromhex(key)).key_id} is the first now"


def _add_key(path: Path, name: str) -> str:
    if not NAME.fullmatch(name):
        raise UserError(f"{name!r} is no name for a key: letters, digits, '.', '_' and '-', 64 at most")
    try:
        if path.exists() and name in read_keys(path).values():
            raise UserError(f"{path} has a key named {name} already; remove its line first")
        key = f"sk-{secrets.token_urlsafe(KEY_BYTES)}"
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "a", encoding="utf-8") as file:
            broken_line = path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
            file.write(f"{chr(10) if broken_line else ''}{name} {key}\n")
    except ConfigError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    return key
