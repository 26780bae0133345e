"""Builds the images and saves them to one archive, for the cluster of the chart's tests: ``kube_images.py OUT.tar``."""

from __future__ import annotations

import sys
from pathlib import Path

from containers.building import build_environment
from containers.engine import docker_engine
from containers.project import Project

IMAGES = ("kvmesh:light", "kvmesh:engine", "kvmesh:etcd")
BUILD_S = 1500.0


def main() -> None:
    """Replace the archive in one step."""
    target = Path(sys.argv[1])
    partial = target.with_suffix(".partial")
    with docker_engine() as docker, build_environment() as environment:
        Project(docker, environment).compose("build", timeout_s=BUILD_S)
        docker("save", "--output", str(partial), *IMAGES, timeout_s=BUILD_S)
    partial.replace(target)


if __name__ == "__main__":
    main()
