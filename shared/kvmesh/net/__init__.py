"""How a process lives and talks: life cycle, HTTP plumbing, discovery, clock and fault points.

Nothing is imported here: light modules (clock, faults) are used by code that must not load an HTTP library.
"""
