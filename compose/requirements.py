"""Print what pyproject.toml requires, in the versions of constraints.txt, one requirement a line.

``requirements.py base|build|EXTRA...``: the dependencies, the build's own, or those of extras. An image installs them
in a layer below our own code, which lasts until one of these lines changes.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def main() -> None:
    """Print those that the arguments name."""
    data = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    project = data["project"]
    sets = {"base": project["dependencies"], "build": data["build-system"]["requires"]}
    sets |= project["optional-dependencies"]
    pins = [line for line in Path("constraints.txt").read_text(encoding="utf-8").splitlines() if "==" in line]
    versions = {_name(pin): pin.partition("==")[2] for pin in pins}
    for requirement in (requirement for name in sys.argv[1:] for requirement in sets[name]):
        print(f"{_name(requirement)}=={versions[_name(requirement)]}")


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match.group()).lower()


if __name__ == "__main__":
    main()
