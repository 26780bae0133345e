"""``kvmesh health``: one look at a service, for container health checks and scripts.

It runs every few seconds beside each service, so it needs nothing but the standard library, and starts fast.
"""

from __future__ import annotations

import argparse
import http.client
import json
import ssl
from urllib.parse import urlsplit

from kvmesh.cli.errors import UserError
from kvmesh.cli.serving_file import VARIABLE, Serving, read_serving

__all__ = ["add_arguments", "run"]

DEFAULT_URL = "http://127.0.0.1:8000"
UNHEALTHY = 1


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:  # noqa: ARG001 - one command
    """Whose health."""
    parser.add_argument(
        "url",
        nargs="?",
        help=f"base URL of a service (default: the one that wrote ${VARIABLE}, or the mesh that 'up' started, "
        f"else {DEFAULT_URL})",
    )
    parser.add_argument("--ready", action="store_true", help="of a router: whether it has servers to send requests to")
    parser.add_argument("--timeout", metavar="S", type=float, default=4.0, help="longest wait (default: 4)")
    parser.add_argument("--ca-file", metavar="FILE", help="authorities that verify an https service's certificate")


def run(args: argparse.Namespace) -> int:
    """Print what the service says of itself; status 1 unless it is well.

    Raises:
        UserError: the URL is none, or the service beside this command has not started.
    """
    own = (read_serving() or _running_mesh()) if args.url is None else None
    serving = own or Serving(args.url or DEFAULT_URL)
    if args.ca_file is not None:
        serving = serving._replace(ca_file=args.ca_file)
    try:
        status, detail = _ask(serving, "/ready" if args.ready else "/health", args.timeout, named=own is None)
    except (OSError, http.client.HTTPException) as error:
        print(f"{serving.url} does not answer: {_reason(error)}")
        return UNHEALTHY
    print(f"{serving.url} {detail or 'ok' if status == 200 else f'{status}: {detail}'}")
    return 0 if status == 200 else UNHEALTHY


def _ask(serving: Serving, path: str, timeout_s: float, *, named: bool) -> tuple[int, str]:
    """Status and detail of one GET.

    Args:
        serving: whom.
        path: ``/health`` or ``/ready``.
        timeout_s: bound of each wait.
        named: whether the URL's host is a name that the certificate must bear. The service in the same container is
            reached by its address, which its certificate need not know.
    """
    full = serving.url if "://" in serving.url else f"http://{serving.url}"
    try:
        parts = urlsplit(full)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if parts.scheme not in ("http", "https") or not host:
        raise UserError(f"{serving.url!r} is not an HTTP address; write http://HOST:PORT")
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=_context(serving, named=named))
    else:
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, _detail(response.read(1 << 16))
    finally:
        connection.close()


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message}); give --ca-file"
    if isinstance(error, (ConnectionResetError, BrokenPipeError, ssl.SSLError)):  # Also ``RemoteDisconnected``.
        return (
            f"{error}; perhaps it asks for a client certificate, which 'kvmesh health' presents beside the service only"
        )
    return str(error) or type(error).__name__


def _running_mesh() -> Serving | None:
    """The router of the mesh that ``up`` started here."""
    from kvmesh.cli.rundir import RunDir, is_running  # not beside each service, every few seconds

    state = RunDir.from_environment().read()
    if state is None or not is_running(state.supervisor):
        return None
    tls = state.tls
    return Serving(state.url, tls.get("ca_file"), tls.get("cert_file"), tls.get("key_file"))


def _context(serving: Serving, *, named: bool) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=serving.ca_file)
        context.check_hostname = named
        if serving.cert_file is not None:
            context.load_cert_chain(serving.cert_file, serving.key_file)
    except OSError as error:
        raise UserError(f"cannot use the certificates for {serving.url}: {error}") from error
    return context


def _detail(body: bytes) -> str:
    """What the service says of its state: its own sentence, or the message of an error."""
    try:
        answer = json.loads(body)
        error = answer.get("error")
        return str(answer.get("detail") or (error or {}).get("message") or "")
    except (ValueError, AttributeError):
        return "an answer that is not of this product"
