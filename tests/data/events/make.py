"""Writes the fixtures of this folder: every scenario as each engine puts it on the wire (see README.md).

    python make.py WHEELS

WHEELS holds ``kv_events.py`` of several releases, unpacked from their wheels to ``NAME-VERSION/...``; those files'
classes and encoder write the bytes. What has no such class is put together here from the facts of its format. Needs
msgspec, nothing else.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "support"))

from event_scenarios import BLOCK, SCENARIOS, Event, Removal, Store  # noqa: E402

Write = Callable[[Event], Any]
"""From an event to what msgspec encodes."""


class Placeholders:
    """Imports of a module that are not needed to encode events."""

    ROOTS = ("vllm", "sglang", "zmq", "pydantic")

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        if name.split(".")[0] not in self.ROOTS:
            return None
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        module = ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = self.attribute  # type: ignore[method-assign]
        return module

    def exec_module(self, _module: ModuleType) -> None:
        """There is nothing to run."""

    @staticmethod
    def attribute(name: str) -> Any:
        if name == "ExternalBlockHash":
            return bytes | int
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args, **named: None})


def load(wheels: Path, release: str) -> ModuleType:
    """``kv_events.py`` of one release."""
    path = next(
        path
        for path in (wheels / release).rglob("kv_events.py")
        if path.parent.name in ("distributed", "disaggregation")
    )
    spec = importlib.util.spec_from_file_location(release.replace("-", "_").replace(".", "_"), path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def signed(value: int | None) -> int | None:
    return value if value is None or value < 2**63 else value - 2**64


def digest(value: int | None) -> bytes | None:
    """A 32-byte digest that ends with the hash."""
    return None if value is None else b"\xabdigest of a block " + bytes(5) + value.to_bytes(8, "big")


def plain_tokens(event: Store) -> list[int]:
    return event.tokens[: len(event.hashes) * BLOCK]


def pairs(event: Store) -> list[tuple[int, int]]:
    return list(zip(event.tokens[:-1], event.tokens[1:], strict=True))


def vllm_extra_keys(event: Store) -> list[tuple[Any, ...] | None] | None:
    keys = []
    for number in range(len(event.hashes)):
        items: list[Any] = [event.lora_name] if event.lora_name else []
        items += event.images[number] if event.images else []
        items += [event.salt] if event.salt and number == 0 and event.parent is None else []
        keys.append(tuple(items) or None)
    return keys if any(keys) else None


def vllm(module: ModuleType, *, hashes: str = "unsigned", tiers: dict[str, str] | None = None) -> Write:
    """vLLM's classes of a release, with the fields that they have there."""
    tiers = tiers or {"device": "GPU", "host": "CPU"}
    convert = {"unsigned": lambda value: value, "signed": signed, "bytes": digest}[hashes]
    fields = set(module.BlockStored.__struct_fields__)

    def write(event: Event) -> Any:
        if event is None:
            return module.AllBlocksCleared()
        values: dict[str, Any] = {"block_hashes": [convert(value) for value in event.hashes]}
        if isinstance(event, Removal):
            values |= {"medium": tiers[event.tier], "group_idx": event.group}
            return module.BlockRemoved(**known(module.BlockRemoved, values))
        values |= {
            "parent_block_hash": convert(event.parent),
            "token_ids": plain_tokens(event),
            "block_size": BLOCK,
            "lora_id": event.lora_id,
            "medium": tiers[event.tier],
            "lora_name": event.lora_name,
            "extra_keys": vllm_extra_keys(event),
            "group_idx": event.group,
            "kv_cache_spec_kind": event.kind,
            "kv_cache_spec_sliding_window": 64 if event.kind == "sliding_window" else None,
        }
        if event.lookahead:
            ends = range(BLOCK, len(event.tokens), BLOCK)
            values["lookahead_token_ids"] = [event.tokens[end : end + event.lookahead] for end in ends]
        return module.BlockStored(**{name: value for name, value in values.items() if name in fields})

    return write


def known(struct: Any, values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in struct.__struct_fields__}


def sglang(module: ModuleType) -> Write:
    """SGLang's classes of a release; hashes are signed there."""
    tiers = {"device": "GPU", "host": "CPU_PINNED"}

    def write(event: Event) -> Any:
        if event is None:
            return module.AllBlocksCleared()
        values: dict[str, Any] = {
            "block_hashes": [signed(value) for value in event.hashes],
            "medium": tiers[event.tier],
        }
        if isinstance(event, Removal):
            return module.BlockRemoved(**known(module.BlockRemoved, values))
        values |= {
            "parent_block_hash": signed(event.parent),
            "token_ids": pairs(event) if event.lookahead else event.tokens,
            "block_size": BLOCK,
            "lora_id": event.lora_id,
            "lora_name": event.lora_name,
            "cache_salt": event.salt,
            "session_id": "session-1" if event.salt else None,
        }
        with_metadata = getattr(module, "BlockStoredWithMetadata", None)
        if with_metadata is not None and event.salt is not None:
            metadata = module.BlockStoredMetadata(cache_salt=event.salt)
            return with_metadata(**known(with_metadata, values | {"metadata": metadata}))
        return module.BlockStored(**known(module.BlockStored, values))

    return write


def tensorrt_llm(event: Event) -> Any:
    """Maps with the three fields that are always there; hashes are signed, everything is in GPU."""
    if event is None:
        return {"type": "AllBlocksCleared"}
    if isinstance(event, Removal):
        return {"type": "BlockRemoved", "block_hashes": [signed(value) for value in event.hashes], "medium": "GPU"}
    told = {
        "type": "BlockStored",
        "block_hashes": [signed(value) for value in event.hashes],
        "parent_block_hash": signed(event.parent),
        "token_ids": plain_tokens(event),
        "block_size": BLOCK,
        "lora_id": event.lora_id,
        "medium": "GPU",
        "lora_name": None,
    }
    if event.salt is not None:
        told["cache_salt"] = event.salt
    if event.images:
        told["mm_keys"] = [
            [{"type": "mm_key", "hash": name, "start_offset": at, "uuid": None} for name, at in images]
            for images in event.images
        ]
    return told


def dynamo_tail(*, fixed: bool) -> Write:
    """vLLM's positions, then what Dynamo's engines put behind the extra keys."""
    tiers = {"device": "GPU", "host": "CPU_TIER1"}

    def write(event: Event) -> Any:
        if event is None:
            return ["AllBlocksCleared"] + (["engine"] if fixed else [])
        rest = [event.group]
        if isinstance(event, Removal):
            tail = [*rest, None, None, None, "engine"] if fixed else [item for item in rest if item is not None]
            return ["BlockRemoved", event.hashes, tiers[event.tier], *tail]
        if fixed:
            tail = [event.group, event.kind, 64 if event.kind == "sliding_window" else None, "LOCAL", "engine"]
        else:
            infos = [{"mm_objects": []} for _ in event.hashes]
            tail = [infos, *(item for item in (event.group, event.kind) if item is not None)]
        stored = [event.hashes, event.parent, event.tokens, BLOCK, event.lora_id, tiers[event.tier], event.lora_name]
        return ["BlockStored", *stored, vllm_extra_keys(event), *tail]

    return write


def atom(event: Event) -> Any:
    """vLLM's positions, cut after the adapter's name, and the position of the first token."""
    if event is None:
        return ["AllBlocksCleared"]
    if isinstance(event, Removal):
        return ["BlockRemoved", event.hashes, "GPU"]
    return ["BlockStored", event.hashes, event.parent, event.tokens, BLOCK, event.lora_id, "GPU", None, None, 64]


def mooncake(*, legacy: bool) -> Write:
    """Maps with ``event_type``, with the older names beside them or without."""
    tiers = {"device": "gpu", "host": "cpu"}

    def write(event: Event) -> Any:
        kind = "cleared" if event is None else "removed" if isinstance(event, Removal) else "stored"
        told: dict[str, Any] = {
            "event_type": kind,
            "event_id": 17,
            "timestamp": 1_700_000_000_000,
            "model_name": "m",
            "block_size": BLOCK,
            "additional_salt": None,
            "lora_name": None,
            "tenant_id": "default",
            "backend_id": "store-0",
            "medium": None,
            "dp_rank": 0,
        }
        older = {"cleared": "AllBlocksCleared", "removed": "BlockRemoved", "stored": "BlockStored"}[kind]
        if legacy:
            told["type"] = older
        if event is not None:
            told["medium"] = tiers[event.tier]
            told["seq_hashes"] = event.hashes
            if legacy:
                told["block_hashes"] = event.hashes
        if isinstance(event, Store):
            told |= {
                "base_block_idx": None,
                "parent_hash": event.parent,
                "token_ids": event.tokens,
                "lora_name": event.lora_name,
                "additional_salt": event.salt,
                "object_key": "m@tp_rank:0@0000002a",
                "group_id": "0",
            }
        return told

    return write


def envelope(
    kind: str, number: int, events: list[Any], encode: Callable[[Any], bytes], module: ModuleType | None
) -> bytes:
    if kind == "own":
        return encode(module.KVEventBatch(100.5 + number, events, 0))
    if kind == "map":
        return encode({"ts": 100.5 + number, "events": events, "dp_rank": 0})
    return encode([100.5 + number, events] if kind == "short" else [100.5 + number, events, 0])


def main(wheels: Path) -> None:
    """Write them all."""
    sys.meta_path.append(Placeholders())
    releases = {
        name: load(wheels, name)
        for name in (
            "vllm-0.9.2",
            "vllm-0.19.1",
            "vllm-0.23.0",
            "vllm-0.33.0",
            "sglang-0.5.2",
            "sglang-0.5.18",
            "sglang-0.5.23",
        )
    }
    by_class = "the classes and encoder of {}, unpacked from its wheel"
    by_hand = "put together from the facts of its format: {}"
    text = ["adapter", "salted", "images"]
    jobs: list[tuple[str, str, Write, str, ModuleType | None, list[str], str]] = []
    for name, dialect, scenarios, options in [
        ("vllm-0.9.2", "array", ["plain", "cleared", "numbered_adapter"], {}),
        ("vllm-0.19.1", "array", ["plain", "tiers", *text], {"hashes": "signed"}),
        ("vllm-0.23.0", "array", ["plain", "cleared", "tiers", "groups", *text], {}),
        ("vllm-0.33.0", "map", ["plain", "cleared", "tiers", "groups", "lookahead", *text], {}),
        ("vllm-0.33.0-bytes", "map", ["plain", "tiers"], {"hashes": "bytes"}),
    ]:
        module = releases[name.removesuffix("-bytes")]
        jobs.append(
            (
                name,
                dialect,
                vllm(module, **options),
                "own",
                module,
                scenarios,
                by_class.format(name.removesuffix("-bytes").removesuffix("-salted")),
            )
        )
    for name, dialect, scenarios in [
        ("sglang-0.5.2", "array", ["plain", "cleared", "numbered_adapter", "lookahead"]),
        ("sglang-0.5.18", "array", ["plain", "cleared", "tiers", "lookahead"]),
        ("sglang-0.5.18-salted", "sglang", ["salted"]),
        ("sglang-0.5.23", "map", ["plain", "cleared", "tiers", "lookahead", "salted", "adapter"]),
    ]:
        module = releases[name.removesuffix("-salted")]
        jobs.append(
            (
                name,
                dialect,
                sglang(module),
                "own",
                module,
                scenarios,
                by_class.format(name.removesuffix("-bytes").removesuffix("-salted")),
            )
        )
    for name, dialect, write, kind, scenarios, facts in [
        (
            "tensorrt-llm",
            "map",
            tensorrt_llm,
            "array",
            ["plain", "cleared", "salted", "images", "numbered_adapter"],
            "maps tagged type, signed 64-bit hashes, lora_id, medium and lora_name always there, mm_keys for images",
        ),
        (
            "dynamo-legacy-tail",
            "array",
            dynamo_tail(fixed=False),
            "array",
            ["plain", "tiers", "groups"],
            "block_mm_infos before the group, unused places left out",
        ),
        (
            "dynamo-fixed-tail",
            "array",
            dynamo_tail(fixed=True),
            "array",
            ["plain", "cleared", "tiers", "groups", "salted"],
            "group, kind, window, locality, source kind; all five places",
        ),
        ("rocm-atom", "array", atom, "short", ["plain", "cleared"], "vLLM's positions and a trailing token_offset"),
        (
            "mooncake",
            "mooncake",
            mooncake(legacy=False),
            "array",
            ["plain", "cleared", "tiers", "adapter", "salted"],
            "event_type, seq_hashes, media in lower case",
        ),
        (
            "mooncake-legacy",
            "mooncake",
            mooncake(legacy=True),
            "array",
            ["plain", "cleared", "tiers"],
            "the same with the older names type and block_hashes beside them, as its master writes by default",
        ),
        ("map-envelope", "map", tensorrt_llm, "map", ["plain"], "one vLLM commit wrote the batch as a map, too"),
    ]:
        jobs.append((name, dialect, write, kind, None, scenarios, by_hand.format(facts)))
    for old in HERE.glob("*.hex"):
        old.unlink()
    encode = msgspec.msgpack.Encoder().encode
    for name, dialect, write, kind, module, scenarios, origin in jobs:
        for scenario in scenarios:
            lines = [f"# written by: {origin}", f"# scenario: {scenario}", f"# dialect: {dialect}"]
            for number, batch in enumerate(SCENARIOS[scenario]):
                payload = envelope(kind, number, [write(event) for event in batch], encode, module)
                text_ = payload.hex()
                lines += ["", *(text_[at : at + 112] for at in range(0, len(text_), 112))]
            (HERE / f"{name}.{scenario}.hex").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
