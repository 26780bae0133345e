"""The whole way of an event, and of a question: our indexer process and Dynamo's, fed with the same messages.

A publisher sends what vLLM sends (msgpack over a ZMQ PUB socket) to one indexer process at a time, which runs on a core
of its own. Its processor time, of all its threads, is read from the outside by its CPU clock; the end is seen by the
clock standing still, and then confirmed by a question.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import zmq

from kvmesh.protocol.match import MatchReply, MatchRequest

__all__ = ["SHAPES", "Shape", "compare_paths", "path_ratios"]

BLOCK = 16
PROMPT_TOKENS = 2048
VOCABULARY = 150_000
START_S = 60.0
ARRIVE_S = 180.0
QUIET_S = 0.6
QUIET_CPU_S = 0.003
HTTP_QUERIES = 2000
MATCH_QUERIES = 5000
MODEL = "default"


class Shape(NamedTuple):
    """How blocks are packed into messages, and how an event is written."""

    events: int
    """In a message."""
    blocks: int
    """In an event."""
    maps: bool
    """vLLM's maps of today, or the arrays it had before."""

    def __str__(self) -> str:
        return f"{self.events:2d} events of {self.blocks:2d} blocks, {'maps' if self.maps else 'arrays'}"


SHAPES = (Shape(1, 64, True), Shape(64, 1, True), Shape(1, 64, False), Shape(64, 1, False))


class Stream(NamedTuple):
    """What is published."""

    messages: list[bytes]
    blocks: int
    prompts: list[list[int]]
    """Some of the texts, all of whose blocks are told."""


def make_stream(shape: Shape, blocks: int) -> Stream:
    """New prompts of 2048 tokens, one after another, until there are so many blocks."""
    generator, rng = np.random.default_rng(5), random.Random(5)
    encode = msgspec.msgpack.Encoder().encode
    messages, prompts, told = [], [], 0
    while told < blocks:
        tokens = generator.integers(0, VOCABULARY, PROMPT_TOKENS).tolist()
        parent: int | None = None
        events: list[Any] = []
        for begin in range(0, PROMPT_TOKENS, shape.blocks * BLOCK):
            hashes = [rng.getrandbits(64) for _ in range(shape.blocks)]
            events.append(_event(shape, hashes, parent, tokens[begin : begin + shape.blocks * BLOCK]))
            parent = hashes[-1]
            told += shape.blocks
        messages += [
            encode([time.time(), events[i : i + shape.events], 0]) for i in range(0, len(events), shape.events)
        ]
        prompts.append(tokens)
    return Stream(messages, told, [prompts[0], prompts[len(prompts) // 2], prompts[-1]])


def _event(shape: Shape, hashes: list[int], parent: int | None, tokens: list[int]) -> Any:
    if not shape.maps:
        return ["BlockStored", hashes, parent, tokens, BLOCK, None, "GPU"]
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


class Service(NamedTuple):
    """An indexer that runs."""

    process: subprocess.Popen[bytes]
    port: int
    match_endpoint: str | None

    def cpu_s(self) -> float:
        """Processor seconds of all threads so far; see clock_getcpuclockid(3) for the number."""
        return time.clock_gettime(~self.process.pid << 3 | 2)

    def resident_bytes(self) -> int:
        """Memory in RAM."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * resource.getpagesize()

    def post(self, path: str, body: object) -> Any:
        """The answer to one HTTP request."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_S)) as connection:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            content = response.read()
        if response.status >= 400:
            raise RuntimeError(f"{path} is answered {response.status}: {content[:300]!r}")
        return json.loads(content)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def kvmesh_indexer(endpoint: str, core: int) -> Iterator[Service]:
    """``kvmesh indexer`` following the endpoint."""
    port, match = _free_port(), f"tcp://127.0.0.1:{_free_port()}"
    command = [sys.executable, "-m", "kvmesh.cli.main", "indexer", "--port", str(port), "--match-endpoint", match]
    with _running([*command, "--log-level", "warning"], port, core, match) as service:
        service.post("/register", {"endpoint": endpoint, "instance_id": "1", "modelname": MODEL})
        yield service


@contextmanager
def dynamo_indexer(python: Path, endpoint: str, core: int) -> Iterator[Service]:
    """``python -m dynamo.indexer`` following the endpoint."""
    port = _free_port()
    command = [str(python), "-m", "dynamo.indexer", "--block-size", str(BLOCK), "--port", str(port)]
    with _running([*command, "--threads", "1", "--workers", f"1={endpoint}"], port, core, None) as service:
        yield service


@contextmanager
def _running(command: Sequence[str], port: int, core: int, match: str | None) -> Iterator[Service]:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env={**os.environ, "DYN_LOG": "error"},
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
        try:
            ends_s = time.monotonic() + START_S
            while not _answers(port):
                if process.poll() is not None or time.monotonic() > ends_s:
                    log.seek(0)
                    raise RuntimeError(f"{command} does not start: {log.read()[-2000:].decode(errors='replace')}")
                time.sleep(0.05)
            yield Service(process, port, match)
        finally:
            process.terminate()
            process.wait()


def _answers(port: int) -> bool:
    try:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
    except OSError:
        return False


def matched_tokens(answer: Any) -> int:
    """Of an answer of either project's ``/query``: what the best worker holds."""
    if "scores" in answer:
        return max((tokens for ranks in answer["scores"].values() for tokens in ranks.values()), default=0)
    found = [entry["longest_matched"] for instances in answer.values() for entry in instances.values()]
    return max(found, default=0)


def _settled(service: Service, complete: Callable[[], bool]) -> tuple[float, int]:
    """Processor seconds and memory once everything published is in."""
    ends_s = time.monotonic() + ARRIVE_S
    last_s, since_s = service.cpu_s(), time.monotonic()
    while time.monotonic() < ends_s:
        time.sleep(0.05)
        now_s = service.cpu_s()
        if now_s - last_s > QUIET_CPU_S:
            last_s, since_s = now_s, time.monotonic()
        elif time.monotonic() - since_s > QUIET_S:
            memory = service.resident_bytes()
            if complete():
                return now_s, memory
            last_s, since_s = service.cpu_s(), time.monotonic()
    raise RuntimeError("not everything published has arrived")


def measure(
    start: Callable[[str], Any], stream: Stream, question: Callable[[list[int]], dict[str, Any]]
) -> dict[str, float]:
    """One process from its start to its end: events in, then questions."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publisher = context.socket(zmq.XPUB)
    publisher.sndhwm = 0
    try:
        endpoint = f"tcp://127.0.0.1:{publisher.bind_to_random_port('tcp://127.0.0.1')}"
        with start(endpoint) as service:
            if not publisher.poll(START_S * 1000):
                raise RuntimeError("nobody has subscribed")
            publisher.recv()
            _settled(service, lambda: True)
            cpu_s, memory = service.cpu_s(), service.resident_bytes()
            for number, message in enumerate(stream.messages):
                publisher.send_multipart((b"kv-events", number.to_bytes(8, "big"), message))

            def complete() -> bool:
                answers = [service.post("/query", question(tokens)) for tokens in stream.prompts]
                return all(matched_tokens(answer) == PROMPT_TOKENS for answer in answers)

            after_s, grown = _settled(service, complete)
            result = {
                "block_us": (after_s - cpu_s) / stream.blocks * 1e6,
                "message_us": (after_s - cpu_s) / len(stream.messages) * 1e6,
                "bytes_per_block": (grown - memory) / stream.blocks,
            }
            body = json.dumps(question(stream.prompts[1])).encode()
            result |= _asked(service, "http", HTTP_QUERIES, lambda count: http_latencies(service.port, body, count))
            if (match := service.match_endpoint) is not None:
                ids = stream.prompts[1]
                result |= _asked(service, "match", MATCH_QUERIES, lambda n: match_latencies(context, match, ids, n))
            return result
    finally:
        publisher.close(linger=0)
        context.term()


def _asked(service: Service, name: str, count: int, ask: Callable[[int], list[float]]) -> dict[str, float]:
    ask(count // 20)
    begin = service.cpu_s()
    latencies = ask(count)
    spent = service.cpu_s() - begin
    return {f"{name}_query_us": spent / count * 1e6, f"{name}_p50_us": statistics.median(latencies) * 1e6}


def http_latencies(port: int, body: bytes, count: int) -> list[float]:
    """Seconds of each ``POST /query``, one after another on one connection."""
    head = f"POST /query HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    request = head.encode() + body
    took = []
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(count):
            begin = time.perf_counter()
            connection.sendall(request)
            answer = connection.recv(1 << 16)
            while b"\r\n\r\n" not in answer:
                answer += connection.recv(1 << 16)
            header, _, content = answer.partition(b"\r\n\r\n")
            if not header.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"/query is answered {answer[:300]!r}")
            length = int(header.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            while len(content) < length:
                content += connection.recv(1 << 16)
            took.append(time.perf_counter() - begin)
    return took


def match_latencies(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, ids: list[int], count: int) -> list[float]:
    """Seconds of each question on the match socket, one after another."""
    encode = msgspec.msgpack.Encoder().encode
    decode = msgspec.msgpack.Decoder(MatchReply).decode
    tokens = np.array(ids, "<i4").tobytes()
    took = []
    with context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.rcvtimeo = int(START_S * 1000)
        dealer.connect(endpoint)
        for number in range(count):
            begin = time.perf_counter()
            dealer.send(encode(MatchRequest(id=number, model=MODEL, token_ids=tokens)))
            reply = decode(dealer.recv())
            took.append(time.perf_counter() - begin)
            if reply.id != number or reply.matches[0].device_tokens != len(ids):
                raise RuntimeError(f"question {number} is answered {reply}")
    return took


def compare_paths(
    shape: Shape, dynamo_python: Path, *, blocks: int, rounds: int, core: int
) -> dict[str, dict[str, list[float]]]:
    """Both sides' figures by round, sides in random order."""
    stream = make_stream(shape, blocks)
    sides: dict[str, Callable[[], dict[str, float]]] = {
        "kvmesh": lambda: measure(
            lambda endpoint: kvmesh_indexer(endpoint, core), stream, lambda ids: {"model": MODEL, "token_ids": ids}
        ),
        "dynamo": lambda: measure(
            lambda endpoint: dynamo_indexer(dynamo_python, endpoint, core),
            stream,
            lambda ids: {"model_name": MODEL, "token_ids": ids},
        ),
    }
    taken: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
    for _ in range(rounds):
        for name in random.sample(list(sides), len(sides)):
            for key, value in sides[name]().items():
                taken[name].setdefault(key, []).append(value)
    return taken


def path_ratios(taken: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    """Medians over rounds."""
    ours, theirs = taken["kvmesh"], taken["dynamo"]

    def ratio(one: list[float], other: list[float]) -> float:
        return statistics.median(a / b for a, b in zip(one, other, strict=True))

    return {
        "ingest_cpu": ratio(theirs["block_us"], ours["block_us"]),
        "ingest_memory": ratio(ours["bytes_per_block"], theirs["bytes_per_block"]),
        "query_match_cpu": ratio(theirs["http_query_us"], ours["match_query_us"]),
        "query_http_cpu": ratio(ours["http_query_us"], theirs["http_query_us"]),
    }
