"""The ``per_conversation`` reuse policy: only the last turns of a conversation keep their blocks (semantics §1.3).

When a turn is over, its committed blocks become a drop plan. Once more than ``max_num_turns`` plans are queued, the
oldest is applied: of its blocks, those go that no newer turn needs. What is in use just then, by a transfer, say, stays
in the plan, which is applied again when the next turn of the conversation is over. A full-attention group needs all
blocks of a turn, a windowed one only those in the window at the turn's end, a state group the last snapshot.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvmesh.cache.key_index import KEY_BYTES
from kvmesh.cache.layout import LayerGroupLayout
from kvmesh.cache.pages import NO_PAGE, Pages
from kvmesh.cache.store import BlockStore
from kvmesh.cache.tree import Nodes
from kvmesh.cache.windows import first_live_block
from kvmesh.hashing import ReuseScope

__all__ = ["MAX_CONVERSATIONS", "MAX_KEYS_PER_PAGE", "MAX_PLANS_LEFT", "Conversation", "Conversations"]

Conversation = tuple[ReuseScope, str]
"""Where its blocks are shared, and its id: one id in two scopes names two conversations, for one tenant must not act on
another's.
"""

MAX_CONVERSATIONS = 4096
"""Beyond this the conversation that was quiet for longest is forgotten; its blocks age like any others."""


MAX_KEYS_PER_PAGE = 2
"""Block keys that are remembered, for each page that the cache has on all levels; beyond it is done likewise."""

MAX_PLANS_LEFT = 4
"""Plans of a conversation that wait for blocks in use; the blocks of older ones age like any others."""


class _Turn(NamedTuple):
    keys: bytes
    """Of its blocks, packed."""
    length: int
    """Tokens."""


class _StoredTurn(NamedTuple):
    num_shared: int
    """Leading blocks that it has in common with the turn before."""
    keys: bytes
    """Of the other blocks, packed."""
    length: int


class _History:
    """What is remembered of one conversation: 32 bytes for a block, which turns that go on with it share."""

    __slots__ = ("_turns", "left")

    def __init__(self) -> None:
        self._turns: deque[_StoredTurn] = deque()
        """The last ones, oldest first; the first one shares nothing."""
        self.left: list[_Turn] = []
        """Older ones whose blocks could not all be dropped, oldest first."""

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def num_keys(self) -> int:
        """Keys that are stored."""
        return (sum(len(turn.keys) for turn in self._turns) + sum(len(plan.keys) for plan in self.left)) // KEY_BYTES

    def turns(self) -> list[_Turn]:
        """The last ones, oldest first."""
        whole: list[_Turn] = []
        keys = b""
        for turn in self._turns:
            keys = keys[: turn.num_shared * KEY_BYTES] + turn.keys
            whole.append(_Turn(keys, turn.length))
        return whole

    def append(self, turn: _Turn) -> None:
        """One more turn."""
        shared = _num_shared(self.turns()[-1].keys, turn.keys) if self._turns else 0
        self._turns.append(_StoredTurn(shared, turn.keys[shared * KEY_BYTES :], turn.length))

    def pop(self) -> _Turn:
        """Take the oldest one out."""
        _, keys, length = self._turns.popleft()
        if self._turns:
            heir = self._turns[0]
            self._turns[0] = _StoredTurn(0, keys[: heir.num_shared * KEY_BYTES] + heir.keys, heir.length)
        return _Turn(keys, length)


class Conversations:
    """The drop plans of all conversations.

    Args:
        store: whose blocks are dropped.
        max_num_turns: completed turns that keep their blocks.
    """

    def __init__(self, store: BlockStore, max_num_turns: int) -> None:
        self._store = store
        self._max_num_turns = max_num_turns
        self._histories: OrderedDict[Conversation, _History] = OrderedDict()
        """The one that was quiet for longest first."""
        self._max_keys = MAX_KEYS_PER_PAGE * sum(table.num_pages for table in store.tables)
        self.num_keys = 0
        """Block keys that are remembered, over all conversations."""
        self._active: set[Conversation] = set()

    def begin(self, conversation: Conversation) -> bool:
        """A request begins; False if another one of this conversation is open, so that it does not count as a turn."""
        if conversation in self._active:
            return False
        self._active.add(conversation)
        return True

    def finish(self, conversation: Conversation) -> None:
        """The request for which :meth:`begin` was true is closed."""
        self._active.remove(conversation)

    def end_turn(self, conversation: Conversation, keys: list[bytes], length: int) -> None:
        """A turn of ``length`` committed tokens is over, its blocks still in use or not.

        Args:
            conversation: whose turn.
            keys: its committed full blocks, in order.
            length: tokens.
        """
        history = self._histories.setdefault(conversation, _History())
        self._histories.move_to_end(conversation)
        self.num_keys -= history.num_keys
        history.append(_Turn(b"".join(keys), length))
        plans = history.left
        if len(history) > self._max_num_turns:
            plans.append(history.pop())
        if plans:
            turns = history.turns()
            left = [self._drop(plan, turns) for plan in plans]
            history.left = [plan for plan in left if plan.keys][-MAX_PLANS_LEFT:]
        self.num_keys += history.num_keys
        while len(self._histories) > MAX_CONVERSATIONS or self.num_keys > self._max_keys:
            _, forgotten = self._histories.popitem(last=False)
            self.num_keys -= forgotten.num_keys

    def _drop(self, oldest: _Turn, newer: Iterable[_Turn]) -> _Turn:
        """Drop what only ``oldest`` needs, last block first: one call for each pool, however long the turn was.

        Returns:
            Its leading blocks up to the last one that would have gone if it had not been in use.
        """
        left = 0
        keys = [oldest.keys[at : at + KEY_BYTES] for at in range(0, len(oldest.keys), KEY_BYTES)]
        nodes = self._store.tree.walk(keys)
        pages: list[list[Pages]] = [[] for _ in self._store.tables]
        for group, layout in enumerate(self._store.layout.groups):
            needed = np.zeros(len(nodes), dtype=np.bool_)
            for turn in newer:
                needed[self._first_needed(layout, turn) : _num_shared(oldest.keys, turn.keys)] = True
            own = self._store.tree.pages(group)[nodes]
            wanted = ~needed & (own != NO_PAGE)
            free = wanted & self._store.group_tables[group].unused(own)
            left = max(left, int(np.flatnonzero(wanted & ~free).max(initial=-1)) + 1)
            pages[layout.pool].append(self._removable(nodes, own, free) if layout.has_every_page else own[free][::-1])
        for pool, parts in enumerate(pages):
            self._store.drop_pages(pool, np.concatenate(parts))
        return _Turn(oldest.keys[: left * KEY_BYTES], oldest.length)

    def _first_needed(self, layout: LayerGroupLayout, turn: _Turn) -> int:
        """The first block of ``turn`` that it needs in a layer group."""
        if layout.kind == "state":
            return len(turn.keys) // KEY_BYTES - 1
        return (
            0 if layout.window is None else first_live_block(turn.length, self._store.tokens_per_block, layout.window)
        )

    def _removable(self, nodes: Nodes, pages: Pages, free: NDArray[np.bool_]) -> Pages:
        """Pages of the last of ``nodes`` that are ``free``, up to the first that somebody else's blocks continue.

        With the first of them the tree forgets all: it is the only one given.
        """
        tree, begin = self._store.tree, len(nodes)
        while begin and free[begin - 1] and tree.num_children(int(nodes[begin - 1])) == (begin < len(nodes)):
            begin -= 1
        return pages[begin : begin + 1]


def _num_shared(one: bytes, other: bytes) -> int:
    """How many leading keys two turns share; a key stands for everything before it, too."""
    low, high = 0, min(len(one), len(other)) // KEY_BYTES
    while low < high:
        middle = (low + high) // 2
        place = slice(middle * KEY_BYTES, (middle + 1) * KEY_BYTES)
        if one[place] == other[place]:
            low = middle + 1
        else:
            high = middle
    return low
