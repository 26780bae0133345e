"""What to tell a person when a server does not answer as it should: is it down, another service, or locked?"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from kvmesh.cli.errors import UserError
from kvmesh.net.client import HttpClient, PeerUnreachableError
from kvmesh.protocol.errors import ApiError

__all__ = ["ask_coordinator", "explained"]

T = TypeVar("T")


class _Health(msgspec.Struct):
    service: str


async def ask_coordinator(http: HttpClient, url: str, path: str, kind: type[T], *, given: bool) -> T:
    """What a coordinator answers to GET ``path``.

    Args:
        http: to ask with.
        url: the coordinator's base URL.
        path: with its query.
        kind: of the answer.
        given: whether the user named the URL.

    Raises:
        UserError: it does not answer, or is none.
    """
    try:
        return await http.call("GET", url + path, kind)
    except (PeerUnreachableError, ApiError, msgspec.DecodeError) as error:
        raise await explained(http, error, url, wanted="coordinator", given=given) from error


async def explained(
    http: HttpClient,
    error: PeerUnreachableError | ApiError | msgspec.DecodeError,
    url: str,
    *,
    wanted: str,
    given: bool,
) -> UserError:
    """``error`` with what to do about it.

    Args:
        http: asks the server what it is.
        error: how it answered, or that it did not.
        url: its base URL.
        wanted: the service that it should be, ``router`` or ``coordinator``.
        given: whether the user named the URL.
    """
    flag = "--url" if wanted == "router" else "--coordinator"
    if isinstance(error, PeerUnreachableError) and (of_certificates := _with_flags(str(error))) is not None:
        return UserError(of_certificates)
    if isinstance(error, PeerUnreachableError):
        return UserError(f"{error}; " + (f"check {flag}" if given else "is the mesh up? 'kvmesh up' starts one"))
    if isinstance(error, ApiError) and error.status == 401:
        return UserError(f"{error.message.rstrip('.')}; give --api-key, or set KVMESH_API_KEY")
    if isinstance(error, ApiError) and error.status not in (404, 405):
        return UserError(f"{url} answered {error.status}: {error.message}")
    try:
        health = await http.call("GET", f"{url}/health", _Health)
    except (PeerUnreachableError, ApiError, msgspec.DecodeError):
        return UserError(f"{url} answers, but not as a {wanted}; check {flag}")
    if health.service == wanted:
        return UserError(f"{url} is a {wanted} of another version: {error}")
    article = "an" if health.service[0] in "aeiou" else "a"
    return UserError(
        f"{url} is {article} {health.service} server, not a {wanted}; give the {wanted}'s address with {flag}"
    )


def _with_flags(text: str) -> str | None:
    """A sentence about certificates with this command's flags for the settings of services; None for any other."""
    told = text.replace("(cert_file, key_file)", "(--cert-file, --key-file)").replace("(ca_file)", "(--ca-file)")
    return None if told == text else told
