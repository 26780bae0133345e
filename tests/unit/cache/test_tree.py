"""The prefix tree by itself: growth, links, removal order, common prefixes."""

from __future__ import annotations

import numpy as np
import pytest

from kvmesh.cache.errors import CacheIntegrityError
from kvmesh.cache.tree import BlockTree
from kvmesh.hashing import ReuseScope, as_token_ids, v2_block_keys, v2_partial_key, v2_root

ROOT = v2_root(ReuseScope())


def grow_chain(tree: BlockTree, tokens: np.ndarray) -> list[int]:
    """Insert the missing full blocks of ``tokens`` and return all of them."""
    keys = v2_block_keys(tokens, 4, ROOT)
    known = tree.walk(keys)
    root = tree.find(ROOT)
    parent = known[-1] if known else tree.add_root(ROOT) if root is None else root
    new = tree.add_chain(parent, keys[len(known) :], tokens.reshape(-1, 4)[len(known) :])
    return [*known, *new.tolist()]


def test_grows_and_keeps_everything() -> None:
    tree = BlockTree(4, 2)
    tokens = np.arange(4 * 5000, dtype=np.int32)
    nodes = grow_chain(tree, tokens)
    tree.pages(1)[nodes] = np.arange(5000)
    other = grow_chain(tree, np.concatenate((tokens[:4000], tokens[:4000])))
    tree.check()
    assert tree.walk(v2_block_keys(tokens, 4, ROOT)) == nodes
    assert tree.pages(1)[nodes].tolist() == list(range(5000))
    assert (tree.pages(0)[nodes] == -1).all()
    assert [tree.tokens(node).tolist() for node in nodes[-2:]] == [tokens[-8:-4].tolist(), tokens[-4:].tolist()]
    assert other[:1000] == nodes[:1000]
    assert tree.num_children(nodes[999]) == 2
    removed, keys = tree.remove_subtrees([nodes[0]])
    assert len(removed) == len(keys) == 6000
    assert len(tree) == 0, "the root goes with its last block"
    tree.check()


def test_removal_takes_children_first_and_skips_what_went() -> None:
    tree = BlockTree(4, 1)
    a, b = grow_chain(tree, as_token_ids(range(8)))
    (c,) = grow_chain(tree, as_token_ids(range(50, 54)))
    partial = tree.add_partial(b, v2_partial_key(as_token_ids([9]), tree.key(b)), as_token_ids([9]))
    removed, keys = tree.remove_subtrees([b, partial, a])
    assert removed.tolist() == [partial, b, a]
    assert tree.find(keys[0]) is None
    assert tree.children(tree.parent(c)) == [c]
    tree.check()


def test_common_prefix_ignores_what_a_partial_block_does_not_hold() -> None:
    tree = BlockTree(4, 1)
    (node,) = grow_chain(tree, as_token_ids([1, 2, 3, 4]))
    key = tree.key(node)
    tree.remove_subtrees([node])
    root = tree.add_root(ROOT)
    # The node is used again: its row still holds the old tokens.
    partial = tree.add_partial(root, key, as_token_ids([1, 2]))
    assert tree.common_prefix([partial], as_token_ids([1, 2, 3, 4])).tolist() == [2]
    assert tree.common_prefix([partial], as_token_ids([1])).tolist() == [1]
    assert tree.common_prefix([partial], as_token_ids([7])).tolist() == [0]


def test_check_finds_contradictions() -> None:
    tree = BlockTree(4, 1)
    a, b = grow_chain(tree, as_token_ids(range(8)))
    tree._num_children.items[a] = 2
    with pytest.raises(CacheIntegrityError, match="miscounts"):
        tree.check()
    tree._num_children.items[a] = 1
    tree._num_tokens.items[a] = 3
    with pytest.raises(CacheIntegrityError, match="partial block"):
        tree.check()
    tree._num_tokens.items[a] = 4
    tree._keys[b] = tree.key(a)
    with pytest.raises(CacheIntegrityError, match="different keys"):
        tree.check()
