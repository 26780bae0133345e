"""KV cache events: from the cache manager's sink over ZMQ to whoever keeps an index.

``sink`` collects what an engine step changed, ``publisher`` sends it and answers replays, ``subscriber`` reads any
worker's stream, ``factory`` puts a worker's publisher together from its settings.
"""
