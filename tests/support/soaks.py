"""Cases that only the soaks run: each is a relative of one that always runs, on another plane or for another victim."""

from __future__ import annotations

import os

import pytest

__all__ = ["soak_only"]

soak_only = pytest.mark.skipif(not os.environ.get("KVMESH_SOAK"), reason="a soak runs it: `make help`")
