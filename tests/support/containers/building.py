"""Builds the images as they are published, on a machine whose package index is its own."""

from __future__ import annotations

import functools
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from containers.engine import CACHE, REPOSITORY, run

__all__ = ["build_environment"]

PUBLIC_TORCH = "https://download.pytorch.org/whl/cpu"
TORCH_PORT = 18999
"""Part of a build argument, and so of what a layer is recognised by: the same each time, where it is free."""


@contextmanager
def build_environment() -> Iterator[dict[str, str]]:
    """Variables of ``tests/deploy/build.yaml`` that hold for the length of the block."""
    CACHE.mkdir(parents=True, exist_ok=True)
    settings = _pip_settings()
    own_ca = settings.pop("cert", "")
    ca_file = own_ca if own_ca and Path(own_ca).is_file() else str(_empty_file())
    configuration = CACHE / "pip.conf"
    lines = [f"{name} = {value}" for name, value in settings.items()]
    if own_ca:
        lines.append("cert = /run/secrets/pip.crt")
    configuration.write_text("\n".join(["[global]", *lines, ""]))
    env = {"DEPLOY_PIP_CONF": str(configuration), "DEPLOY_CA_FILE": ca_file}
    if _reachable("download.pytorch.org"):
        yield {**env, "DEPLOY_TORCH_INDEX": PUBLIC_TORCH}
        return
    with _torch_index() as url:
        yield {**env, "DEPLOY_TORCH_INDEX": url}


def _pip_settings() -> dict[str, str]:
    """This machine's pip configuration, as far as a build in a container can use it."""
    settings: dict[str, str] = {}
    for line in run(sys.executable, "-m", "pip", "config", "list").splitlines():
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2].strip()
        value = value.strip().strip("'\"")
        if name in ("index-url", "extra-index-url", "trusted-host", "proxy") and "file:" not in value:
            settings[name] = value
        elif name == "cert":
            settings["cert"] = value
    return settings


def _empty_file() -> Path:
    path = CACHE / "no-authority.crt"
    path.touch()
    return path


def _reachable(host: str) -> bool:
    try:
        socket.create_connection((host, 443), timeout=5).close()
    except OSError:
        return False
    return True


@contextmanager
def _torch_index() -> Iterator[str]:
    """This machine's own build of torch, as a package index on loopback."""
    wheels = CACHE / "index" / "torch"
    wheels.mkdir(parents=True, exist_ok=True)
    pin = next(line for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    version = pin.removeprefix("torch==")
    if not any(wheels.glob(f"torch-{version}*-cp311-*.whl")):
        wanted = ("--python-version", "3.11", "--only-binary", ":all:", "--no-deps", "--dest", str(wheels))
        run(sys.executable, "-m", "pip", "download", "--quiet", *wanted, pin, timeout_s=900)
    handler = functools.partial(_Quiet, directory=str(wheels.parent))
    try:
        server = ThreadingHTTPServer(("127.0.0.1", TORCH_PORT), handler)
    except OSError:
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing."""
