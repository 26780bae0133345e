"""A real Kubernetes of one node for tests: Docker, etcd, API server, controllers, scheduler, kubelet, kube-proxy, DNS.

It wants a network namespace of its own (``unshare --net``), so that bridges, netfilter rules and ports are nobody
else's, and root. Everything is a child of this process and ends with it.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Self

from kube_dns import DOMAIN, KubeDns

NODE_IP = "172.17.0.1"  # Docker's bridge
API = f"https://{NODE_IP}:16443"
SERVICES = "10.96.0.0/24"
PAUSE = "kvmesh-pause:test"
PAUSE_FILE = b'FROM kvmesh:light\nHEALTHCHECK NONE\nENTRYPOINT ["sleep", "infinity"]\n'
CGROUP = "kvmesh-test"
SHARES = 16 * 1024  # of the processor, for all pods together: as much as sixteen processes get
BINARIES = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")
PROGRAMS = ("dockerd", "docker", "runc", "etcd", "iptables", "ip", "openssl", "mount", "umount")


def die_with_parent() -> None:
    """In a child: the kernel ends it with this process, however that ends."""
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))


class Cluster:
    """One node; use it as a context manager.

    Args:
        binaries: folder of Kubernetes' programs.
        kubectl: client.
        state: folder for everything that is written; images stay in it from one time to the next.
        images: archives of ``docker save`` to load.
    """

    def __init__(self, binaries: Path, kubectl: Path, state: Path, images: list[Path]) -> None:
        self.binaries = binaries
        self.kubectl_binary = kubectl
        self.state = state
        self.images = images
        self.run_dir = state / "run"
        self.kubeconfig = self.run_dir / "kubeconfig"
        self.docker_host = f"unix://{self.run_dir}/docker.sock"
        self._token = secrets.token_hex(16)
        self._children: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._dns: KubeDns | None = None
        self._lock: IO[str]

    def __enter__(self) -> Self:
        self.state.mkdir(parents=True, exist_ok=True)
        self._lock = (self.state / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise AssertionError(f"another cluster runs in {self.state}") from None
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._stop()
        finally:
            self._lock.close()

    def _stop(self) -> None:
        if self._dns is not None:
            self._dns.close()
        for name, child in reversed(self._children):
            if name == "dockerd":
                self._remove_containers()
            child.terminate()
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        for line in reversed(Path("/proc/mounts").read_text().splitlines()):
            if (where := line.split()[1]).startswith(f"{self.run_dir}/"):
                subprocess.run(["umount", "--lazy", where], check=False)

    def kubectl(self, *arguments: str | Path, stdin: str | None = None, timeout_s: float = 120) -> str:
        """What kubectl prints.

        Raises:
            AssertionError: it failed; with what it printed.
        """
        done = subprocess.run(
            [self.kubectl_binary, "--kubeconfig", self.kubeconfig, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, f"kubectl {arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    def get(self, kind: str, *arguments: str) -> list[dict[str, Any]]:
        """Objects of a kind, as the API server has them."""
        return json.loads(self.kubectl("get", kind, "-o", "json", *arguments))["items"]

    def docker(self, *arguments: str | Path, stdin: bytes | None = None, check: bool = True) -> str:
        """What docker prints."""
        done = subprocess.run(
            ["docker", "--host", self.docker_host, *arguments],
            input=stdin,
            capture_output=True,
            timeout=300,
            env={**os.environ, "DOCKER_BUILDKIT": "0"},
        )
        assert done.returncode == 0 or not check, f"docker {arguments}: {done.stderr.decode()}"
        return done.stdout.decode()

    def _start(self) -> None:
        shutil.rmtree(self.run_dir, ignore_errors=True)
        self.run_dir.mkdir(parents=True)
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        self._start_docker()
        self._start_control_plane()
        self._start_node()

    def _start_docker(self) -> None:
        self._run(
            "dockerd",
            "dockerd",
            *("--data-root", self.state / "docker", "--exec-root", self.run_dir / "docker"),
            *("--pidfile", self.run_dir / "dockerd.pid", "--host", self.docker_host, "--bip", f"{NODE_IP}/16"),
            *("--add-runtime", f"plain={Path(__file__).with_name('runc_without_oom_score.py')}"),
            *("--default-runtime", "plain", "--cgroup-parent", f"/{CGROUP}"),
        )
        self._wait("dockerd answers", lambda: self._docker_answers())
        self._remove_containers()
        give_shares()
        self._load_images()
        # The infrastructure container of a pod only has to stay.
        self.docker("build", "-t", PAUSE, "-", stdin=PAUSE_FILE)

    def _load_images(self) -> None:
        """Those that are not in the engine's store from an earlier time."""
        seen_file = self.state / "loaded.json"
        stamps = {str(archive): archive.stat().st_mtime_ns for archive in self.images}
        if not seen_file.exists() or json.loads(seen_file.read_text()) != stamps:
            for archive in self.images:
                self.docker("load", "--input", archive)
            seen_file.write_text(json.dumps(stamps))

    def _docker_answers(self) -> bool:
        return bool(self.docker("version", "--format", "{{.Server.Version}}", check=False).strip())

    def _remove_containers(self) -> None:
        if left := self.docker("ps", "-aq", check=False).split():
            self.docker("rm", "--force", *left, check=False)

    def _start_control_plane(self) -> None:
        run, key = self.run_dir, self.run_dir / "accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        (run / "tokens.csv").write_text(f"{self._token},admin,admin,system:masters\n")
        peer, client = "http://127.0.0.1:12380", "http://127.0.0.1:12379"
        self._run(
            "etcd",
            "etcd",
            *("--data-dir", run / "etcd", "--unsafe-no-fsync"),
            *("--listen-client-urls", "http://127.0.0.1:12379", "--advertise-client-urls", "http://127.0.0.1:12379"),
            *(
                "--listen-peer-urls",
                peer,
                "--initial-advertise-peer-urls",
                peer,
                "--initial-cluster",
                f"default={peer}",
            ),
        )
        self._run(
            "kube-apiserver",
            self.binaries / "kube-apiserver",
            *("--etcd-servers", client, "--bind-address", "0.0.0.0", "--secure-port", "16443"),
            *("--advertise-address", NODE_IP, "--cert-dir", run / "certs", "--token-auth-file", run / "tokens.csv"),
            *("--authorization-mode", "RBAC", "--service-cluster-ip-range", SERVICES, "--allow-privileged=true"),
            *("--service-account-key-file", key, "--service-account-signing-key-file", key),
            *("--service-account-issuer", "https://kubernetes.default.svc"),
            *("--kubelet-preferred-address-types", "InternalIP"),
        )
        self.kubeconfig.write_text(json.dumps(kubeconfig(self._token)))
        self._wait("the API server is ready", lambda: self._api_is_ready())
        for name, port in (("kube-controller-manager", "16257"), ("kube-scheduler", "16259")):
            own = ("--service-account-private-key-file", key, "--root-ca-file", run / "certs" / "apiserver.crt")
            self._run(
                name,
                self.binaries / name,
                *("--kubeconfig", self.kubeconfig, "--bind-address", "127.0.0.1", "--secure-port", port, "--port", "0"),
                *("--leader-elect=false", "--cert-dir", run / "certs"),
                *(own if "controller" in name else ()),
            )

    def _api_is_ready(self) -> bool:
        probe = [self.kubectl_binary, "--kubeconfig", self.kubeconfig, "get", "--raw", "/readyz"]
        done = subprocess.run(probe, capture_output=True, timeout=30)
        return done.stdout == b"ok"

    def _start_node(self) -> None:
        run = self.run_dir
        self._dns = KubeDns(NODE_IP, API, self._token)
        self._dns.start()
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": NODE_IP,
            "readOnlyPort": 0,
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "cgroupsPerQOS": False,
            "enforceNodeAllocatable": [],
            "failSwapOn": False,
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
            "clusterDNS": [NODE_IP],
            "clusterDomain": DOMAIN,
        }
        (run / "kubelet.json").write_text(json.dumps(config))
        self._run(
            "kubelet",
            self.binaries / "kubelet",
            *("--config", run / "kubelet.json", "--kubeconfig", self.kubeconfig, "--root-dir", run / "kubelet"),
            *("--cert-dir", run / "kubelet-certs", "--container-runtime", "docker"),
            *("--docker-endpoint", self.docker_host, "--pod-infra-container-image", PAUSE),
            *("--hostname-override", "node1", "--node-ip", NODE_IP),
        )
        proxy = ("--hostname-override", "node1", "--proxy-mode", "iptables", "--conntrack-max-per-core", "0")
        # Any route will do: kube-proxy turns a Service's address into a pod's on the way.
        subprocess.run(["ip", "route", "add", SERVICES, "dev", "docker0"], check=True)
        self._run("kube-proxy", self.binaries / "kube-proxy", "--kubeconfig", self.kubeconfig, *proxy)
        self._wait("the node is ready", lambda: any(map(is_ready, self.get("nodes"))))

    def _run(self, name: str, *command: str | Path) -> None:
        with (self.run_dir / f"{name}.log").open("wb") as log:
            child = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent
            )
        self._children.append((name, child))

    def _wait(self, what: str, holds: Callable[[], bool], timeout_s: float = 120.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not holds():
            for name, child in self._children:
                if child.poll() is not None:
                    log = (self.run_dir / f"{name}.log").read_text(errors="replace")
                    raise AssertionError(f"{name} has ended with {child.returncode}:\n{log[-3000:]}")
            assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}; logs are in {self.run_dir}"
            time.sleep(0.3)


def give_shares() -> None:
    """On a machine that does more than this, one group of all pods must not get the share of one process."""
    controller = Path("/sys/fs/cgroup/cpu")  # cgroup v1, which this Kubernetes wants
    if controller.is_dir():
        (controller / CGROUP).mkdir(exist_ok=True)
        (controller / CGROUP / "cpu.shares").write_text(str(SHARES))


def kubeconfig(token: str) -> dict[str, Any]:
    """For everybody who runs this cluster; the certificate is of its own making."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": API, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
    }


def is_ready(item: dict[str, Any]) -> bool:
    """Whether a node or a pod says that it is ready."""
    conditions = item["status"].get("conditions", [])
    return any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)
