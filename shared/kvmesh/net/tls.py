"""TLS of one process: the certificate that it serves and presents, and the authorities that it trusts.

The files are looked at again when connections are made, so that certificates change without a restart. What is read is
tried before it is used, by a handshake in memory: a key that does not belong to its certificate, a certificate that
has expired or that the authorities did not sign is refused with a sentence, at the start or at a reload.
"""

from __future__ import annotations

import math
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvmesh.config.tls import TlsSettings
from kvmesh.net.clock import Clock, SystemClock
from kvmesh.net.private_files import warn_if_public
from kvmesh.net.tls_files import Certificate, TlsError, load_certificates, unverified
from kvmesh.telemetry import get_logger

__all__ = ["Tls", "TlsError", "tls_problem"]

LOOK_S = 1.0
"""The files are looked at no more often than this."""

TRY_AGAIN_S = 60.0
"""How long after a failure the same files are tried again."""

SOON_S = 7 * 86_400.0
"""A certificate that ends within a week is warned of."""

_log = get_logger("tls")


class Tls:
    """The certificates of one process as they are now.

    Args:
        settings: which files.
        clock: of looking at them again.
        serves: whether the certificate is served, or only presented.

    Raises:
        TlsError: they cannot be used.
    """

    def __init__(self, settings: TlsSettings, clock: Clock | None = None, *, serves: bool = True) -> None:
        self.settings = settings
        self._may_serve = serves
        self._clock = clock or SystemClock()
        self._reloads = 0
        self._failures = 0
        self._seen = self._stamps()
        self._loaded = load_certificates(settings, serves=serves)
        if settings.key_file is not None:
            warn_if_public("tls.key_file", settings.key_file)
        self._options = self._request_options()
        self._next_look_s = self._clock.monotonic_s() + LOOK_S
        self._try_again_s = math.inf
        self._said = ""
        """Of a failure that lasts."""
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
        if stamps == self._seen and now_s < self._try_again_s:
            return
        self._seen = stamps
        self._try_again_s = math.inf
        try:
            self._loaded = load_certificates(self.settings, serves=self._may_serve)
        except TlsError as error:
            self._failures += 1
            # What is wrong with the same files may pass: a certificate that is not valid yet, files of two mounts.
            self._try_again_s = now_s + TRY_AGAIN_S
            if str(error) != self._said:
                self._said = str(error)
                _log.warning("certificates not reloaded; the last good ones stay", error=self._said)
            return
        self._reloads += 1
        self._said = ""
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
            return unverified(cause, "its certificate", "the trusted authorities (ca_file)")
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


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size
