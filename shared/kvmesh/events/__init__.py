"""KV cache events: from the cache manager's sink over ZMQ to whoever keeps an index.

Sending: ``sink`` collects what an engine step changed, ``publisher`` sends it and answers replays, ``factory`` puts
both together from a worker's settings. Reading: ``subscriber`` follows any engine's stream (``tracking`` decides,
``replay`` asks for what was missed), ``decoding`` and ``dialects`` turn payloads into ``records``, ``index`` keeps who
holds what.
"""
