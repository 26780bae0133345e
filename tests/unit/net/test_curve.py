"""CURVE with real sockets: files of keys, who is let in, who is refused, and what is said at start."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from pydantic import ValidationError
from structlog.testing import capture_logs

from kvmesh.config.curve import CurveSettings
from kvmesh.config.errors import ConfigError
from kvmesh.net.curve import CurveSecurity, create_key_pair, read_key_pair, read_public_key
from kvmesh.net.zap import ZapServer

REFUSED_MS = 300
"""How long somebody who is refused waits for nothing."""
TIMEOUT_MS = 5000

MakeSecurity = Callable[..., CurveSecurity]


@pytest.fixture
def security(tmp_path: Path) -> MakeSecurity:
    """``security(name, server, clients)``: of a service with its own pair, made on first use."""

    def pair(name: str) -> Path:
        secret = tmp_path / f"{name}.key_secret"
        return secret if secret.exists() else create_key_pair(tmp_path, name)[1]

    def make(name: str = "mesh", server: str | None = None, clients: str | Path | None = None) -> CurveSecurity:
        key_file = pair(name)
        loaded = CurveSecurity.load(
            CurveSettings(
                key_file=str(key_file),
                server_key_file=None if server is None else str(pair(server).with_suffix(".key")),
                client_keys=None if clients is None else str(clients),
            )
        )
        assert loaded is not None
        return loaded

    return make


@contextmanager
def serving(security: CurveSecurity) -> Iterator[tuple[str, ZapServer]]:
    """An echo behind CURVE, answered and authenticated by one thread."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    zap = ZapServer(context, security)
    echo = context.socket(zmq.ROUTER)
    echo.linger = 0
    security.apply_server(echo)
    echo.bind("tcp://127.0.0.1:*")
    stop = os.eventfd(0, os.EFD_CLOEXEC)

    def run() -> None:
        poller = zmq.Poller()
        for each in (stop, zap.socket, echo):
            poller.register(each, zmq.POLLIN)
        while stop not in (ready := dict(poller.poll())):
            if zap.socket in ready:
                zap.answer()
            if echo in ready:
                echo.send_multipart(echo.recv_multipart())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield str(echo.get_string(zmq.LAST_ENDPOINT)), zap
    finally:
        os.eventfd_write(stop, 1)
        thread.join()
        os.close(stop)
        echo.close()
        zap.close()
        context.term()


def is_answered(endpoint: str, security: CurveSecurity | None, *, timeout_ms: int = TIMEOUT_MS) -> bool:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    if security is not None:
        security.apply_client(socket)
    socket.connect(endpoint)
    socket.send(b"hello")
    try:
        return bool(socket.poll(timeout_ms)) and socket.recv() == b"hello"
    finally:
        socket.close()
        context.term()


def test_one_pair_is_enough_for_a_mesh(security: MakeSecurity) -> None:
    with serving(security()) as (endpoint, zap):
        assert is_answered(endpoint, security())
        assert zap.refused_total == 0


def test_who_has_no_key_is_refused(security: MakeSecurity) -> None:
    with serving(security()) as (endpoint, _):
        assert not is_answered(endpoint, None, timeout_ms=REFUSED_MS)


def test_who_has_another_key_is_refused_and_named_once(security: MakeSecurity) -> None:
    with serving(security()) as (endpoint, zap), capture_logs() as logs:
        stranger = security("stranger", server="mesh")
        assert not is_answered(endpoint, stranger, timeout_ms=REFUSED_MS)
        assert zap.refused_total >= 1
    assert logs[0]["public_key"] == stranger.own.public.decode()
    assert logs[0]["so_far"] == 1


def test_who_expects_another_server_says_nothing_to_this_one(security: MakeSecurity) -> None:
    with serving(security()) as (endpoint, zap):
        assert not is_answered(endpoint, security("mesh", server="other"), timeout_ms=REFUSED_MS)
        assert zap.refused_total == 0, "the handshake fails before the client has shown its key"


def test_clients_have_keys_of_their_own_which_may_come_and_go(security: MakeSecurity, tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    create_key_pair(tmp_path, "router")
    create_key_pair(tmp_path, "indexer")
    allowed.mkdir()
    (tmp_path / "router.key").rename(allowed / "router.key")
    router, indexer = (
        CurveSecurity(read_key_pair(tmp_path / f"{name}.key_secret"), server_key=b"", client_keys=None)  # type: ignore[arg-type]
        for name in ("router", "indexer")
    )
    server = security("server", clients=allowed)
    router, indexer = (each._replace(server_key=server.own.public) for each in (router, indexer))
    with serving(server) as (endpoint, _):
        assert is_answered(endpoint, router)
        assert not is_answered(endpoint, indexer, timeout_ms=REFUSED_MS)
        assert not is_answered(endpoint, security("server"), timeout_ms=REFUSED_MS), "its own key is not on the list"
        (tmp_path / "indexer.key").rename(allowed / "indexer.key")
        assert is_answered(endpoint, indexer), "without a restart"
        (allowed / "router.key").unlink()
        assert not is_answered(endpoint, router, timeout_ms=REFUSED_MS)
        (allowed / "indexer.key").unlink()
        with capture_logs() as logs:
            assert is_answered(endpoint, indexer), "an empty directory is a mistake: the last good keys stay"
        assert "last good ones stay" in logs[0]["event"]


def test_without_someone_who_authenticates_nobody_is_let_in(security: MakeSecurity) -> None:
    """It fails closed: a forgotten ZapServer opens no door."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PULL)
    security().apply_server(socket)
    socket.bind("tcp://127.0.0.1:*")
    assert not is_answered(str(socket.get_string(zmq.LAST_ENDPOINT)), security(), timeout_ms=REFUSED_MS)
    assert not socket.poll(0)
    socket.close()
    context.term()


def test_a_context_has_one_authenticator(security: MakeSecurity) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    zap = ZapServer(context, security())
    with pytest.raises(OSError, match="cannot authenticate"):
        ZapServer(context, security())
    zap.close()
    zap.close()
    context.term()


def test_requests_that_are_not_of_our_sockets_are_denied(security: MakeSecurity) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    zap = ZapServer(context, security())
    libzmq = context.socket(zmq.REQ)
    libzmq.linger, libzmq.rcvtimeo = 0, TIMEOUT_MS
    libzmq.connect("inproc://zeromq.zap.01")
    for frames in (
        [b"1.0", b"r", b"kvmesh", b"1.2.3.4", b"", b"NULL"],
        [b"1.0", b"r", b"other", b"1.2.3.4", b"", b"CURVE", bytes(32)],
        [b"2.0", b"r", b"kvmesh", b"1.2.3.4", b"", b"CURVE", bytes(32)],
        [b"1.0", b"r", b"kvmesh", b"1.2.3.4", b"", b"CURVE", bytes(31)],
        [b""],
    ):
        libzmq.send_multipart(frames)
        assert zap.socket.poll(TIMEOUT_MS)
        zap.answer()
        assert libzmq.recv_multipart()[2] == b"400"
    libzmq.close()
    zap.close()
    context.term()


def test_files_of_a_pair(tmp_path: Path) -> None:
    public, secret = create_key_pair(tmp_path / "new" / "directory")
    assert (public.name, secret.name) == ("kvmesh.key", "kvmesh.key_secret")
    assert secret.stat().st_mode & 0o777 == 0o600
    pair = read_key_pair(secret)
    assert read_public_key(public, "x") == read_public_key(secret, "x") == pair.public == zmq.curve_public(pair.secret)
    assert pair.secret not in public.read_bytes()
    with pytest.raises(FileExistsError, match="already"):
        create_key_pair(tmp_path / "new" / "directory")


def test_files_are_those_that_other_zeromq_tools_read(tmp_path: Path) -> None:
    import zmq.auth

    public, secret = create_key_pair(tmp_path)
    pair = read_key_pair(secret)
    assert zmq.auth.load_certificate(secret) == (pair.public, pair.secret)
    assert zmq.auth.load_certificate(public) == (pair.public, None)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    _, their_secret = zmq.auth.create_certificates(theirs, "t")
    Path(their_secret).chmod(0o600)
    assert tuple(read_key_pair(their_secret)) == zmq.auth.load_certificate(their_secret)


def test_plain_sockets_need_no_keys() -> None:
    assert CurveSecurity.load(CurveSettings()) is None


@pytest.mark.parametrize("name", ["server_key_file", "client_keys"])
def test_other_keys_without_ones_own_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="kvmesh keys curve"):
        CurveSettings.model_validate({name: "x"})


@pytest.mark.parametrize(
    ("mode", "allowed"), [(0o600, True), (0o400, True), (0o440, True), (0o604, False), (0o620, False), (0o644, False)]
)
def test_who_may_read_the_secret(tmp_path: Path, mode: int, allowed: bool) -> None:
    _, secret = create_key_pair(tmp_path)
    secret.chmod(mode)
    if allowed:
        assert read_key_pair(secret)
    else:
        with pytest.raises(ConfigError, match="chmod 600"):
            read_key_pair(secret)


def test_errors_at_start_say_what_to_do(tmp_path: Path) -> None:
    public, secret = create_key_pair(tmp_path)
    public.chmod(0o600)

    def error(**settings: str) -> str:
        with pytest.raises(ConfigError) as caught:
            CurveSecurity.load(CurveSettings.model_validate(settings))
        return str(caught.value)

    missing = str(tmp_path / "missing")
    assert "No such file" in error(key_file=missing)
    assert "kvmesh keys curve DIR" in error(key_file=missing)
    assert ".key_secret" in error(key_file=str(public))
    assert "server_key_file" in error(key_file=str(secret), server_key_file=missing)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "put the clients' keys there" in error(key_file=str(secret), client_keys=str(empty))
    damaged = tmp_path / "damaged.key"
    damaged.write_text('public-key = "too short"\n')
    assert "no public key" in error(key_file=str(secret), client_keys=str(damaged))
    damaged.write_text(f'public-key = "{"~" * 40}"\n')
    assert "no public key" in error(key_file=str(secret), server_key_file=str(damaged))
    mixed = tmp_path / "mixed.key_secret"
    other = create_key_pair(tmp_path, "other")[0].read_text()
    mixed.write_text(other + "\n".join(line for line in secret.read_text().splitlines() if "secret-key" in line))
    mixed.chmod(0o600)
    assert "not that of the secret key" in error(key_file=str(mixed))
