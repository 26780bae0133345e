"""An etcd that is not the mesh's own: its authority, a certificate for clients only, a user and a password."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from etcd_server import EtcdServer, etcd_binary, why_no_etcd

from kvmesh.cli.certificates import Files, make_certificate
from kvmesh.config import CoordinatorSettings
from kvmesh.config.errors import ConfigError
from kvmesh.coordinator.etcd import EtcdClient, EtcdError, EtcdUser, Guard
from kvmesh.coordinator.main import build
from kvmesh.net.client import HttpClient
from kvmesh.net.service import serving
from kvmesh.net.tls import Tls

pytestmark = pytest.mark.skipif(etcd_binary() is None, reason=why_no_etcd())

ROOT_PASSWORD = "of-root"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Of etcd itself."""
    return make_certificate(tmp_path_factory.mktemp("etcd-tls"))


@pytest.fixture(scope="module")
def client_files(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A certificate as etcd's administrators give out: for clients, and no more.

    Without a common name: etcd's gateway refuses one that could be taken for a user.
    """
    folder = tmp_path_factory.mktemp("client")
    for name in ("ca.crt", "ca.key"):
        shutil.copy(files.ca.parent / name, folder / name)
    return make_certificate(folder, stem="client", purposes=("client",), common_name="")


@pytest.fixture(scope="module")
def etcd(files: Files) -> Iterator[EtcdServer]:
    server = EtcdServer(files)
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture
def settings(etcd: EtcdServer, client_files: Files) -> dict[str, Any]:
    own = {"ca_file": client_files.ca, "cert_file": client_files.certificate, "key_file": client_files.key}
    return {"etcd_endpoints": [etcd.url], "etcd_tls": {name: str(path) for name, path in own.items()}}


def client(settings: dict[str, Any], user: EtcdUser | None = None) -> EtcdClient:
    read = CoordinatorSettings(**settings)
    return EtcdClient(read.etcd_endpoints, tls=Tls(read.etcd_tls.as_client(), serves=False), user=user)


async def test_an_etcd_of_another_authority(settings: dict[str, Any], tmp_path: Path) -> None:
    """A certificate that could not be served is presented; without it, or without the authority, nobody is let in."""
    async with client(settings) as asking:
        assert await asking.commit(Guard("/a", 0), {"/a": b"1"}) is not None
    bare = {**settings, "etcd_tls": {"ca_file": settings["etcd_tls"]["ca_file"]}}
    stranger = make_certificate(tmp_path)
    distrusted = {**settings, "etcd_tls": {**settings["etcd_tls"], "ca_file": str(stranger.ca)}}
    for wrong in (bare, distrusted):
        async with client(wrong) as asking:
            with pytest.raises(EtcdError, match="certificate"):
                await asking.get("/a")


@pytest.fixture
async def guarded(etcd: EtcdServer, settings: dict[str, Any]) -> Any:
    """The same with authentication: user ``mesh`` may read and write below ``/kvmesh/``."""
    http = HttpClient(tls=Tls(CoordinatorSettings(**settings).etcd_tls.as_client(), serves=False))

    async def ask(path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
        return await http.call("POST", f"{etcd.url}/v3/auth/{path}", dict, body=body, headers=headers)

    range_end = "/kvmesh0"
    permission = {"permType": "READWRITE", "key": encoded("/kvmesh/"), "range_end": encoded(range_end)}
    async with http:
        for name, password, role in (("root", ROOT_PASSWORD, "root"), ("mesh", "old", "mesh")):
            await ask("role/add", {"name": role})
            await ask("user/add", {"name": name, "password": password})
            await ask("user/grant", {"user": name, "role": role})
        await ask("role/grant", {"name": "mesh", "perm": permission})
        await ask("enable", {})

        async def root(path: str, body: dict[str, Any]) -> None:
            token = (await ask("authenticate", {"name": "root", "password": ROOT_PASSWORD}))["token"]
            await ask(path, body, Authorization=token)

        yield root
        await root("disable", {})
        for name in ("root", "mesh"):
            await ask("user/delete", {"name": name})
            await ask("role/delete", {"role": name})


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


async def test_a_user_with_a_password_in_a_file(
    guarded: Any, settings: dict[str, Any], files: Files, tmp_path: Path
) -> None:
    """A token is asked for when etcd wants one, and a new one when it knows the old one no more."""
    file = tmp_path / "password"
    file.write_text("old\n")
    file.chmod(0o600)
    async with client(settings) as nobody:
        with pytest.raises(EtcdError, match="user name is empty"):
            await nobody.get("/kvmesh/a")
    named = {"cert_file": str(files.certificate), "key_file": str(files.key), "ca_file": str(files.ca)}
    async with client({**settings, "etcd_tls": named}, EtcdUser("mesh", file)) as mesh:
        with pytest.raises(EtcdError, match="present a certificate without a common name"):
            await mesh.get("/kvmesh/a")
    async with client(settings, EtcdUser("mesh", file)) as mesh:
        revision = await mesh.commit(Guard("/kvmesh/a", 0), {"/kvmesh/a": b"1"})
        assert revision is not None
        with pytest.raises(EtcdError, match="permission denied"):
            await mesh.get("/elsewhere")
        await guarded("user/changepw", {"name": "mesh", "password": "new"})  # which ends its tokens
        with pytest.raises(EtcdError, match="authentication failed"):
            await mesh.get("/kvmesh/a")
        file.write_text("new\n")
        found = await mesh.get("/kvmesh/a")
        assert found is not None
        assert await mesh.wait_change("/kvmesh/a", revision - 1, 30.0)


async def test_a_coordinator_leads_there(guarded: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("old")
    service = build(CoordinatorSettings(**settings, etcd_user="mesh", etcd_password_file=str(file)))
    async with serving(service):
        assert service.statistics()["leading"] == 1


def test_half_of_a_pair_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="etcd_password_file is missing"):
        CoordinatorSettings(**settings, etcd_user="mesh")
    with pytest.raises(ValueError, match="key_file is missing"):
        CoordinatorSettings(etcd_tls={"cert_file": "c"})
    with pytest.raises(ConfigError, match=r"cannot read etcd_tls\.ca_file /nope"):
        build(CoordinatorSettings(etcd_endpoints=["https://etcd:2379"], etcd_tls={"ca_file": "/nope"}))
    with pytest.raises(ValueError, match="set etcd_user"):
        CoordinatorSettings(etcd_endpoints=["https://mesh:secret@etcd:2379"])
    with pytest.raises(ConfigError, match=r"etcd_password_file .* cannot be read"):
        build(CoordinatorSettings(**settings, etcd_user="mesh", etcd_password_file=str(tmp_path / "none")))
