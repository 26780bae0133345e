"""How much of a prompt the V1 cache holds: what every layer group can serve, and with which blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvmesh.cache.layout import PageLayout
from kvmesh.cache.v1.block import Block
from kvmesh.cache.v1.tree import BlockTree, Node, token_bytes
from kvmesh.cache.windows import first_live_block
from kvmesh.hashing import ReuseScope, TokenIds

__all__ = ["GroupPath", "Match", "Prompt", "find_match", "find_path", "servable_tokens"]


class Prompt(NamedTuple):
    """What is looked for."""

    scope: ReuseScope
    token_ids: TokenIds
    """int32."""
    keys: Sequence[bytes]
    """V1 keys of its full blocks."""
    limit: int | None = None
    """Most tokens that may be found; None: all."""


class GroupPath(NamedTuple):
    """What one layer group knows of a prompt."""

    nodes: list[Node]
    """The leading full blocks; in a group with a window some may be holes."""
    tail: Node | None
    """The block that begins like the prompt goes on after them."""
    tail_tokens: int
    """How many leading tokens of ``tail`` match."""


class Match(NamedTuple):
    """A prompt's cached prefix; valid until the next change of the cache."""

    num_tokens: int
    paths: list[list[Node]]
    """By group, the nodes of the full blocks."""
    tails: list[Block]
    """By group, the block whose leading tokens are used; empty when ``num_tokens`` are whole blocks."""


def find_match(
    layout: PageLayout,
    trees: Sequence[BlockTree],
    prompt: Prompt,
    *,
    usable: Callable[[Block], bool],
    partial: bool,
) -> Match:
    """The longest prefix of a prompt that every layer group can serve, at most all of it but one token.

    Args:
        layout: layer groups and their windows.
        trees: by layer group.
        prompt: what is looked for.
        usable: whether the leading tokens of a block may be reused.
        partial: whether they may at all.
    """
    size = layout.tokens_per_block
    paths = [find_path(tree, prompt, size, usable) for tree in trees]
    limit, before = max(len(prompt.token_ids) - 1, 0), -1
    if prompt.limit is not None:
        limit = min(limit, prompt.limit)
    tails: list[Block] = []
    while limit != before:
        before = limit
        for group, path in zip(layout.groups, paths, strict=True):
            limit = servable_tokens(path, limit, size, group.window)
        full, rest = divmod(limit, size)
        if rest:
            nodes = [path.nodes[full] if full < len(path.nodes) else path.tail for path in paths]
            tails = [node.block for node in nodes if node is not None and node.block is not None]
            if not partial or not all(usable(block) for block in tails):
                limit -= rest
    full, rest = divmod(limit, size)
    return Match(limit, [path.nodes[:full] for path in paths], tails if rest else [])


def find_path(tree: BlockTree, prompt: Prompt, tokens_per_block: int, usable: Callable[[Block], bool]) -> GroupPath:
    """Walk one tree along a prompt."""
    node = tree.root(prompt.scope)
    if node is None:
        return GroupPath([], None, 0)
    data = token_bytes(prompt.token_ids)
    width = len(data) // max(len(prompt.token_ids), 1) * tokens_per_block
    nodes: list[Node] = []
    for i, key in enumerate(prompt.keys[: len(prompt.token_ids) // tokens_per_block]):
        child = tree.child(node, key, data[i * width : (i + 1) * width])
        if child is None:
            break
        nodes.append(child)
        node = child
    rest = data[len(nodes) * width : (len(nodes) + 1) * width]
    return GroupPath(nodes, *(tree.closest_child(node, rest, usable) if rest else (None, 0)))


def servable_tokens(path: GroupPath, limit: int, tokens_per_block: int, window: int | None) -> int:
    """The longest prefix, at most ``limit`` tokens, whose last block and all blocks inside the window have their KV.

    A group with full attention has no holes. In one with a window, the prefix ends before a hole whose tokens the
    next query would attend to.
    """
    if window is None:
        return min(limit, len(path.nodes) * tokens_per_block + path.tail_tokens)
    present_from: list[int] = []  # first of the run of present blocks that ends here; one more where there is none
    for i, node in enumerate(path.nodes):
        before = present_from[-1] if i else 0
        present_from.append(before if node.block is not None else i + 1)
    while limit > 0:
        last = (limit - 1) // tokens_per_block
        covered = _covered_tokens(path, last, tokens_per_block)
        if covered < limit - last * tokens_per_block:
            limit = last * tokens_per_block + covered
        elif last and (start := present_from[last - 1]) > first_live_block(limit, tokens_per_block, window):
            limit = (start - 1) * tokens_per_block
        else:
            break
    return limit


def _covered_tokens(path: GroupPath, block: int, tokens_per_block: int) -> int:
    """Tokens of one block of the prompt whose KV is there."""
    if block < len(path.nodes):
        return tokens_per_block if path.nodes[block].block is not None else 0
    return path.tail_tokens if block == len(path.nodes) else 0
