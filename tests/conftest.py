"""What holds for every test."""

from __future__ import annotations

import os

from hypothesis import settings

# The same examples every time, so that a run says something about the change under test and not about chance; new ones
# are drawn where there is time for them (`make soak-cache`, `make soak-modes`).
settings.register_profile("repeatable", derandomize=True)
settings.register_profile("soak", derandomize=False)
settings.load_profile("soak" if os.environ.get("KVMESH_SOAK") else "repeatable")
