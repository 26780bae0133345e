"""The router: OpenAI's HTTP face, and the choice of a context and a generation server for each request.

A request runs through ``pipeline`` (parse, admit, tokenize, match), ``plan`` (which servers), ``dispatch`` (the legs,
with retries) and ``relay`` (bytes to the client). ``http`` is the only module of that path that knows an HTTP library.
"""
