"""The OpenAI HTTP face as data: requests, their checks, sampling parameters, responses, SSE and fan-out.

Used by the router (fan-out, merging, errors) and by the workers (one sequence per request). Nothing here does I/O.
"""
