"""A real etcd for tests: one process, its data in a directory, killed and started again at will."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from kvmesh.cli.certificates import Files

__all__ = ["EtcdServer", "etcd_binary", "why_no_etcd"]

START_S = 20.0


def etcd_binary() -> str | None:
    """Where etcd is, if it is installed."""
    return shutil.which("etcd")


def why_no_etcd() -> str:
    """What a skipped test says."""
    return "etcd is not installed: apt-get install etcd-server"


class EtcdServer:
    """A one-member cluster on loopback.

    Args:
        certificates: with them it speaks TLS to clients, and asks them for a certificate.
    """

    def __init__(self, certificates: Files | None = None) -> None:
        self._certificates = certificates
        self.directory = Path(tempfile.mkdtemp(prefix="kvm-etcd-", dir="/tmp"))
        client, peer = _free_ports(2)
        self.url = f"{'https' if certificates else 'http'}://127.0.0.1:{client}"
        self.peer_url = f"http://127.0.0.1:{peer}"
        self.popen: subprocess.Popen[bytes] | None = None

    def start(self) -> EtcdServer:
        """Start it, on the data that is there, and wait until it answers."""
        binary = etcd_binary()
        assert binary is not None
        argv = [
            *(binary, "--name", "test", "--data-dir", str(self.directory / "data")),
            *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
            *("--listen-peer-urls", self.peer_url, "--initial-advertise-peer-urls", self.peer_url),
            *("--initial-cluster", f"test={self.peer_url}"),
        ]
        if (own := self._certificates) is not None:
            argv += ["--cert-file", str(own.certificate), "--key-file", str(own.key)]
            argv += ["--trusted-ca-file", str(own.ca), "--client-cert-auth"]
        with (self.directory / "log").open("ab") as log:
            self.popen = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline_s = time.monotonic() + START_S
        while not self.healthy():
            assert self.popen.poll() is None, (self.directory / "log").read_text()[-3000:]
            assert time.monotonic() < deadline_s, "etcd did not start"
            time.sleep(0.02)
        return self

    def healthy(self) -> bool:
        """Whether it answers and has a leader."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2.0, context=self._context()) as answer:
                return b"true" in answer.read()
        except (urllib.error.URLError, OSError):
            return False

    def _context(self) -> ssl.SSLContext | None:
        if (own := self._certificates) is None:
            return None
        context = ssl.create_default_context(cafile=str(own.ca))
        context.load_cert_chain(own.certificate, own.key)
        return context

    def kill(self) -> None:
        """``kill -9``; the data stays."""
        if self.popen is not None:
            os.kill(self.popen.pid, signal.SIGKILL)
            self.popen.wait()
            self.popen = None

    def stop(self) -> None:
        """Kill it and remove its data."""
        self.kill()
        shutil.rmtree(self.directory)


def _free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(listener.getsockname()[1]) for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports
