"""TLS of one process: the certificate that it serves and presents, and the authorities that it trusts.

The files are looked at again when connections are made, so that certificates change without a restart. What is read is
tried before it is used, by a handshake in memory: a key that does not belong to its certificate, a certificate that
has expired or that the authorities did not sign is refused with a sentence, at the start or at a reload.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from kvmesh.config.errors import ConfigError
from kvmesh.config.tls import TlsSettings
from kvmesh.net.clock import Clock, SystemClock
from kvmesh.telemetry import get_logger

__all__ = ["Certificate", "Tls", "TlsError", "tls_problem"]

LOOK_S = 1.0
"""The files are looked at no more often than this."""

SOON_S = 7 * 86_400.0
"""A certificate that ends within a week is warned of."""

_EXPIRED = 10
_NOT_YET_VALID = 9
_PURPOSE = 26
_UNSIGNED = frozenset({18, 19, 20, 21})
"""OpenSSL's verify codes: self-signed, and no way from the certificate to an authority."""

_log = get_logger("tls")


class TlsError(ConfigError):
    """Certificates that cannot be used; the message names the file and says why."""


class Certificate(NamedTuple):
    """What is known of the certificate in use."""

    names: tuple[str, ...]
    """Host names and addresses that it bears."""
    not_after_unix_s: float


class _Loaded(NamedTuple):
    server: ssl.SSLContext | None
    client: ssl.SSLContext | None
    certificate: Certificate | None


class Tls:
    """The certificates of one process as they are now.

    Args:
        settings: which files.
        clock: of looking at them again.

    Raises:
        TlsError: they cannot be used.
    """

    def __init__(self, settings: TlsSettings, clock: Clock | None = None) -> None:
        self.settings = settings
        self._clock = clock or SystemClock()
        self._reloads = 0
        self._failures = 0
        self._seen = self._stamps()
        self._loaded = _load(settings)
        self._options = self._request_options()
        self._next_look_s = self._clock.monotonic_s() + LOOK_S
        self._warn_if_soon()

    @property
    def serves(self) -> bool:
        """Whether the process has a certificate to serve."""
        return self._loaded.server is not None

    @property
    def certificate(self) -> Certificate | None:
        """The one in use."""
        return self._loaded.certificate

    def server(self) -> ssl.SSLContext:
        """For the next connection that comes in.

        Raises:
            RuntimeError: there is no certificate to serve.
        """
        self._refresh()
        if self._loaded.server is None:
            raise RuntimeError("no certificate to serve")
        return self._loaded.server

    def for_request(self) -> Mapping[str, Any]:
        """Keyword arguments of an aiohttp request to another service; empty where nothing is set."""
        self._refresh()
        return self._options

    def statistics(self) -> dict[str, float]:
        """When the certificate ends (seconds since 1970), and reloads since the start."""
        numbers: dict[str, float] = {"reloads_total": self._reloads, "reload_failures_total": self._failures}
        if self._loaded.certificate is not None:
            numbers["certificate_not_after_seconds"] = self._loaded.certificate.not_after_unix_s
        return numbers

    def _request_options(self) -> Mapping[str, Any]:
        options: dict[str, Any] = {}
        if self._loaded.client is not None:
            options["ssl"] = self._loaded.client
        if self.settings.server_name is not None:
            options["server_hostname"] = self.settings.server_name
        return options

    def _stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(
            _stamp(Path(path))
            for path in (self.settings.cert_file, self.settings.key_file, self.settings.ca_file)
            if path is not None
        )

    def _refresh(self) -> None:
        """Take in files that have changed. While they cannot be used, the last good ones stay."""
        if not self._seen:
            return  # no files
        now_s = self._clock.monotonic_s()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + LOOK_S
        stamps = self._stamps()
        if stamps == self._seen:
            return
        self._seen = stamps
        try:
            self._loaded = _load(self.settings)
        except TlsError as error:
            self._failures += 1
            _log.warning("certificates not reloaded; the last good ones stay", error=str(error))
            return
        self._reloads += 1
        self._options = self._request_options()
        _log.info("certificates reloaded")
        self._warn_if_soon()

    def _warn_if_soon(self) -> None:
        certificate = self._loaded.certificate
        if certificate is None:
            return
        left_s = certificate.not_after_unix_s - self._clock.unix_ns() / 1e9
        if left_s < SOON_S:
            _log.warning("the certificate ends soon", file=self.settings.cert_file, hours_left=round(left_s / 3600, 1))


def tls_problem(error: BaseException) -> str | None:
    """What a failed connection says of TLS, for people; None when it says nothing of it."""
    cause: BaseException | None = error
    while cause is not None:
        inner = getattr(cause, "certificate_error", None) or getattr(cause, "os_error", None)
        if isinstance(inner, BaseException):
            cause = inner
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _unverified(cause, "its certificate", "the trusted authorities (ca_file)")
        if isinstance(cause, ssl.SSLError):
            return _broken(cause)
        cause = cause.__cause__
    return None


def _broken(error: ssl.SSLError) -> str:
    text = f"{error.reason or ''} {error}".upper()
    if "WRONG_VERSION_NUMBER" in text or "HTTP_REQUEST" in text or "RECORD LAYER FAILURE" in text:
        return "it does not speak TLS; use http://"
    if "CERTIFICATE_REQUIRED" in text or "CERTIFICATE REQUIRED" in text:
        return "it asks for a client certificate (cert_file, key_file)"
    if "UNKNOWN_CA" in text or "BAD_CERTIFICATE" in text or "CERTIFICATE_UNKNOWN" in text:
        return "it does not accept this client's certificate"
    if "CERTIFICATE_EXPIRED" in text:
        return "it does not accept this client's certificate, which has expired"
    return f"TLS failed: {error.reason or error}"


def _unverified(error: ssl.SSLCertVerificationError, certificate: str, authorities: str) -> str:
    if error.verify_code == _EXPIRED:
        return f"{certificate}, or one above it, has expired"
    if error.verify_code == _NOT_YET_VALID:
        return f"{certificate} is not valid yet"
    if error.verify_code in _UNSIGNED:
        return f"{certificate} is not signed by {authorities}"
    return f"{certificate} cannot be trusted: {error.verify_message.rstrip('.')}"


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


def _load(settings: TlsSettings) -> _Loaded:
    certificate = None if settings.cert_file is None else _tried(settings)
    server = None if settings.cert_file is None else _server_context(settings)
    if settings.cert_file is None and settings.ca_file is None:
        return _Loaded(None, None, None)
    client = ssl.create_default_context(cafile=_readable(settings.ca_file, "ca_file"))
    client.minimum_version = ssl.TLSVersion.TLSv1_2
    if settings.ca_file is not None:
        _trust(client, settings.ca_file)
    _present(client, settings)
    return _Loaded(server, client, certificate)


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
        problem = _unverified(error, "the certificate", f"ca_file {settings.ca_file}")
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
