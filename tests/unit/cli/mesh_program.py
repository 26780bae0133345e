"""``kvmesh`` with children that need no model: ``mesh_program.py COMMAND ...``."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from urllib.parse import urlsplit

from kvmesh.cli import mesh, up
from kvmesh.cli.main import main

HERE = Path(__file__).parent

mesh.PROGRAM = (sys.executable, str(HERE / "mesh_child.py"))
up.PROGRAM = (sys.executable, __file__)
up.resolve_model = lambda *_args, **_kwargs: None
up.check_model = lambda *_args: None

plan_mesh = up.plan_mesh
thieves: list[socket.socket] = []


def plan_and_lose_a_port(*args):
    """The first plan's port of ``$LOSE`` is taken before anybody uses it."""
    plan = plan_mesh(*args)
    if (loser := os.environ.get("LOSE")) and not thieves:
        settings = {child.name: child.settings for child in plan.children}[loser]
        events = getattr(settings, "kv_cache_config", None)
        port = urlsplit(events.kv_events_config.endpoint).port if events is not None else settings.port
        thieves.append(socket.create_server(("127.0.0.1", port)))
    return plan


up.plan_mesh = plan_and_lose_a_port

if __name__ == "__main__":
    sys.exit(main())
