"""``TlsSettings``: the certificates of one service, for its HTTP face and for its own requests to others."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from kvmesh.config.base import StrictModel

__all__ = ["EtcdTlsSettings", "TlsSettings"]


class TlsSettings(StrictModel):
    """Certificates of one service; PEM files that are read again when they change.

    With ``cert_file`` the HTTP face speaks TLS only. Requests to other services verify them by ``ca_file`` and present
    the same certificate.
    """

    cert_file: str | None = None
    """Certificate of this service, then those that lead to its authority; unset: the HTTP face is plain HTTP."""
    key_file: str | None = None
    """Private key of the certificate, without a pass phrase."""
    ca_file: str | None = None
    """Authorities that other services' certificates, and clients' where they are asked for one, are verified by; unset:
    those of the system, and no certificate is accepted from clients."""
    client_auth: Literal["none", "optional", "required"] = "none"
    """Whether clients of the HTTP face present a certificate that ``ca_file`` verifies: ``none`` does not ask,
    ``optional`` verifies what is presented, ``required`` refuses who presents none."""
    server_name: str | None = None
    """Name that the other services' certificates must bear, whatever address they are reached at; unset: that address.
    For meshes whose addresses no certificate can name, such as those of pods."""

    @property
    def serves(self) -> bool:
        """Whether the HTTP face speaks TLS."""
        return self.cert_file is not None

    @property
    def scheme(self) -> Literal["http", "https"]:
        """Of the HTTP face's URL."""
        return "https" if self.serves else "http"

    @model_validator(mode="after")
    def require_pairs(self) -> Self:
        """A certificate is of no use without its key, nor asking for one without a way to verify it."""
        if (self.cert_file is None) != (self.key_file is None):
            missing = "key_file" if self.key_file is None else "cert_file"
            raise ValueError(f"cert_file and key_file go together; {missing} is missing")
        if self.client_auth != "none" and not self.serves:
            raise ValueError(f"client_auth {self.client_auth!r} needs cert_file: without TLS no certificate is sent")
        if self.client_auth != "none" and self.ca_file is None:
            raise ValueError(f"client_auth {self.client_auth!r} needs ca_file to verify clients by")
        return self


class EtcdTlsSettings(StrictModel):
    """Whom to trust as etcd, and what to present to it; PEM files that are read again when they change."""

    ca_file: str | None = None
    """Authorities that etcd's certificates are verified by; unset: those of the system."""
    cert_file: str | None = None
    """Certificate to present, then those that lead to its authority; unset: none."""
    key_file: str | None = None
    """Private key of the certificate, without a pass phrase."""
    server_name: str | None = None
    """Name that etcd's certificates must bear; unset: the host of the endpoint."""

    @model_validator(mode="after")
    def require_pairs(self) -> Self:
        """A certificate is of no use without its key."""
        if (self.cert_file is None) != (self.key_file is None):
            missing = "key_file" if self.key_file is None else "cert_file"
            raise ValueError(f"cert_file and key_file go together; {missing} is missing")
        return self

    @property
    def stated(self) -> bool:
        """Whether there is anything in it."""
        return any(value is not None for value in self.model_dump().values())

    def as_client(self) -> TlsSettings:
        """The same in the terms of a service that only asks."""
        return TlsSettings(**self.model_dump())
