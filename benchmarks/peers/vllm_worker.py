"""vLLM's cache manager and event publisher as a worker that takes commands; started under vLLM's interpreter.

    python benchmarks/peers/vllm_worker.py SOURCES ENDPOINT REPLAY_ENDPOINT [TOPIC]

Blocks, hashes, events, their encoding and the sockets are vLLM's own (see vllm_cache_manager.py); nothing computes.
The first line on stdout has the endpoints; then one line answers each command on stdin, both JSON:

    {"run": [TOKEN...], "salt": TEXT|null}     a request comes and ends; answers with the tokens that it found
    {"find": [TOKEN...], "salt": TEXT|null}    how many leading tokens a request would find
    {"clear": true}                            the prefix cache is emptied
    {"decode": HEX}                            a payload as vLLM's typed decoder reads it, null if it does not
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm_cache_manager import Placeholders, Request

BLOCK = 4
NUM_BLOCKS = 48
"""Few, so that blocks are evicted."""


class Worker:
    """One rank."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str) -> None:
        utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
        interface = importlib.import_module("vllm.v1.kv_cache_interface")
        manager = importlib.import_module("vllm.v1.core.kv_cache_manager")
        self._events = importlib.import_module("vllm.distributed.kv_events")
        importlib.import_module("vllm.envs").VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES = True
        hash_function = importlib.import_module("vllm.utils.hashing").sha256
        utils.init_none_hash(hash_function)
        spec = interface.FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype="float16")
        config = interface.KVCacheConfig(
            num_blocks=NUM_BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[interface.KVCacheGroupSpec(["layer"], spec)],
        )
        self._manager = manager.KVCacheManager(
            config,
            max_model_len=200_000,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
            enable_caching=True,
            enable_kv_cache_events=True,
        )
        self._hasher = utils.get_request_block_hasher(BLOCK, hash_function)
        self._decode = importlib.import_module("msgspec").msgpack.Decoder(self._events.KVEventBatch).decode
        self._publisher = self._events.ZmqEventPublisher(0, endpoint, replay_endpoint, topic=topic)
        self._count = 0

    def endpoints(self) -> dict[str, str]:
        """Where it publishes and answers, with the ports that the system chose."""
        zmq = importlib.import_module("zmq")
        sockets = {"endpoint": vars(self._publisher)["_pub"], "replay_endpoint": vars(self._publisher)["_replay"]}
        return {name: socket.getsockopt_string(zmq.LAST_ENDPOINT) for name, socket in sockets.items()}

    def answer(self, command: dict[str, Any]) -> Any:
        """Carry one command out."""
        if "decode" in command:
            return self._decoded(bytes.fromhex(command["decode"]))
        if "clear" in command:
            self._manager.reset_prefix_cache()
            self._publish()
            return True
        request = self._request(command.get("run", command.get("find")), command.get("salt"))
        blocks, found, _ = self._manager.get_computed_blocks(request)
        if "run" in command:
            if self._manager.allocate_slots(request, request.num_tokens - found, found, blocks) is None:
                raise RuntimeError("the manager has no room")
            request.num_computed_tokens = request.num_tokens
            self._manager.free(request)
        self._publish()
        return found

    def _request(self, token_ids: list[int], salt: str | None) -> Request:
        self._count += 1
        request = Request(f"request-{self._count}", token_ids)
        request.cache_salt = salt
        request.block_hashes = self._hasher(request)
        return request

    def _publish(self) -> None:
        events = self._manager.take_events()
        if events:
            self._publisher.publish(self._events.KVEventBatch(ts=time.time(), events=events))

    def _decoded(self, payload: bytes) -> Any:
        msgspec = importlib.import_module("msgspec")
        try:
            batch = self._decode(payload)
        except msgspec.ValidationError:
            return None
        return [{"type": type(event).__name__} | msgspec.structs.asdict(event) for event in batch.events]


def main() -> None:
    sources, endpoint, replay_endpoint, *topic = sys.argv[1:]
    sys.path.insert(0, sources)
    sys.meta_path.insert(0, Placeholders(Path(sources)))
    worker = Worker(endpoint, replay_endpoint, *(topic or [""]))
    print(json.dumps(worker.endpoints()), flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
