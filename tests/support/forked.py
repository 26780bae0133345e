"""Processes that begin with the libraries loaded: a start takes milliseconds instead of the seconds of an import."""

from __future__ import annotations

import multiprocessing

__all__ = ["PROCESSES"]

PROCESSES = multiprocessing.get_context("forkserver")
"""Forked from one process that has no threads and no transfer library of its own."""
PROCESSES.set_forkserver_preload(["torch", "kvmesh.transceiver"])
