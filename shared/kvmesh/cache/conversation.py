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

from kvmesh.cache.layout import LayerGroupLayout
from kvmesh.cache.pages import NO_PAGE, Pages
from kvmesh.cache.store import BlockStore
from kvmesh.cache.tree import Nodes
from kvmesh.cache.windows import first_live_block
from kvmesh.hashing import ReuseScope

__all__ = ["MAX_CONVERSATIONS", "MAX_PLANS_LEFT", "Conversation", "Conversations"]

Conversation = tuple[ReuseScope, str]
"""Where its blocks are shared, and its id: one id in two scopes names two conversations, for one tenant must not act on
another's.
"""

MAX_CONVERSATIONS = 4096
"""Beyond this the conversation that was quiet for longest is forgotten; its blocks age like any others."""


MAX_PLANS_LEFT = 4
"""Plans of a conversation that wait for blocks in use; the blocks of older ones age like any others."""


class _Turn(NamedTuple):
    keys: list[bytes]
    length: int


class _History:
    """What is remembered of one conversation."""

    __slots__ = ("left", "turns")

    def __init__(self) -> None:
        self.turns: deque[_Turn] = deque()
        """The last ones, oldest first."""
        self.left: list[_Turn] = []
        """Older ones whose blocks could not all be dropped, oldest first."""


class Conversations:
    """The drop plans of all conversations.

    Args:
        store: whose blocks are dropped.
        max_num_turns: completed turns that keep their blocks.
    """

    def __init__(self, store: BlockStore, max_num_turns: int) -> None:
        self._store = store
        self._max_num_turns = max_num_turns
        self._turns: OrderedDict[Conversation, _History] = OrderedDict()
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
        history = self._turns.setdefault(conversation, _History())
        self._turns.move_to_end(conversation)
        history.turns.append(_Turn(keys, length))
        plans = history.left
        if len(history.turns) > self._max_num_turns:
            plans.append(history.turns.popleft())
        left = [self._drop(plan, history.turns) for plan in plans]
        history.left = [plan for plan in left if plan.keys][-MAX_PLANS_LEFT:]
        if len(self._turns) > MAX_CONVERSATIONS:
            self._turns.popitem(last=False)

    def _drop(self, oldest: _Turn, newer: Iterable[_Turn]) -> _Turn:
        """Drop what only ``oldest`` needs, last block first: one call for each pool, however long the turn was.

        Returns:
            Its leading blocks up to the last one that would have gone if it had not been in use.
        """
        left = 0
        nodes = self._store.tree.walk(oldest.keys)
        pages: list[list[Pages]] = [[] for _ in self._store.tables]
        for group, layout in enumerate(self._store.layout.groups):
            needed = np.zeros(len(nodes), dtype=np.bool_)
            for turn in newer:
                needed[self._first_needed(layout, turn) : _shared(oldest.keys, turn.keys)] = True
            own = self._store.tree.pages(group)[nodes]
            wanted = ~needed & (own != NO_PAGE)
            free = wanted & self._store.group_tables[group].unused(own)
            left = max(left, int(np.flatnonzero(wanted & ~free).max(initial=-1)) + 1)
            pages[layout.pool].append(self._removable(nodes, own, free) if layout.has_every_page else own[free][::-1])
        for pool, parts in enumerate(pages):
            self._store.drop_pages(pool, np.concatenate(parts))
        return _Turn(oldest.keys[:left], oldest.length)

    def _first_needed(self, layout: LayerGroupLayout, turn: _Turn) -> int:
        """The first block of ``turn`` that it needs in a layer group."""
        if layout.kind == "state":
            return len(turn.keys) - 1
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


def _shared(one: list[bytes], other: list[bytes]) -> int:
    """How many leading keys two turns share; a key stands for everything before it, too."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high) // 2
        if one[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low
