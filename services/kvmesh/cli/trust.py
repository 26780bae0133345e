"""Whom the commands trust, and what they present: certificates behind ``https://``, keys to ZeroMQ sockets."""

from __future__ import annotations

import argparse
import os
from typing import Any

from kvmesh.cli.errors import UserError
from kvmesh.cli.rundir import MeshState
from kvmesh.config import ConfigError, IndexerSettings, load_settings
from kvmesh.config.service import ServiceSettings
from kvmesh.net.curve import CurveSecurity
from kvmesh.net.tls import Tls

__all__ = ["add_curve_flags", "add_tls_flags", "curve_from", "tls_from"]

_FIELDS = ("ca_file", "cert_file", "key_file", "server_name")


def add_tls_flags(parser: argparse.ArgumentParser) -> None:
    """``--ca-file`` and its kin."""
    group = parser.add_argument_group("https", "By default as in the settings of services (KVMESH_TLS__CA_FILE ...).")
    group.add_argument("--ca-file", metavar="FILE", help="authorities that verify the mesh's certificates")
    group.add_argument("--cert-file", metavar="FILE", help="certificate to present to services that ask for one")
    group.add_argument("--key-file", metavar="FILE", help="its private key")
    group.add_argument("--server-name", metavar="NAME", help="name that the certificates bear, whatever the address")


def tls_from(args: argparse.Namespace, running: MeshState | None) -> Tls:
    """From the flags, then the environment, then the mesh that ``up`` started (None: another one was named).

    Raises:
        UserError: a file cannot be used.
    """
    flags = {name: value for name in _FIELDS if (value := getattr(args, name, None)) is not None}
    variables = {f"KVMESH_TLS__{name.upper()}": name for name in _FIELDS}
    given: dict[str, Any] = {name: value for key, name in variables.items() if (value := os.environ.get(key))} | flags
    if not given and running is not None:
        given = dict(running.tls)
    try:
        return Tls(load_settings(ServiceSettings, env={}, overrides={"tls": given}).tls)
    except ConfigError as error:
        raise UserError(str(error)) from error


def add_curve_flags(parser: argparse.ArgumentParser) -> None:
    """``--curve-key-file`` and its kin."""
    group = parser.add_argument_group("encrypted events", "By default KVMESH_CURVE__KEY_FILE, or those of the mesh.")
    group.add_argument("--curve-key-file", metavar="FILE", help="key pair to present (*.key_secret)")
    group.add_argument("--curve-server-key-file", metavar="FILE", help="the publishers' public key, if another's")


def curve_from(args: argparse.Namespace, running: MeshState | None) -> CurveSecurity | None:
    """From the flags, then the environment, then the mesh that ``up`` started; None: the sockets are plain.

    Raises:
        UserError: a file cannot be used.
    """
    fields = ("key_file", "server_key_file")
    given: dict[str, Any] = {
        name: value for name in fields if (value := os.environ.get(f"KVMESH_CURVE__{name.upper()}"))
    }
    given |= {name: value for name in fields if (value := getattr(args, f"curve_{name}")) is not None}
    if not given and running is not None:
        given = dict(running.curve)
    try:
        return CurveSecurity.load(load_settings(IndexerSettings, env={}, overrides={"curve": given}).curve)
    except ConfigError as error:
        raise UserError(str(error)) from error
