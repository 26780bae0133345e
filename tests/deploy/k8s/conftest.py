"""One cluster for all tests of the chart that need one; only ``make k8s-test`` starts it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from helm_chart import CACHE, HELMS, helm
from kube_cluster import BINARIES, PROGRAMS, Cluster

from kvmesh.models.store import DEFAULT_MODEL, fetch

BINARY_DIR = Path(os.environ.get("KVMESH_K8S_BIN", CACHE / "kubernetes"))
IMAGES = Path(os.environ.get("KVMESH_IMAGES", CACHE / "images.tar"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if "KVMESH_K8S_TEST" not in os.environ:
        pytest.skip("starts a whole Kubernetes: run 'make k8s-test'")
    if absent := [name for name in BINARIES if not (BINARY_DIR / name).exists()]:
        pytest.skip(f"{BINARY_DIR} has no {', '.join(absent)}: 'make k8s-build' builds them, once")
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"missing: {', '.join(missing)}")
    if not IMAGES.exists():
        pytest.skip(f"there is no {IMAGES}: 'make k8s-images' makes it")
    for name in HELMS:
        helm(name)
    with Cluster(BINARY_DIR, CACHE / "helm4" / "kubectl", CACHE / "k8s-state", [IMAGES]) as running:
        yield running


@pytest.fixture(scope="session")
def models(cluster: Cluster) -> Path:
    """A model cache that pods can read."""
    folder = cluster.run_dir / "models"
    shutil.copytree(fetch(DEFAULT_MODEL).path.parent, folder / DEFAULT_MODEL)
    subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
    subprocess.run(["chown", "-R", "10001:10001", folder], check=True)
    return folder
