"""Certificates of one process: precise errors at the start, reloads, and what a failed connection says."""

from __future__ import annotations

import datetime as dt
import ssl
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvmesh.cli.certificates import Files, make_certificate
from kvmesh.config.tls import TlsSettings
from kvmesh.net import tls as tls_module
from kvmesh.net.tls import Tls, TlsError, tls_problem


class ManualClock:
    """Time that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_ns(self) -> int:
        return int(dt.datetime.now(dt.UTC).timestamp() * 1e9)

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing here sleeps")


def settings(files: Files, **more: object) -> TlsSettings:
    return TlsSettings.model_validate(
        {
            "cert_file": str(files.certificate),
            "key_file": str(files.key),
            "ca_file": str(files.ca),
            **more,
        }
    )


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return make_certificate(tmp_path / "mesh", ["router.example", "10.0.0.7"])


def test_a_good_certificate_is_served_and_presented(files: Files) -> None:
    tls = Tls(settings(files, client_auth="required", server_name="kvmesh.internal"))
    assert tls.serves
    assert tls.server().verify_mode is ssl.CERT_REQUIRED
    assert tls.certificate is not None
    assert {"kvmesh.internal", "localhost", "127.0.0.1", "router.example", "10.0.0.7"} < set(tls.certificate.names)
    options = tls.for_request()
    assert isinstance(options["ssl"], ssl.SSLContext)
    assert options["server_hostname"] == "kvmesh.internal"
    left_s = tls.statistics()["certificate_not_after_seconds"] - dt.datetime.now(dt.UTC).timestamp()
    assert 363 * 86_400 < left_s < 366 * 86_400


def test_without_settings_nothing_is_served_and_requests_stay_as_they_are() -> None:
    tls = Tls(TlsSettings())
    assert not tls.serves
    assert tls.for_request() == {}
    with pytest.raises(RuntimeError):
        tls.server()


def test_a_missing_file_is_named(files: Files, tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere.crt")
    for field in ("cert_file", "key_file", "ca_file"):
        with pytest.raises(TlsError, match=rf"cannot read tls\.{field} .*nowhere\.crt: No such file"):
            Tls(settings(files, **{field: missing}))


def test_a_key_of_another_certificate_is_told(files: Files, tmp_path: Path) -> None:
    other = make_certificate(tmp_path / "mesh", stem="other")
    with pytest.raises(TlsError, match=r"tls\.key_file .*other\.key is not the key of the certificate in .*tls\.crt"):
        Tls(settings(files, key_file=str(other.key)))


def test_an_expired_certificate_is_told(tmp_path: Path) -> None:
    long_ago = dt.datetime.now(dt.UTC) - dt.timedelta(days=400)
    files = make_certificate(tmp_path, days=30, now=long_ago)
    with pytest.raises(TlsError, match="has expired"):
        Tls(settings(files))
    with pytest.raises(TlsError, match="has expired"):
        Tls(settings(files, ca_file=None))


def test_a_certificate_of_tomorrow_is_told(tmp_path: Path) -> None:
    tomorrow = dt.datetime.now(dt.UTC) + dt.timedelta(days=1)
    with pytest.raises(TlsError, match="not valid yet"):
        Tls(settings(make_certificate(tmp_path, now=tomorrow)))


def test_an_authority_that_did_not_sign_is_told(files: Files, tmp_path: Path) -> None:
    stranger = make_certificate(tmp_path / "stranger")
    with pytest.raises(TlsError, match=r"tls\.crt: the certificate is not signed by ca_file .*stranger"):
        Tls(settings(files, ca_file=str(stranger.ca)))


def test_files_that_are_something_else_are_told(files: Files, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("hello\n")
    for field in ("cert_file", "key_file", "ca_file"):
        with pytest.raises(TlsError, match=rf"tls\.{field} .*text holds (no|nothing)"):
            Tls(settings(files, **{field: str(text)}))


def test_an_authority_alone_is_checked_too(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("hello\n")
    with pytest.raises(TlsError, match=r"tls\.ca_file .*text holds no certificate"):
        Tls(TlsSettings(ca_file=str(text)))


def test_a_certificate_for_servers_only_is_refused_where_services_ask_for_one(tmp_path: Path) -> None:
    """Services present to each other what they serve; without the purpose, each would refuse every other."""
    files = make_certificate(tmp_path, purposes=("server",))
    assert Tls(settings(files)).serves
    with pytest.raises(TlsError, match="not for both servers and clients"):
        Tls(settings(files, client_auth="required"))


def test_a_key_with_a_pass_phrase_is_told_instead_of_asking_the_terminal(files: Files) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    files.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"phrase"),
        )
    )
    with pytest.raises(TlsError, match="pass phrase"):
        Tls(settings(files))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"cert_file": "a"}, "key_file is missing"),
        ({"key_file": "a"}, "cert_file is missing"),
        ({"client_auth": "required", "ca_file": "a"}, "needs cert_file"),
        ({"client_auth": "optional", "cert_file": "a", "key_file": "b"}, "needs ca_file"),
    ],
)
def test_settings_that_cannot_work_are_refused(given: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TlsSettings.model_validate(given)


def test_changed_files_are_taken_in_once_they_are_whole(files: Files, tmp_path: Path) -> None:
    clock = ManualClock()
    tls = Tls(settings(files), clock)
    first, options = tls.server(), tls.for_request()
    other = make_certificate(tmp_path / "mesh", stem="other")
    other.key.replace(files.key)
    clock.now_s += 2
    with capture_logs() as logs:
        assert tls.server() is first, "half a pair is not used"
        clock.now_s += 2
        tls.server()
    assert [line["event"] for line in logs] == ["certificates not reloaded; the last good ones stay"], "said once"
    other.certificate.replace(files.certificate)
    assert tls.server() is first, "files are looked at once a second"
    clock.now_s += 2
    assert tls.server() is not first
    assert tls.for_request() is not options
    assert tls.statistics()["reloads_total"] == 1
    assert tls.statistics()["reload_failures_total"] == 1


def test_files_that_become_usable_by_themselves_are_tried_again(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate that is not valid yet: nothing changes in the files when it is."""
    clock = ManualClock()
    tls = Tls(settings(files), clock)
    first = tls.server()
    other = make_certificate(tmp_path / "mesh", stem="other")
    other.key.replace(files.key)
    other.certificate.replace(files.certificate)
    load = tls_module.load_certificates

    def too_early(_settings: TlsSettings, **_: object) -> None:
        raise TlsError("the certificate is not valid yet")

    monkeypatch.setattr(tls_module, "load_certificates", too_early)
    with capture_logs() as logs:
        for _ in range(2):
            clock.now_s += 61
            assert tls.server() is first
    assert len(logs) == 1, "said once"
    monkeypatch.setattr(tls_module, "load_certificates", load)
    clock.now_s += 30
    assert tls.server() is first, "tried once a minute"
    clock.now_s += 31
    assert tls.server() is not first
    assert tls.statistics()["reload_failures_total"] == 2


def test_a_file_that_vanishes_leaves_the_last_good_certificate(files: Files) -> None:
    clock = ManualClock()
    tls = Tls(settings(files), clock)
    first = tls.server()
    files.certificate.unlink()
    clock.now_s += 2
    assert tls.server() is first


def test_a_certificate_that_ends_soon_is_warned_of(tmp_path: Path) -> None:
    files = make_certificate(tmp_path, days=2)
    with capture_logs() as logs:
        Tls(settings(files))
    [warning] = [line for line in logs if line["log_level"] == "warning"]
    assert warning["event"] == "the certificate ends soon"
    assert 46 < warning["hours_left"] < 49


def test_other_errors_say_nothing_of_tls() -> None:
    assert tls_problem(ConnectionRefusedError("no")) is None


def test_keys_are_private_and_the_authority_is_kept(tmp_path: Path) -> None:
    files = make_certificate(tmp_path)
    authority = files.ca.read_bytes(), files.ca_key.read_bytes()
    again = make_certificate(tmp_path)
    assert (again.ca.read_bytes(), again.ca_key.read_bytes()) == authority
    for key in (files.ca_key, files.key):
        assert key.stat().st_mode & 0o777 == 0o600
