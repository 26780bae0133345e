"""Write ``locks/*.txt``: what each layer of the images installs, to the last dependency, each file by its SHA-256.

``lock.py UV``: with the program ``uv`` at that path, from pyproject.toml, the versions of constraints.txt, and for what
these bring along the versions that are installed beside this interpreter, which are those that the tests ran with.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import distributions, requires
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LOCKS = HERE / "locks"
TORCH = "torch"
NEEDS_TORCH = ("nixl-cu13",)
"""Locked without their dependencies, which are torch and numpy."""


def main() -> None:
    """Write them anew."""
    uv = sys.argv[1]
    LOCKS.mkdir(exist_ok=True)
    groups = pinned_groups()
    torch = [pin for pin in groups["engine"] if name_of(pin) == TORCH]
    (LOCKS / "torch.txt").write_text("".join(f"{pin}\n" for pin in torch))
    groups["engine"] = [pin for pin in groups["engine"] if name_of(pin) != TORCH] + without_markers(
        requires(TORCH) or []
    )
    for group, pins in groups.items():
        alone = [pin for pin in pins if name_of(pin) in NEEDS_TORCH]
        rest = [pin for pin in pins if pin not in alone]
        locked = compiled(uv, rest) + (compiled(uv, alone, "--no-deps") if alone else "")
        (LOCKS / f"{group}.txt").write_text(locked)


def pinned_groups() -> dict[str, list[str]]:
    """What pyproject.toml requires for each layer, in the versions of constraints.txt."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = data["project"]
    extras = project["optional-dependencies"]
    wanted = {
        "base": project["dependencies"],
        "build": data["build-system"]["requires"],
        "engine": extras["engine"],
        "keys": extras["keys"],
    }
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    versions = {name_of(line): line.partition("==")[2] for line in lines if "==" in line}
    return {
        group: [f"{name_of(one)}=={versions[name_of(one)]}" for one in requirements]
        for group, requirements in wanted.items()
    }


def without_markers(requirements: list[str]) -> list[str]:
    """Those that hold everywhere: a build of torch for GPUs names others, which come with it."""
    return [one for one in requirements if ";" not in one and not name_of(one).startswith(("nvidia-", "triton"))]


def compiled(uv: str, requirements: list[str], *flags: str) -> str:
    """The closure of requirements with hashes of all their files, whatever the processor they are for."""
    installed = [
        f"{name_of(one.name)}=={one.version}"
        for one in distributions()
        if name_of(one.name) not in (TORCH, "kvmesh") and "+" not in one.version
    ]
    with tempfile.TemporaryDirectory() as folder:
        constraints, wanted = Path(folder, "constraints.txt"), Path(folder, "wanted.in")
        constraints.write_text("\n".join(installed))
        wanted.write_text("\n".join(requirements))
        command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--generate-hashes"]
        command += ["--python-version", "3.11", "--python-platform", "linux", "--constraint", str(constraints), *flags]
        command += ["--system-certs", str(wanted)]  # the system's authorities, as pip has them
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def name_of(requirement: str) -> str:
    """The normalised name of a package."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match.group()).lower()


if __name__ == "__main__":
    main()
