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
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
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
QUERIES = 4000
AT_ONCE = (1, 16)
"""Questions under way."""
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
            if not publisher.poll(int(START_S * 1000)):
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
            body, ids = json.dumps(question(stream.prompts[1])).encode(), stream.prompts[1]
            for at_once in AT_ONCE:
                result |= _asked(service, f"http_{at_once}", ask_http(service.port, body, at_once))
                if service.match_endpoint is not None:
                    result |= _asked(
                        service, f"match_{at_once}", ask_match(context, service.match_endpoint, ids, at_once)
                    )
            return result
    finally:
        publisher.close(linger=0)
        context.term()


def _asked(service: Service, name: str, ask: Callable[[int], list[float]]) -> dict[str, float]:
    ask(QUERIES // 20)
    begin = service.cpu_s()
    latencies = ask(QUERIES)
    spent = service.cpu_s() - begin
    return {f"{name}_us": spent / QUERIES * 1e6, f"{name}_p50_us": statistics.median(latencies) * 1e6}


class _Connection:
    """One that always waits for the answer to one ``POST /query``."""

    def __init__(self, port: int, body: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=START_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = (
            f"POST /query HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._request = head.encode() + body
        self._answer = b""
        self.asked_s = 0.0

    def ask(self) -> None:
        """Send it."""
        self.asked_s = time.perf_counter()
        self.socket.sendall(self._request)

    def answered(self) -> bool:
        """Read what has come; whether that completes the answer."""
        self._answer += self.socket.recv(1 << 16)
        header, blank, content = self._answer.partition(b"\r\n\r\n")
        if not blank or len(content) < int(header.lower().split(b"content-length:")[1].split(b"\r\n")[0]):
            return False
        if not header.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"/query is answered {self._answer[:300]!r}")
        self._answer = b""
        return True


def ask_http(port: int, body: bytes, at_once: int) -> Callable[[int], list[float]]:
    """A function that asks a number of times, on so many connections, and gives the seconds of each."""

    def ask(count: int) -> list[float]:
        took: list[float] = []
        with selectors.DefaultSelector() as ready, ExitStack() as stack:
            for _ in range(at_once):
                connection = _Connection(port, body)
                stack.enter_context(connection.socket)
                ready.register(connection.socket, selectors.EVENT_READ, connection)
                connection.ask()
            while len(took) < count:
                for key, _events in ready.select(START_S):
                    if key.data.answered():
                        took.append(time.perf_counter() - key.data.asked_s)
                        key.data.ask()
        return took

    return ask


def ask_match(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, ids: list[int], at_once: int
) -> Callable[[int], list[float]]:
    """As :func:`ask_http` on the match socket; one socket has so many questions under way."""
    encode = msgspec.msgpack.Encoder().encode
    decode = msgspec.msgpack.Decoder(MatchReply).decode
    tokens = np.array(ids, "<i4").tobytes()

    def ask(count: int) -> list[float]:
        took: list[float] = []
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.rcvtimeo = int(START_S * 1000)
            dealer.connect(endpoint)
            asked_s: dict[int, float] = {}
            for number in range(count):
                asked_s[number] = time.perf_counter()
                dealer.send(encode(MatchRequest(id=number, model=MODEL, token_ids=tokens)))
                while len(asked_s) >= at_once:
                    reply = decode(dealer.recv())
                    took.append(time.perf_counter() - asked_s.pop(reply.id))
                    if reply.matches[0].device_tokens != len(ids):
                        raise RuntimeError(f"a question is answered {reply}")
        return took

    return ask


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
        **{f"query_match_cpu_{n}": ratio(theirs[f"http_{n}_us"], ours[f"match_{n}_us"]) for n in AT_ONCE},
        **{f"query_http_cpu_{n}": ratio(ours[f"http_{n}_us"], theirs[f"http_{n}_us"]) for n in AT_ONCE},
    }
