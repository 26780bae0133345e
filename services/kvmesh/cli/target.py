"""Where commands like ``chat``, ``bench`` and ``status`` find the mesh they talk to."""

from __future__ import annotations

import argparse
import os

import anyio

from kvmesh.cli.errors import UserError
from kvmesh.cli.rundir import MeshState, RunDir, is_running
from kvmesh.cli.trust import add_tls_flags, curve_from, tls_from
from kvmesh.net.client import HttpClient, PeerUnreachableError
from kvmesh.net.curve import CurveSecurity
from kvmesh.net.tls import Tls
from kvmesh.protocol.errors import ApiError

__all__ = [
    "add_api_key_flag",
    "add_coordinator_flags",
    "add_target_flags",
    "auth_headers",
    "client_of",
    "coordinator_url",
    "curve_of",
    "indexer_url",
    "router_url",
    "tls_of",
]

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_COORDINATOR_URL = "http://127.0.0.1:8400"
DEFAULT_INDEXER_URL = "http://127.0.0.1:8300"
API_KEY_VARIABLE = "KVMESH_API_KEY"


def add_target_flags(parser: argparse.ArgumentParser) -> None:
    """``--url``, ``--api-key`` and those of TLS."""
    parser.add_argument("--url", help=f"router (default: the mesh that 'up' started, else {DEFAULT_URL})")
    add_api_key_flag(parser)
    add_tls_flags(parser)


def add_coordinator_flags(parser: argparse.ArgumentParser) -> None:
    """``--coordinator``, ``--api-key`` and those of TLS."""
    parser.add_argument("--coordinator", metavar="URL", help="coordinator (default: that of the mesh 'up' started)")
    add_api_key_flag(parser)
    add_tls_flags(parser)


def add_api_key_flag(parser: argparse.ArgumentParser) -> None:
    """``--api-key``."""
    parser.add_argument("--api-key", help=f"API key (default: ${API_KEY_VARIABLE})")


def router_url(args: argparse.Namespace) -> str:
    """The router's base URL."""
    if args.url:
        return _complete(args.url)
    state = _running()
    return state.url if state is not None else DEFAULT_URL


def coordinator_url(args: argparse.Namespace) -> str:
    """The coordinator's base URL, from ``--coordinator``, the running mesh, or the default port.

    Of several with commas between, the first that answers: it names the one that leads.

    Raises:
        UserError: no address, or none of several answers.
    """
    if args.coordinator:
        urls = [_complete(url.strip()) for url in args.coordinator.split(",")]
        return urls[0] if len(urls) == 1 else anyio.run(_first_that_answers, urls, client_of(args))
    state = _running()
    return state.coordinator_url if state is not None else DEFAULT_COORDINATOR_URL


def indexer_url(given: str | None) -> str:
    """The indexer's base URL: the one given, that of the running mesh, or the default port."""
    if given:
        return _complete(given)
    state = _running()
    return state.indexer_url if state is not None else DEFAULT_INDEXER_URL


def tls_of(args: argparse.Namespace) -> Tls:
    """Whom to trust, and what to present; that of the running mesh unless another one is named.

    Raises:
        UserError: a file cannot be used.
    """
    named = any(getattr(args, flag, None) for flag in ("url", "coordinator", "indexer"))
    return tls_from(args, None if named else _running())


def curve_of(args: argparse.Namespace) -> CurveSecurity | None:
    """Keys of encrypted events; those of the running mesh unless another one is named.

    Raises:
        UserError: a file cannot be used.
    """
    named = any(getattr(args, flag, None) for flag in ("endpoint", "coordinator", "indexer"))
    return curve_from(args, None if named else _running())


def client_of(args: argparse.Namespace, timeout_s: float = 5.0) -> HttpClient:
    """A client of the coordinator with the key and the certificates that the flags name, to be opened.

    Raises:
        UserError: a file cannot be used.
    """
    return HttpClient(timeout_s=timeout_s, headers=auth_headers(args), tls=tls_of(args), follow_leader=True)


def auth_headers(args: argparse.Namespace) -> dict[str, str]:
    """The API key as a header; nothing without one."""
    key = args.api_key or os.environ.get(API_KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def _running() -> MeshState | None:
    """The mesh of this run directory; None where none was started.

    Raises:
        UserError: it was killed. What answers at the default ports would be another one.
    """
    run_dir = RunDir.from_environment()
    state = run_dir.read()
    if state is not None and not is_running(state.supervisor):
        raise UserError(
            f"the mesh at {state.url} has died (its logs are in {run_dir.logs}); 'kvmesh down' clears what it left, "
            "'kvmesh up' starts it anew, and for another one give its address"
        )
    return state


async def _first_that_answers(urls: list[str], client: HttpClient) -> str:
    async with client as http:
        for url in urls:
            try:
                async with http.open("GET", f"{url}/health"):
                    return url
            except ApiError:
                return url
            except PeerUnreachableError:
                continue
    raise UserError(f"none of {', '.join(urls)} answers; check --coordinator")


def _complete(url: str) -> str:
    full = (url if "://" in url else f"http://{url}").rstrip("/")
    if not full.startswith(("http://", "https://")):
        raise UserError(f"{url!r} is not an HTTP address; write http://HOST:PORT")
    return full
