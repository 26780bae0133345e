"""What README.md and the notes of the chart tell a newcomer to type, typed (``make k8s-test``)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helm_chart import CACHE, ROOT
from kube_cluster import Cluster

pytestmark = pytest.mark.timeout(900)


class Shell:
    """A shell that finds kubectl, Helm and the cluster, in the root of the repository."""

    def __init__(self, cluster: Cluster) -> None:
        path = f"{CACHE / 'helm4'}:{os.environ['PATH']}"
        self._environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "PATH": path}

    def __call__(self, command: str, timeout_s: float = 700) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def start(self, command: str) -> subprocess.Popen[bytes]:
        """One in the background, in a process group of its own."""
        return subprocess.Popen(
            ["bash", "-c", command], cwd=ROOT, env=self._environment, stdout=subprocess.DEVNULL, start_new_session=True
        )


@pytest.fixture(scope="module")
def shell(cluster: Cluster) -> Shell:
    return Shell(cluster)


@pytest.fixture(scope="module")
def notes(shell: Shell, models: Path) -> Iterator[str]:
    """What Helm says at the end of README's command; the model is brought along, for pods reach nothing outside."""
    readme = (ROOT / "README.md").read_text()
    (command,) = re.findall(r"^    (helm install .*)$", readme, re.MULTILINE)
    volume = json.dumps({"hostPath": {"path": str(models)}})
    yield shell(f"{command} --set-json model.volume='{volume}'")
    shell("helm uninstall mesh --namespace mesh --wait --timeout 5m && kubectl delete namespace mesh")


def test_the_notes_first_request_is_answered(shell: Shell, notes: str) -> None:
    commands = re.search(r"Ask a question:\n\n(.*?)\n\n", notes, re.DOTALL)
    assert commands is not None
    forward, _, request = commands[1].partition("&\n")
    shell(next(line for line in notes.splitlines() if "rollout status" in line))
    forwarding = shell.start(f"exec {forward.strip()}")
    try:
        answer = json.loads(repeated(shell, request))
    finally:
        os.killpg(forwarding.pid, signal.SIGTERM)
        forwarding.wait(30)
    assert "Paris" in answer["choices"][0]["message"]["content"]


def repeated(shell: Shell, request: str) -> str:
    """Until the port is forwarded; a person waits as well."""
    deadline_s = time.monotonic() + 60
    while True:
        try:
            return shell(request.replace("curl ", "curl --silent --show-error --fail "))
        except AssertionError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(1)


def test_the_chart_asks_by_itself(shell: Shell, notes: str) -> None:
    (command,) = re.findall(r"let the chart ask: (helm test .*)", notes)
    assert "Succeeded" in shell(command)


def test_the_command_works_in_the_coordinator(shell: Shell, notes: str) -> None:
    """docs/kubernetes.md: ``kvmesh status`` through ``kubectl exec``."""
    page = re.sub(r"\s+", " ", (ROOT / "docs" / "kubernetes.md").read_text())
    (command,) = re.findall(r"`(kubectl -n mesh exec mesh-kvmesh-coordinator-0 -- kvmesh status [^`]*)`", page)
    shown = shell(command)
    assert "mesh-kvmesh-context-0" in shown
    assert "mesh-kvmesh-generation-0" in shown
