"""From the PEM files of a :class:`TlsSettings` to contexts, each tried before it is used; what is wrong is said."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from kvmesh.config.errors import ConfigError
from kvmesh.config.tls import TlsSettings

__all__ = ["Certificate", "Certificates", "TlsError", "load_certificates", "unverified"]

_EXPIRED = 10
_NOT_YET_VALID = 9
_PURPOSE = 26
_UNSIGNED = frozenset({18, 19, 20, 21})
"""OpenSSL's verify codes: self-signed, and no way from the certificate to an authority."""


class TlsError(ConfigError):
    """Certificates that cannot be used; the message names the file and says why."""


class Certificate(NamedTuple):
    """What is known of the certificate in use."""

    names: tuple[str, ...]
    """Host names and addresses that it bears."""
    not_after_unix_s: float


class Certificates(NamedTuple):
    """What the files make: contexts for either side, None where there is nothing to make one of."""

    server: ssl.SSLContext | None
    client: ssl.SSLContext | None
    certificate: Certificate | None


def load_certificates(settings: TlsSettings, *, serves: bool = True) -> Certificates:
    """Read the files and try what they hold.

    Args:
        settings: which files.
        serves: whether the certificate is served, too; one that is only presented need be of no authority that this
            process knows.

    Raises:
        TlsError: they cannot be used.
    """
    certificate = server = None
    if serves and settings.cert_file is not None:
        certificate = _tried(settings)
        server = _server_context(settings)
    if settings.cert_file is None and settings.ca_file is None:
        return Certificates(None, None, None)
    if settings.ca_file is None:
        client = ssl.create_default_context()
    else:
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _trust(client, settings.ca_file)
    client.minimum_version = ssl.TLSVersion.TLSv1_2
    _present(client, settings)
    return Certificates(server, client, certificate)


def unverified(error: ssl.SSLCertVerificationError, certificate: str, authorities: str) -> str:
    """What OpenSSL found wrong with a certificate, as a sentence."""
    if error.verify_code == _EXPIRED:
        return f"{certificate}, or one above it, has expired"
    if error.verify_code == _NOT_YET_VALID:
        return f"{certificate} is not valid yet"
    if error.verify_code in _UNSIGNED:
        return f"{certificate} is not signed by {authorities}"
    return f"{certificate} cannot be trusted: {error.verify_message.rstrip('.')}"


def _server_context(settings: TlsSettings) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A session that is taken up again would not be verified by authorities that have changed meanwhile.
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
    context.num_tickets = 0
    context.set_alpn_protocols(["http/1.1"])
    _present(context, settings)
    if settings.ca_file is not None and settings.client_auth != "none":
        _trust(context, settings.ca_file)
        context.verify_mode = ssl.CERT_REQUIRED if settings.client_auth == "required" else ssl.CERT_OPTIONAL
    return context


def _tried(settings: TlsSettings) -> Certificate:
    """The certificate, once both ends of a connection in memory have accepted it."""
    assert settings.cert_file is not None, "the caller has looked"
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False  # names are for those to check who come by one
    _present(server, settings)
    if settings.ca_file is not None:
        _trust(client, settings.ca_file)
    else:
        _trust(client, settings.cert_file)  # itself as its authority: only its dates can be wrong then
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if settings.ca_file is not None and settings.client_auth != "none":
        # Where clients are asked for certificates, this process is asked for its own by others.
        _trust(server, settings.ca_file)
        server.verify_mode = ssl.CERT_REQUIRED
        _present(client, settings)
    try:
        peer = _handshake(server, client)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == _PURPOSE:
            raise TlsError(
                f"tls.cert_file {settings.cert_file} is not for both servers and clients (extended key usage); "
                "services present the same certificate to each other"
            ) from error
        problem = unverified(error, "the certificate", f"ca_file {settings.ca_file}")
        raise TlsError(f"tls.cert_file {settings.cert_file}: {problem}") from error
    except ssl.SSLError as error:
        raise TlsError(f"tls.cert_file {settings.cert_file} cannot be used: {error.reason or error}") from error
    names = tuple(str(name) for _, name in peer.get("subjectAltName", ()))
    return Certificate(names, ssl.cert_time_to_seconds(peer["notAfter"]))


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, Any]:
    """Have the two shake hands in memory; gives the server's certificate as the client decodes it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server)
    answering = server.wrap_bio(to_server, to_client, server_side=True)
    waiting = [asking, answering]
    while waiting:
        for side in tuple(waiting):
            try:
                side.do_handshake()
                waiting.remove(side)
            except ssl.SSLWantReadError:
                continue
    return asking.getpeercert() or {}


def _present(context: ssl.SSLContext, settings: TlsSettings) -> None:
    cert_file = _readable(settings.cert_file, "cert_file")
    key_file = _readable(settings.key_file, "key_file")
    if cert_file is None or key_file is None:
        return
    try:
        context.load_cert_chain(cert_file, key_file, password=lambda: _encrypted(key_file))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise TlsError(f"tls.key_file {key_file} is not the key of the certificate in {cert_file}") from error
        what = f"key_file {key_file}" if _has_certificate(cert_file) else f"cert_file {cert_file}"
        reason = error.reason or "PEM lib"
        raise TlsError(f"tls.{what} holds nothing usable in PEM format ({reason})") from error


def _encrypted(key_file: str) -> NoReturn:
    raise TlsError(f"tls.key_file {key_file} has a pass phrase, which nobody could type; decrypt it")


def _trust(context: ssl.SSLContext, file: str) -> None:
    try:
        context.load_verify_locations(cafile=_readable(file, "ca_file"))
    except ssl.SSLError as error:
        raise TlsError(f"tls.ca_file {file} holds no certificate in PEM format") from error


def _has_certificate(path: str) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except ssl.SSLError:
        return False
    return True


def _readable(path: str | None, setting: str) -> str | None:
    if path is None:
        return None
    try:
        with Path(path).open("rb"):
            return path
    except OSError as error:
        raise TlsError(f"cannot read tls.{setting} {path}: {error.strerror or error}") from error
