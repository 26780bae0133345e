"""The ``kvmesh`` command.

``main`` finds the command and imports only what it needs; each command is a module with ``add_arguments`` and ``run``.

``up`` -> ``plan`` (what to start, pure) -> ``supervisor`` (processes) -> ``readiness`` -> ``ready_block``; ``rundir``
holds what ``down`` and ``status`` read. ``bench`` is the load generator.
"""
