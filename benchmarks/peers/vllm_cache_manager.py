"""vLLM's KV cache manager on the workload of benchmarks/cache_manager.py, which starts this under vLLM's interpreter.

Only the modules that manage blocks, hash them and make events are vLLM's own. They import much that a CPU without
torch cannot, and call none of it on this path; all of that is replaced by placeholders. One JSON line for the set-up,
then one round for each line on stdin: per request the CPU nanoseconds of each phase.

    python benchmarks/peers/vllm_cache_manager.py SOURCES '{"seed": 1, ...}'
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import random
import sys
import time
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

MEASURED = {
    "vllm.distributed.kv_events",
    "vllm.utils.hashing",
    "vllm.utils.math_utils",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_cache_layout",
    "vllm.v1.kv_cache_spec_registry",
}
"""Modules that are executed as they are, besides every one of vllm.v1.core."""


class PlaceholderType(type):
    """Classes that can stand for anything that code names while it is imported."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return placeholder(name)

    def __getitem__(cls, _item: object) -> Any:
        return cls

    def __or__(cls, _other: object) -> Any:
        return cls

    __ror__ = __or__


def placeholder(name: str) -> Any:
    """A class that serves as base class, annotation, constant, or decorator with arguments or without."""

    def construct(cls: type, *args: Any, **_named: Any) -> Any:
        return args[0] if args and callable(args[0]) else object.__new__(cls)

    def call(_self: object, *args: Any, **_named: Any) -> Any:
        return args[0] if args else None

    return PlaceholderType(name, (), {"__new__": construct, "__init__": lambda *_, **__: None, "__call__": call})


class PlaceholderModule(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = placeholder(name)
        setattr(self, name, value)
        return value


class Placeholders(MetaPathFinder, Loader):
    """Answers imports of vLLM and torch that are not measured."""

    def __init__(self, sources: Path) -> None:
        self._sources = sources

    def find_spec(self, fullname: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        """A placeholder, or None for the modules that are measured and those of other packages."""
        if fullname.partition(".")[0] not in {"vllm", "torch", "transformers"}:
            return None
        if fullname in MEASURED or fullname.startswith("vllm.v1.core."):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty module; below a package of vLLM, its real submodules can be found."""
        module = PlaceholderModule(spec.name)
        folder = self._sources.joinpath(*spec.name.split("."))
        spec.submodule_search_locations = [str(folder)] if folder.is_dir() else []
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give what is called, not only named, a meaning."""
        if module.__name__ == "vllm.logger":
            vars(module)["init_logger"] = quiet_logger
        elif module.__name__ == "vllm.multimodal.utils":
            vars(module)["get_mm_features_in_window"] = lambda *_: (0, 0)
        elif module.__name__ == "vllm.utils.torch_utils":
            vars(module)["get_dtype_size"] = lambda _dtype: 2


def quiet_logger(name: str) -> Any:
    logger = logging.getLogger(name)
    logger.setLevel(logging.CRITICAL)
    vars(logger).update(dict.fromkeys(("warning_once", "info_once", "debug_once"), lambda *_, **__: None))
    return logger


class Request:
    """What the manager reads of a request for text without adapters."""

    mm_features: tuple[()] = ()
    lora_request = cache_salt = prompt_embeds = session_id = status = None
    skip_reading_prefix_cache = False
    num_computed_tokens = num_preemptions = num_output_tokens = num_in_flight_tokens = shared_prefix_boundary = 0
    num_output_placeholders = 0

    def __init__(self, request_id: str, token_ids: list[int]) -> None:
        self.request_id = request_id
        self.prompt_token_ids = self.all_token_ids = self._all_token_ids = token_ids
        self.num_tokens = self.num_prompt_tokens = len(token_ids)
        self.block_hashes: list[Any] = []


class Contender:
    """The manager and what it needs, with KV events on and SHA-256 block hashes, vLLM's default."""

    def __init__(self) -> None:
        self._utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
        self._interface = importlib.import_module("vllm.v1.kv_cache_interface")
        self._manager = importlib.import_module("vllm.v1.core.kv_cache_manager")
        self._events = importlib.import_module("vllm.distributed.kv_events")
        self._hash = importlib.import_module("vllm.utils.hashing").sha256
        self._encode = importlib.import_module("msgspec").msgpack.Encoder().encode
        self._utils.init_none_hash(self._hash)

    def round(self, work: SimpleNamespace) -> tuple[list[list[int]], int]:
        """Nanoseconds by request and phase (hash, match, allocate, commit, free, events), and the tokens that hit."""
        interface, block = self._interface, work.tokens_per_block
        spec = interface.FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=1, dtype="float16")
        config = interface.KVCacheConfig(
            num_blocks=work.num_pages,
            kv_cache_tensors=[],
            kv_cache_groups=[interface.KVCacheGroupSpec(["layer"], spec)],
        )
        manager = self._manager.KVCacheManager(
            config,
            max_model_len=200_000,
            scheduler_block_size=block,
            hash_block_size=block,
            enable_caching=True,
            enable_kv_cache_events=True,
        )
        hasher = self._utils.get_request_block_hasher(block, self._hash)
        rng = random.Random(work.seed)
        half = work.prompt_tokens // 2
        shared = [[rng.randrange(work.vocabulary) for _ in range(half)] for _ in range(work.num_shared)]
        clock = time.process_time_ns
        rows, hits = [], 0
        for number in range(work.requests):
            tail = [rng.randrange(work.vocabulary) for _ in range(work.prompt_tokens - half)]
            request = Request(f"request-{number}", shared[number % work.num_shared] + tail)
            begin = clock()
            request.block_hashes = hasher(request)
            hashed = clock()
            blocks, found, _ = manager.get_computed_blocks(request)
            matched = clock()
            if manager.allocate_slots(request, request.num_tokens - found, found, blocks) is None:
                raise RuntimeError("vLLM's manager has no room")
            allocated = clock()  # committed, too: one call does both
            request.num_computed_tokens = request.num_tokens
            manager.free(request)
            freed = clock()
            self._encode(self._events.KVEventBatch(ts=0.0, events=manager.take_events()))
            told = clock()
            hits += found
            rows.append([hashed - begin, matched - hashed, allocated - matched, 0, freed - allocated, told - freed])
        return rows, hits


def main() -> None:
    sources, work = Path(sys.argv[1]), SimpleNamespace(**json.loads(sys.argv[2]))
    sys.path.insert(0, str(sources))
    sys.meta_path.insert(0, Placeholders(sources))
    contender = Contender()
    gc.disable()
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        rows, hits = contender.round(work)
        gc.collect()
        print(json.dumps({"rows": rows, "hit_tokens": hits}), flush=True)


if __name__ == "__main__":
    main()
