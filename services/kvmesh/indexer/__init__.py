"""The KV event indexer: reads every worker's events and answers who holds how much of a prompt.

``feeds`` follows workers and fills the index (:mod:`kvmesh.events.index`), ``matching`` answers the router over ZMQ,
``app`` people and other stacks over HTTP.
"""
