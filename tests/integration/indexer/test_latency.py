"""The router's question over its socket, timed; figures are printed, never asserted."""

from __future__ import annotations

import time

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import zmq

from kvmesh.config import IndexerSettings
from kvmesh.events.index import Source
from kvmesh.events.records import Stored
from kvmesh.indexer.app import IndexerService
from kvmesh.net.service import serving
from kvmesh.protocol.match import MatchReply, MatchRequest

BLOCK = 32
PROMPT_TOKENS = 2048
WORKERS = 8
QUESTIONS = 300


def ask(endpoint: str, prompt: np.ndarray) -> list[float]:
    """Seconds that each of many questions took, asked one after the other from a thread of its own."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.rcvtimeo = 5000
    socket.connect(endpoint)
    took = []
    try:
        for number in range(QUESTIONS):
            started = time.perf_counter()
            request = MatchRequest(id=number, model="m", token_ids=prompt.tobytes())
            socket.send(msgspec.msgpack.encode(request))
            reply = msgspec.msgpack.decode(socket.recv(), type=MatchReply)
            took.append(time.perf_counter() - started)
            assert reply.id == number
            assert len(reply.matches) == WORKERS
    finally:
        socket.close()
        context.term()
    return took


async def test_match_latency() -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 49_000, PROMPT_TOKENS, dtype=np.int32)
    service = IndexerService(IndexerSettings(match_endpoint="tcp://127.0.0.1:*", drain_s=1))
    async with serving(service):
        blocks = PROMPT_TOKENS // BLOCK
        for worker in range(WORKERS):
            source = Source(f"w{worker}")
            service.index.add(source, model="m")
            count = blocks * (worker + 1) // WORKERS
            record = Stored(
                hashes=list(range(1, count + 1)), parent=None, token_ids=prompt[: count * BLOCK], block_size=BLOCK
            )
            service.index.apply(source, [record])
        took = await anyio.to_thread.run_sync(ask, service.matching.endpoint, prompt)
    p50, p99 = np.percentile(took, [50, 99]) * 1e6
    print(f"match of {PROMPT_TOKENS} tokens over ZMQ, {WORKERS} workers: p50 {p50:.0f} us, p99 {p99:.0f} us")
