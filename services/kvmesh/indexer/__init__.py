"""The KV event indexer: reads every worker's events and answers who holds how much of a prompt.

Workers are followed by :mod:`kvmesh.events.feeds`, which fills the index (:mod:`kvmesh.events.index`). ``matching``
answers the router over ZMQ, ``routes`` people and other stacks over HTTP, ``app`` is the service around them.
"""
