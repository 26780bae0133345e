"""``kvmesh bench``: load, measured from the client's side.

``workload`` what to send (pure, seeded) -> ``runner`` sends it -> ``summary`` percentiles (pure) -> ``report`` table,
JSON and plot.
"""
