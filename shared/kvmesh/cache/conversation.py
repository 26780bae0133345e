"""The ``per_conversation`` reuse policy: only the last turns of a conversation keep their blocks (semantics §1.3).

When a turn is over, its committed blocks become a drop plan. Once more than ``max_num_turns`` plans are queued, the
oldest is applied: of its blocks, those go that no newer turn needs. A full-attention group needs all blocks of a turn,
a windowed one only those in the window at the turn's end, a state group the last snapshot.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import NamedTuple

from kvmesh.cache.pages import NO_PAGE
from kvmesh.cache.store import BlockStore
from kvmesh.cache.windows import first_live_block
from kvmesh.hashing import ReuseScope

__all__ = ["MAX_CONVERSATIONS", "Conversation", "Conversations"]

Conversation = tuple[ReuseScope, str]
"""Where its blocks are shared, and its id: one id in two scopes names two conversations, for one tenant must not act on
another's.
"""

MAX_CONVERSATIONS = 4096
"""Beyond this the conversation that was quiet for longest is forgotten; its blocks age like any others."""


class _Turn(NamedTuple):
    keys: list[bytes]
    length: int


class Conversations:
    """The drop plans of all conversations.

    Args:
        store: whose blocks are dropped.
        max_num_turns: completed turns that keep their blocks.
    """

    def __init__(self, store: BlockStore, max_num_turns: int) -> None:
        self._store = store
        self._max_num_turns = max_num_turns
        self._turns: OrderedDict[Conversation, deque[_Turn]] = OrderedDict()
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
        turns = self._turns.setdefault(conversation, deque())
        self._turns.move_to_end(conversation)
        turns.append(_Turn(keys, length))
        while len(turns) > self._max_num_turns:
            self._drop(turns.popleft(), list(turns))
        if len(self._turns) > MAX_CONVERSATIONS:
            self._turns.popitem(last=False)

    def _drop(self, oldest: _Turn, newer: list[_Turn]) -> None:
        size = self._store.tokens_per_block
        tree = self._store.tree
        for group, layout in enumerate(self._store.layout.groups):
            needed: set[bytes] = set()
            for turn in newer:
                if layout.kind == "state":
                    begin = len(turn.keys) - 1
                else:
                    begin = 0 if layout.window is None else first_live_block(turn.length, size, layout.window)
                needed.update(turn.keys[begin:])
            table = self._store.group_tables[group]
            for key in reversed(oldest.keys):
                node = None if key in needed else tree.find(key)
                if node is None or (layout.has_every_page and tree.num_children(node)):
                    continue  # Somebody else's blocks continue it.
                page = tree.pages(group)[[node]]
                if page[0] != NO_PAGE and table.unused(page)[0]:
                    self._store.drop_pages(layout.pool, page)
