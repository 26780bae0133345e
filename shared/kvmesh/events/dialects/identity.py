"""What a block is besides its tokens: salt, images and other content, taken from the many places that tell it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvmesh.events.dialects.base import RejectedError

__all__ = ["BlockContent", "Identity", "identity_of"]

_DYNAMO_SALT = "dynamo-cache-salt:"
"""Dynamo hands salts to vLLM with this in front, to tell them from other texts."""


class BlockContent(NamedTuple):
    """Where events tell what is not in the tokens; each None, or a list with an entry for each block."""

    extra_keys: Sequence[Any] | None = None
    """vLLM, TensorRT-LLM: adapter, ``(identifier, offset)`` of images, salt (first block), digests of embeddings."""
    mm_keys: Sequence[Any] | None = None
    """TensorRT-LLM: maps with ``hash`` and ``start_offset``."""
    mm_infos: Sequence[Any] | None = None
    """Dynamo: maps with ``mm_objects``, a list of maps with ``mm_hash``."""


class Identity(NamedTuple):
    """What blocks must have in common besides their tokens."""

    salt: str | None
    """Of the whole sequence."""
    extra_keys: list[Any] | None
    """For each block a list of what else it is, or None; None when all of them are their tokens alone."""


def identity_of(
    content: BlockContent,
    digests: Sequence[tuple[int, Any]],
    *,
    num_blocks: int,
    block_size: int,
    lora_name: str | None,
    salt: str | None,
    at_root: bool,
) -> Identity:
    """Bring it all into one form.

    Args:
        content: as the event tells it.
        digests: ``(position, digest)`` of the tokens that are not text.
        num_blocks: of the event.
        block_size: tokens per block.
        lora_name: adapter that may stand among the extra keys, too.
        salt: if the event has a field for it.
        at_root: the event begins a sequence; only there does a salt stand among the extra keys.

    Raises:
        RejectedError: a list is not one entry per block.
    """
    if not (content.extra_keys or content.mm_keys or content.mm_infos or digests):
        return Identity(salt, None)
    blocks: list[list[Any]] = [[] for _ in range(num_blocks)]
    for keys, items in zip(blocks, _per_block(content.extra_keys, num_blocks), strict=True):
        keys += _without_adapter(items, lora_name)
    if at_root:
        salt, blocks[0] = _take_salt(salt, blocks[0])
    for keys, items in zip(blocks, _per_block(content.mm_keys, num_blocks), strict=True):
        keys += [[_field(item, "hash"), item.get("start_offset", 0)] for item in items]
    for keys, items in zip(blocks, _per_block(content.mm_infos, num_blocks, "mm_objects"), strict=True):
        keys += [_field(item, "mm_hash") for item in items]
    for position, digest in digests:
        blocks[position // block_size].append(["digest", position % block_size, digest])
    return Identity(salt, [keys or None for keys in blocks] if any(blocks) else None)


def _per_block(entries: Sequence[Any] | None, num_blocks: int, field: str | None = None) -> list[list[Any]]:
    """The items of each block, where there may be none, or a map that has them in ``field``."""
    if not entries:
        return [[]] * num_blocks
    if len(entries) != num_blocks:
        raise RejectedError("keys_do_not_fit_blocks")
    items = [entry.get(field) if field is not None and isinstance(entry, dict) else entry for entry in entries]
    if not all(item is None or isinstance(item, list) for item in items):
        raise RejectedError("malformed")
    return [item or [] for item in items]


def _field(item: Any, name: str) -> Any:
    if not isinstance(item, dict) or item.get(name) is None:
        raise RejectedError("malformed")
    return item[name]


def _without_adapter(items: list[Any], lora_name: str | None) -> list[Any]:
    """Items as older engines write them, without the adapter's name: that is told by a field of its own."""
    plain = [_untagged(item) for item in items]
    adapter = next((at for at, (kind, item) in enumerate(plain) if kind in (None, "lora") and item == lora_name), None)
    return [item for at, (kind, item) in enumerate(plain) if kind != "lora" and (lora_name is None or at != adapter)]


def _untagged(item: Any) -> tuple[str | None, Any]:
    """Kind and value of ``["lora", name]``, ``["mm", identifier, offset]`` and so on; other items say no kind."""
    match item:
        case ["lora" | "cache_salt" as kind, str() as value]:
            return kind, (_DYNAMO_SALT + value if kind == "cache_salt" else value)
        case ["mm", identifier, offset]:
            return "mm", [identifier, offset]
        case ["prompt_embeds", bytes() as digest]:
            return "prompt_embeds", digest
        case _:
            return None, item


def _take_salt(salt: str | None, items: list[Any]) -> tuple[str | None, list[Any]]:
    """The salt among the items of the first block: vLLM writes it, unlabelled, as the last text."""
    texts = [at for at, item in enumerate(items) if isinstance(item, str)]
    labelled = [at for at in texts if items[at].startswith(_DYNAMO_SALT)]
    if not texts:
        return salt, items
    at = (labelled or texts)[-1]
    if salt is not None and items[at].removeprefix(_DYNAMO_SALT) != salt:
        return salt, items
    return items[at].removeprefix(_DYNAMO_SALT), items[:at] + items[at + 1 :]
