"""``kvmesh`` with children that need no model: ``mesh_program.py COMMAND ...``."""

from __future__ import annotations

import sys
from pathlib import Path

from kvmesh.cli import mesh, up
from kvmesh.cli.main import main

HERE = Path(__file__).parent

mesh.PROGRAM = (sys.executable, str(HERE / "mesh_child.py"))
up.PROGRAM = (sys.executable, __file__)
up.resolve_model = lambda *_args, **_kwargs: None

if __name__ == "__main__":
    sys.exit(main())
