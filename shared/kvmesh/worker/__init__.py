"""What context and generation servers share: the OpenAI face of their engines.

``server`` is the service, ``ranks`` its engines, ``plans`` turns requests into sequences, ``runs`` engine output into
text, ``answers`` and ``delivery`` text into responses, ``disagg`` speaks ``disaggregated_params``, and ``membership``
tells the mesh about the worker.
"""
