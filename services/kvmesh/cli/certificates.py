"""Makes a private certificate authority, and certificates for the services of a mesh, with ``cryptography``."""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvmesh.cli.errors import UserError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

__all__ = ["COMMON_NAMES", "Files", "make_certificate"]

COMMON_NAMES = ("kvmesh.internal", "localhost", "127.0.0.1", "::1")
"""What every certificate bears beside the names asked for. The first is what ``tls.server_name`` can be set to."""

CA_DAYS = 3650
_EARLY = dt.timedelta(minutes=5)
"""Certificates begin so much before they are made: clocks differ."""


class Files(NamedTuple):
    """Where things are."""

    ca: Path
    ca_key: Path
    certificate: Path
    key: Path


def make_certificate(
    directory: Path,
    names: Iterable[str] = (),
    *,
    stem: str = "tls",
    days: float = 365,
    common_name: str = "kvmesh",
    purposes: tuple[Literal["server", "client"], ...] = ("server", "client"),
    now: dt.datetime | None = None,
) -> Files:
    """One certificate, signed by the authority in ``directory``; made first if missing.

    Files that exist already are replaced in one step each, the key before its certificate: services that read them
    again notice the pair once it is whole.

    Args:
        directory: gets ``ca.crt``, ``ca.key`` (private), ``STEM.crt`` and ``STEM.key`` (private).
        names: host names and addresses that it bears beside :data:`COMMON_NAMES`.
        stem: of the two file names.
        days: how long it is valid.
        common_name: subject of the certificate; empty: it has none.
        purposes: what it is for.
        now: when it is made.

    Raises:
        UserError: the ``cryptography`` package is missing, or a file cannot be written or read.
    """
    try:
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise UserError("making certificates needs the package 'cryptography': make venv EXTRAS=keys") from None
    files = Files(directory / "ca.crt", directory / "ca.key", directory / f"{stem}.crt", directory / f"{stem}.key")
    now = now or dt.datetime.now(dt.UTC)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        authority, authority_key = _authority(files, now)
        key = ec.generate_private_key(ec.SECP256R1())
        bears = tuple(dict.fromkeys((*COMMON_NAMES, *names)))
        certificate = _sign(authority, authority_key, key, common_name, bears, purposes, now, days)
        _write(files.key, _pem_key(key), 0o600)
        _write(files.certificate, _pem(certificate), 0o644)
    except OSError as error:
        raise UserError(f"cannot write to {directory}: {error.strerror or error}") from error
    return files


def _authority(files: Files, now: dt.datetime) -> tuple[x509.Certificate, EllipticCurvePrivateKey]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    if files.ca_key.exists() or files.ca.exists():
        try:
            certificate = x509.load_pem_x509_certificate(files.ca.read_bytes())
            key = serialization.load_pem_private_key(files.ca_key.read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{files.ca} and {files.ca_key} are no authority that can sign: {error}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise UserError(f"{files.ca_key} was not made by this command; use a directory of its own")
        return certificate, key
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "KVMesh private authority")])
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLY)
        .not_valid_after(now + dt.timedelta(days=CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(files.ca_key, _pem_key(key), 0o600)
    _write(files.ca, _pem(certificate), 0o644)
    return certificate, key


def _sign(
    authority: x509.Certificate,
    authority_key: EllipticCurvePrivateKey,
    key: EllipticCurvePrivateKey,
    common_name: str,
    names: Iterable[str],
    purposes: Iterable[str],
    now: dt.datetime,
    days: float,
) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID

    usages = {"server": ExtendedKeyUsageOID.SERVER_AUTH, "client": ExtendedKeyUsageOID.CLIENT_AUTH}
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)] if common_name else []))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLY)
        .not_valid_after(min(now + dt.timedelta(days=days), authority.not_valid_after_utc))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usages[purpose] for purpose in purposes]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        pass
    try:
        return x509.DNSName(name)
    except ValueError as error:
        raise UserError(f"{name!r} is neither a host name nor an address") from error


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return certificate.public_bytes(serialization.Encoding.PEM)


def _pem_key(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, data: bytes, mode: int) -> None:
    """The whole file at once, never readable by more than ``mode`` says."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    new.replace(path)
