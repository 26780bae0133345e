"""The prefix tree by itself: growth, links, removal order, common prefixes."""

from __future__ import annotations

import numpy as np
import pytest

from kvmesh.cache.errors import CacheIntegrityError
from kvmesh.cache.tree import BlockTree
from kvmesh.hashing import ReuseScope, as_token_ids, v2_block_keys, v2_partial_key, v2_root

ROOT = v2_root(ReuseScope())


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def grow_chain(tree: BlockTree, tokens: np.ndarray) -> list[int]:
    """Insert the missing full blocks of ``tokens`` and return all of them."""
    keys = v2_block_keys(tokens, 4, ROOT)
    known = tree.walk(keys)
    root = tree.find(ROOT)
    parent = int(known[-1]) if len(known) else tree.add_root(ROOT) if root is None else root
    new = tree.add_chain(parent, keys[len(known) :], tokens.reshape(-1, 4)[len(known) :])
    tree.pages(0)[new] = new
    return [*known.tolist(), *new.tolist()]


def test_grows_and_keeps_everything() -> None:
    tree = BlockTree(4, 2)
    tokens = np.arange(4 * 5000, dtype=np.int32)
    nodes = grow_chain(tree, tokens)
    tree.pages(1)[nodes] = np.arange(5000)
    other = grow_chain(tree, np.concatenate((tokens[:4000], tokens[:4000])))
    tree.check()
    assert tree.walk(v2_block_keys(tokens, 4, ROOT)).tolist() == nodes
    assert tree.pages(1)[nodes].tolist() == list(range(5000))
    assert tree.pages(0)[nodes].tolist() == nodes
    assert tree.shared_prefixes(nodes[-2], tokens[-4:]) == [(nodes[-1], 4)]
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
    (partial,) = tree.add_partial(b, v2_partial_key(as_token_ids([9]), tree.index.key(b)), as_token_ids([9])).tolist()
    removed, keys = tree.remove_subtrees([b, partial, a])
    assert removed.tolist() == [partial, b, a]
    assert tree.find(keys[0]) is None
    assert tree.children(tree.parent(c)) == [c]
    tree.check()


def test_shared_prefixes_ignores_what_a_partial_block_does_not_hold() -> None:
    tree = BlockTree(4, 1)
    (node,) = grow_chain(tree, as_token_ids([1, 2, 3, 4]))
    key = tree.index.key(node)
    tree.remove_subtrees([node])
    root = tree.add_root(ROOT)
    # The node is used again: its row still holds the old tokens.
    (partial,) = tree.add_partial(root, key, as_token_ids([1, 2])).tolist()
    assert tree.shared_prefixes(root, as_token_ids([1, 2, 3, 4])) == [(partial, 2)]
    assert tree.shared_prefixes(root, as_token_ids([1])) == [(partial, 1)]
    assert tree.shared_prefixes(root, as_token_ids([7])) == [(partial, 0)]


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
    tree.pages(0)[b] = -1
    with pytest.raises(CacheIntegrityError, match="without pages"):
        tree.check()
    tree.index.remove(pages(b))
    with pytest.raises(CacheIntegrityError, match="different keys"):
        tree.check()


def test_a_leaf_without_pages_goes_and_its_bare_ancestors_with_it() -> None:
    # §3.4: the empty leaf chain is pruned upward.
    tree = BlockTree(4, 2)
    nodes = grow_chain(tree, as_token_ids(range(16)))
    tree.clear_pages(0, pages(*nodes))
    tree.pages(1)[nodes[0]] = 5
    assert tree.empty_leaves(nodes) == nodes[3:]
    removed, _ = tree.remove_subtrees(nodes[3:])
    assert removed.tolist() == [nodes[3], nodes[2], nodes[1]], "the first block still offers a page"
    tree.check()
