"""Real peers: vLLM's manager, encoder and sockets are read by us; ours by vLLM's decoder and Dynamo's indexer.

They run under interpreters of their own (``make peers``). Nothing is compared with what we believe of them: each answer
is one that the peer itself gave.
"""

from __future__ import annotations

import http.client
import http.server
import json
import random
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any

import anyio
import numpy as np
import pytest
import zmq
from peers import PEER_SCRIPTS, JsonProcess, needs_peer, peer_path, peer_python

from kvmesh.events.decoding import decode_batch
from kvmesh.events.encoding import encode_batch
from kvmesh.events.index import PrefixIndex, Source
from kvmesh.events.items import Batch, Item, Reset
from kvmesh.events.listener import Admission, EventListener, StreamName
from kvmesh.events.publisher import ZmqPublisher
from kvmesh.events.records import Cleared, Removed
from kvmesh.events.subscriber import EventSubscriber
from kvmesh.events.topics import PodTopic
from kvmesh.hashing import local_hashes, sequence_hashes
from kvmesh.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KvEvent

BLOCK = 4
SOURCE = Source("worker")

needs_vllm = needs_peer("vllm_env")
needs_dynamo = needs_peer("dyn")


class Reader:
    """An index that is fed by one publisher."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.index.add(SOURCE, model="m")
        self.batches = 0
        self.resets: list[str] = []

    def take(self, item: Item) -> None:
        match item:
            case Batch():
                self.index.apply(SOURCE, item.records.records)
                self.batches += 1
            case Reset():
                self.resets.append(item.reason)
                self.index.clear(SOURCE)

    def device_tokens(self, token_ids: list[int], salt: str | None = None) -> int:
        matches = self.index.match(np.array(token_ids, np.int32), model="m", cache_salt=salt)
        return max((match.device_tokens for match in matches), default=0)

    async def until_device_tokens(self, expected: int, token_ids: list[int], salt: str | None = None) -> None:
        with anyio.move_on_after(10):
            while self.device_tokens(token_ids, salt) != expected:  # noqa: ASYNC110 - what is waited for has no event
                await anyio.sleep(0.01)
        assert self.device_tokens(token_ids, salt) == expected


@asynccontextmanager
async def running(run: Callable[[zmq.Context[zmq.Socket[bytes]]], Any]) -> AsyncIterator[None]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, context)
            yield
            tasks.cancel_scope.cancel()
    finally:
        context.term()


@contextmanager
def vllm_worker(endpoint: str, replay_endpoint: str = "tcp://127.0.0.1:*", topic: str = "") -> Iterator[Any]:
    command = [peer_python("vllm_env"), PEER_SCRIPTS / "vllm_worker.py", peer_path("vllm_src")]
    with JsonProcess(*command, endpoint, replay_endpoint, topic) as worker:
        worker.endpoints = worker.read()
        yield worker


def prompts(seed: int, count: int = 30) -> Iterator[tuple[list[int], str | None]]:
    """Prompts that share beginnings, some of them salted: more than vLLM's few blocks can hold."""
    rng = random.Random(seed)
    stems = [[rng.randrange(1000) for _ in range(rng.randrange(8, 20))] for _ in range(4)]
    for _ in range(count):
        stem = rng.choice(stems)
        tail = [rng.randrange(1000) for _ in range(rng.randrange(12))]
        yield stem[: rng.randrange(4, len(stem) + 1)] + tail, rng.choice([None, None, "tenant-a", "tenant-b"])


async def compare(worker: Any, reader: Reader, seen: list[tuple[list[int], str | None]]) -> int:
    """What the index says of every prompt is what vLLM's manager itself would find."""
    total = 0
    for token_ids, salt in seen:
        # vLLM never counts the block of the last token, which it has to compute in any case.
        found = worker.ask(find=[*token_ids, 1], salt=salt)
        await reader.until_device_tokens(found, token_ids, salt)
        total += found
    return total


@needs_vllm
async def test_the_index_knows_what_vllm_would_find() -> None:
    """vLLM's manager evicts, its encoder writes, its publisher sends and replays; we connect to it late."""
    reader = Reader()
    with vllm_worker("tcp://127.0.0.1:*") as worker:
        seen = list(prompts(1))
        for token_ids, salt in seen[:10]:
            worker.ask(run=token_ids, salt=salt)
        subscriber: Any = None

        async def follow(context: Any) -> None:
            nonlocal subscriber
            subscriber = EventSubscriber(
                worker.endpoints["endpoint"], worker.endpoints["replay_endpoint"], context=context
            )
            await subscriber.run(reader.take)

        async with running(follow):
            assert await compare(worker, reader, seen[:10]) > 0
            for token_ids, salt in seen[10:]:
                worker.ask(run=token_ids, salt=salt)
            assert await compare(worker, reader, seen) > 0
            worker.ask(clear=True)
            assert await compare(worker, reader, seen) == 0
            assert subscriber.rejected == {}
            assert set(subscriber.dialects) == {"map"}
            assert reader.resets == []


@needs_vllm
async def test_vllm_connects_to_us_and_is_known_by_its_topic() -> None:
    """Its endpoint has no ``*``, so it connects; llm-d's topic says which pod it is, and where its replays are."""
    reader = Reader()
    admitted: list[PodTopic | None] = []
    replay: list[str] = []

    def admit(name: StreamName) -> Admission:
        admitted.append(PodTopic.parse(name.topic))
        return Admission(reader.take, replay[0])

    listener: Any = None

    async def listen(context: Any) -> None:
        nonlocal listener
        listener = EventListener("tcp://127.0.0.1:*", admit, context=context, topic="kv@")
        await listener.run()

    async with running(listen):
        with anyio.fail_after(5):
            while listener is None or not listener.bound_endpoint:  # noqa: ASYNC110 - it has no event
                await anyio.sleep(0.01)
        with vllm_worker(listener.bound_endpoint, topic="kv@127.0.0.1:8000@org/model") as worker:
            replay.append(worker.endpoints["replay_endpoint"])
            seen = list(prompts(2, count=15))
            for token_ids, salt in seen:
                worker.ask(run=token_ids, salt=salt)
            with anyio.fail_after(10):
                while not reader.batches:  # what it sent before it was connected is only in its replays
                    worker.ask(run=list(range(8)))
                    worker.ask(clear=True)
                    await anyio.sleep(0.05)
            for token_ids, salt in seen:
                worker.ask(run=token_ids, salt=salt)
            assert await compare(worker, reader, seen) > 0
            assert admitted == [PodTopic("127.0.0.1:8000", "org/model")]


OURS: list[KvEvent] = [
    BlockStored(
        block_hashes=[2**64 - 1, 7],
        parent_block_hash=2**63,
        token_ids=[1, 70_000, 3, 4, 5, 6, 7, 8],
        block_size=BLOCK,
        lora_name="sql",
        extra_keys=[["salt"], None],
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    ),
    BlockStored(block_hashes=[7], parent_block_hash=None, token_ids=[], block_size=BLOCK, lora_id=3, medium="CPU"),
    BlockRemoved(block_hashes=[7], medium="CPU", group_idx=0),
    AllBlocksCleared(),
]


@needs_vllm
def test_vllm_decodes_what_we_write() -> None:
    with vllm_worker("tcp://127.0.0.1:*") as worker:
        decoded = worker.ask(decode=encode_batch(EventBatch(1.5, OURS, 0), "map").hex())
        array = worker.ask(decode=encode_batch(EventBatch(1.5, OURS, 0), "array").hex())
    stored, moved, removed, cleared = decoded
    assert [event["type"] for event in decoded] == ["BlockStored", "BlockStored", "BlockRemoved", "AllBlocksCleared"]
    assert (stored["block_hashes"], stored["parent_block_hash"]) == ([2**64 - 1, 7], 2**63)
    assert (stored["token_ids"], stored["block_size"]) == ([1, 70_000, 3, 4, 5, 6, 7, 8], BLOCK)
    assert (stored["lora_name"], stored["extra_keys"]) == ("sql", [["salt"], None])
    assert (stored["group_idx"], stored["kv_cache_spec_kind"], stored["medium"]) == (0, "full_attention", "GPU")
    assert (moved["token_ids"], moved["medium"], moved["lora_id"]) == ([], "CPU", 3)
    assert (removed["block_hashes"], removed["medium"], removed["group_idx"]) == ([7], "CPU", 0)
    assert set(cleared) == {"type"}
    assert array is None, "vLLM of today reads maps alone, which is why they are the default"


class Engine:
    """Stores chains, removes whole subtrees, clears now and then; says so in our events."""

    def __init__(self, seed: int, *, uniform: bool = False) -> None:
        self.rng = random.Random(seed)
        self._uniform = uniform
        self.held: dict[tuple[int, ...], int] = {}
        self.ever: list[tuple[int, ...]] = []

    def step(self) -> list[KvEvent]:
        rng, action = self.rng, self.rng.random()
        if action < 0.02:
            self.held.clear()
            return [AllBlocksCleared()]
        if action < 0.3 and self.held:
            root = rng.choice(list(self.held))
            gone = sorted((chain for chain in self.held if chain[: len(root)] == root), key=len, reverse=True)
            return [BlockRemoved(block_hashes=[self.held.pop(chain) for chain in gone])]
        parent = rng.choice([(), *self.held])
        chain, hashes, blocks = parent, [], []
        for _ in range(rng.randrange(1, 5)):
            chain = (*chain, rng.randrange(3))
            if chain in self.held:
                break
            self.held[chain] = prefix_hash(chain) if self._uniform else rng.randrange(1, 2**64 - 1)
            hashes.append(self.held[chain])
            blocks.append(chain[-1])
        if not hashes:
            return []
        self.ever.append(chain)
        return [
            BlockStored(
                block_hashes=hashes,
                parent_block_hash=self.held[parent] if parent else None,
                token_ids=tokens(tuple(blocks)),
                block_size=BLOCK,
            )
        ]


def tokens(chain: tuple[int, ...]) -> list[int]:
    return [1000 * block + place for block in chain for place in range(BLOCK)]


def prefix_hash(chain: tuple[int, ...]) -> int:
    return int(sequence_hashes(local_hashes(np.array(tokens(chain), np.int32), BLOCK))[-1])


def free_ports(count: int) -> list[int]:
    """For peers that cannot be told to choose a port themselves."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@contextmanager
def http_peer(*command: object) -> Iterator[Callable[..., Any]]:
    """A process that serves HTTP at the port put in for ``{0}``, and a function that calls it."""
    ports = free_ports(2)
    words = [str(word).format(*ports) for word in command]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def call(method: str, path: str, body: object = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", ports[0], timeout=10)
        try:
            connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            assert answer.status < 300, text
            return json.loads(text) if text.startswith((b"{", b"[")) else text
        finally:
            connection.close()

    try:
        deadline_s = time.monotonic() + 60
        while True:
            try:
                call("GET", "/health")
                break
            except (OSError, AssertionError):
                assert process.poll() is None, f"{words[0]} has ended"
                assert time.monotonic() < deadline_s, f"{words[0]} does not answer"
                time.sleep(0.1)
        yield call
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)


@needs_dynamo
@pytest.mark.parametrize("encoding", ["map", "array"])
async def test_dynamos_indexer_gives_the_scores_of_our_index(encoding: Any) -> None:
    """It reads our stream and our replays over its own sockets; both encodings, hashes of all 64 bits."""
    engine, reader = Engine(3), Reader()
    publisher = ZmqPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", encoding=encoding)
    publisher.start()
    try:
        with http_peer(peer_python("dyn"), "-m", "dynamo.indexer", "--port", "{0}", "--threads", "1") as call:
            for _ in range(20):  # before anybody listens: only a replay has it
                publisher.publish(engine.step())
            registration = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
            worker = {"instance_id": 7, "model_name": "m", "block_size": BLOCK, "dp_rank": 0, "type": "vLLM"}
            await anyio.to_thread.run_sync(call, "POST", "/register", registration | worker)

            async def follow(context: Any) -> None:
                await EventSubscriber(publisher.endpoint, publisher.replay_endpoint, context=context).run(reader.take)

            def scores(chain: tuple[int, ...]) -> int:
                body = {"model_name": "m", "token_ids": tokens(chain)}
                return call("POST", "/query", body)["scores"].get("7", {}).get("0", 0)

            async with running(follow):
                for _ in range(300):
                    publisher.publish(engine.step())
                asked = [*engine.rng.sample(sorted(set(engine.ever)), 60), (9,), (0, 9), ()]
                matched = 0
                for chain in asked:
                    expected = held_tokens(engine, chain)
                    matched += expected
                    await reader.until_device_tokens(expected, tokens(chain))
                    with anyio.move_on_after(60):
                        while await anyio.to_thread.run_sync(scores, chain) != expected:
                            # It asks for a replay when a message shows it that others are missing.
                            publisher.publish([BlockRemoved(block_hashes=[NOBODYS])])
                            await anyio.sleep(0.05)
                    assert scores(chain) == expected
                assert matched > 0
                assert reader.resets == []
    finally:
        publisher.shutdown()


NOBODYS = 2**63 + 5
"""A hash that no block has."""


def held_tokens(engine: Engine, chain: tuple[int, ...]) -> int:
    length = 0
    while length < len(chain) and chain[: length + 1] in engine.held:
        length += 1
    return length * BLOCK


@needs_dynamo
def test_dynamos_tree_fed_with_the_same_events_gives_the_same_answers() -> None:
    """Its tree wants engines to name equal blocks equally; ours would not mind if they did not."""
    index = PrefixIndex()
    engines = {number: Engine(number, uniform=True) for number in range(4)}
    for number in engines:
        index.add(Source(str(number)), model="m")
    with JsonProcess(peer_python("dyn"), PEER_SCRIPTS / "dynamo_tree.py") as dynamo:
        for turn in range(150):
            for number, engine in engines.items():
                events = engine.step()
                if not events:
                    continue
                records = decode_batch(
                    encode_batch(EventBatch(0.0, events, 0), "array" if number % 2 else "map")
                ).records
                index.apply(Source(str(number)), records)
                for record in records:
                    dynamo.ask(worker=number, event={"event_id": turn, "dp_rank": 0, "data": dynamo_form(record)})
        rng = random.Random(5)
        found_any = 0
        for chain in rng.sample(sorted({chain for engine in engines.values() for chain in engine.ever}), 80):
            ids = np.array(tokens(chain), np.int32)
            ours = {match.instance_id: match.device_tokens // BLOCK for match in index.match(ids, model="m")}
            theirs = dynamo.ask(find=local_hashes(ids, BLOCK).tolist())
            assert ours == theirs
            found_any += len(ours)
        assert found_any > 80


def dynamo_form(record: Any) -> object:
    if isinstance(record, Cleared):
        return "cleared"
    if isinstance(record, Removed):
        return {"removed": {"block_hashes": list(record.hashes)}}
    local = local_hashes(record.token_ids, record.block_size).tolist()
    blocks = [{"block_hash": hash_, "tokens_hash": name} for hash_, name in zip(record.hashes, local, strict=True)]
    return {"stored": {"parent_hash": record.parent, "blocks": blocks}}


@needs_dynamo
@pytest.mark.parametrize("eagle", [False, True])
def test_dynamo_names_blocks_as_we_do(eagle: bool) -> None:
    """Its hashes of EAGLE's blocks are of one token more: those that follow are part of a block's identity."""
    ids = np.random.default_rng(1).integers(0, 2**31 - 1, 41, dtype=np.int32)
    if eagle:
        windows = np.concatenate([ids[at : at + BLOCK + 1] for at in range(0, len(ids) - BLOCK, BLOCK)])
        ours = local_hashes(windows, BLOCK + 1)
    else:
        ours = local_hashes(ids, BLOCK)
    with JsonProcess(peer_python("dyn"), PEER_SCRIPTS / "dynamo_tree.py") as dynamo:
        assert dynamo.ask(hash=ids.tolist(), block_size=BLOCK, eagle=eagle) == ours.tolist()


class Backend:
    """An HTTP server that is fine and answers every completion with its name."""

    def __init__(self, name: str) -> None:
        answer = {"id": "x", "object": "text_completion", "model": "m", "choices": [{"index": 0, "text": name}]}

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("content-length") or 0))
                body = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                self.do_GET()

            def log_message(self, *_args: object) -> None:
                """Nothing is logged."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


@needs_peer("vllmr")
def test_vllms_router_goes_by_our_events() -> None:
    """It subscribes to our publishers, has replayed what it missed, and sends each prompt where its blocks are."""
    block = 16
    names = ["a", "b", "c"]
    prompts_of = {name: [1000 * at + token for token in range(block * 8)] for at, name in enumerate(names)}
    with ExitStack() as stack:
        backends = {name: Backend(name) for name in names}
        publishers = {name: ZmqPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*") for name in names}
        for name in names:
            stack.callback(backends[name].close)
            stack.callback(publishers[name].shutdown)
            publishers[name].start()

        def publish(name: str, first_hash: int, token_ids: list[int]) -> None:
            hashes = list(range(first_hash, first_hash + len(token_ids) // block))
            stored = BlockStored(block_hashes=hashes, parent_block_hash=None, token_ids=token_ids, block_size=block)
            publishers[name].publish([stored])

        for name in names:  # before the router is there
            publish(name, 1, prompts_of[name])
        command = [peer_python("vllmr").with_name("vllm-router"), "--host", "127.0.0.1", "--policy", "kv_aware"]
        command += [
            "--port",
            "{0}",
            "--prometheus-port",
            "{1}",
            "--kv-event-block-size",
            block,
            "--kv-event-model",
            "m",
        ]
        command += ["--worker-urls", *(backend.url for backend in backends.values())]
        for name in names:
            command += ["--kv-event-source", f"{backends[name].url}={publishers[name].endpoint}"]
        for name in names:
            command += ["--kv-event-replay-source", f"{backends[name].url}={publishers[name].replay_endpoint}"]
        call = stack.enter_context(http_peer(*command))
        deadline_s = time.monotonic() + 30
        while (sent := [(name, _completion(call, prompts_of[name])) for name in (*names, *reversed(names))]) and any(
            name != answered for name, answered in sent
        ):
            assert time.monotonic() < deadline_s, sent
            for name in names:  # what shows it the gap
                publish(name, 100, [7] * block)
            time.sleep(0.1)
        order = random.Random(1).choices(names, k=30)
        assert [_completion(call, [*prompts_of[name], at]) for at, name in enumerate(order)] == order


def _completion(call: Callable[..., Any], prompt: list[int]) -> str:
    return call("POST", "/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 1})["choices"][0]["text"]
