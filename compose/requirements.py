"""Print what pyproject.toml requires, one requirement a line, so that an image has it in a layer below our own code.

``requirements.py base|build|EXTRA...``: the dependencies, the build's own, or those of extras.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main() -> None:
    """Print those that the arguments name."""
    data = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    project = data["project"]
    sets = {"base": project["dependencies"], "build": data["build-system"]["requires"]}
    sets |= project["optional-dependencies"]
    print(*(requirement for name in sys.argv[1:] for requirement in sets[name]), sep="\n")


if __name__ == "__main__":
    main()
