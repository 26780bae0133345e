"""What context and generation servers share: the OpenAI face of one engine process.

``server`` is the service, ``runs`` turns engine output into text, ``stops`` finds stop strings, ``disagg`` speaks
``disaggregated_params``, ``completions`` and ``chat`` answer requests, ``membership`` tells the mesh about the worker.
"""
