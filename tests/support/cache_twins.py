"""What the native parts of the cache must do, in plain Python: the oracles of their tests."""

from __future__ import annotations

import numpy as np

HOLD, PIN, LOCK = 1, 1 << 20, 1 << 40
FIELD = PIN - 1
FREE = -1
NONE = -1


class PageStatesTwin:
    """``_native.PageStates``: one list of pages for each level and priority."""

    def __init__(self, columns: tuple[np.ndarray, ...], num_levels: int) -> None:
        self.uses, self.level, self.group, self.priority, self.slot, self.node, self.num_tokens = columns
        self._last = num_levels - 1
        self._queues: list[dict[int, list[int]]] = [{} for _ in range(num_levels)]

    @property
    def num_locked(self) -> int:
        return int(np.count_nonzero(self.uses >= LOCK))

    def fixed(self, level: int) -> int:
        return int(np.count_nonzero((self.uses >= PIN) & (self.level == level)))

    def held(self, level: int) -> int:
        return int(np.count_nonzero((self.uses > 0) & (self.uses < PIN) & (self.level == level)))

    def queued(self, level: int) -> int:
        return sum(map(len, self._queues[level].values()))

    def is_queued(self, page: int) -> bool:
        return any(page in pages for queues in self._queues for pages in queues.values())

    def place(self, pages: np.ndarray, slots: np.ndarray, level: int, group: int, priorities: np.ndarray | int) -> None:
        self.slot[pages], self.level[pages], self.group[pages] = slots, level, group
        self.priority[pages], self.num_tokens[pages] = priorities, 0

    def change(self, pages: np.ndarray, delta: int, freed: np.ndarray) -> int:
        for page in pages.tolist():
            uses = int(self.uses[page])
            locks, pins, holds = uses >> 40, (uses >> 20) & FIELD, uses & FIELD
            wanted = {-LOCK: locks, HOLD - LOCK: locks, -PIN: pins, HOLD - PIN: pins}
            wanted |= {-HOLD: holds, LOCK - HOLD: holds, PIN - HOLD: holds}
            if wanted.get(delta, 1) == 0:
                raise ValueError("nothing to take away")
        count = 0
        for page in pages.tolist():
            before = int(self.uses[page])
            after = before + delta
            self.uses[page] = after
            if after == 0 and self.node[page] == NONE:
                self.discard(np.array([page]))
                freed[count] = page
                count += 1
            elif after >= PIN:
                self.discard(np.array([page]))
            elif after == 0 or not 0 < before < PIN:
                self.push(np.array([page]), False)
        return count

    def push(self, pages: np.ndarray, front: bool) -> None:
        numbers = pages.tolist()
        for page in numbers[::-1] if front else numbers:
            self.discard(np.array([page]))
            uses, level = int(self.uses[page]), int(self.level[page])
            if uses == 0 or (uses < PIN and level < self._last):
                queue = self._queues[level].setdefault(int(self.priority[page]), [])
                queue.insert(0 if front else len(queue), page)

    def discard(self, pages: np.ndarray) -> None:
        for page in pages.tolist():
            for queues in self._queues:
                for queue in queues.values():
                    if page in queue:
                        queue.remove(page)

    def pop(self, level: int, out: np.ndarray) -> int:
        order = [page for _, queue in sorted(self._queues[level].items()) for page in queue][: len(out)]
        out[: len(order)] = order
        self.discard(np.array(order, dtype=np.int32))
        return len(order)

    def relocate(self, pages: np.ndarray, level: int) -> None:
        self.discard(pages)


class TreeTwin:
    """The two link operations over parents and ordered lists of children, newest first."""

    def __init__(self, num_groups: int) -> None:
        self.parents: dict[int, int] = {}
        self.children: dict[int, list[int]] = {}
        self.roots: set[int] = set()
        self.pages: list[dict[int, int]] = [{} for _ in range(num_groups)]

    def add_root(self, node: int) -> None:
        self.roots.add(node)
        self.parents[node] = NONE
        self.children[node] = []

    def link_chain(self, parent: int, nodes: list[int]) -> None:
        for node in nodes:
            self.parents[node] = parent
            self.children[node] = []
            self.children[parent].insert(0, node)
            parent = node

    def unlink_subtrees(self, nodes: list[int]) -> tuple[list[int], list[int]]:
        removed: list[int] = []
        roots: list[int] = []
        for node in nodes:
            if node not in self.parents:
                continue
            above = self.parents[node]
            self._take_out(node, removed)
            while above != NONE and not self.children[above]:
                after = self.parents[above]
                if above in self.roots:
                    self._forget(above)
                    roots.append(above)
                elif not any(above in pages for pages in self.pages):
                    self._take_out(above, removed)
                else:
                    break
                above = after
        return removed, roots

    def _take_out(self, node: int, removed: list[int]) -> None:
        # The order in which a stack visits the subtree, reversed.
        order, pending = [], [node]
        while pending:
            current = pending.pop()
            order.append(current)
            pending += self.children[current]
        for current in reversed(order):
            self.children[self.parents[current]].remove(current)
            self._forget(current)
            removed.append(current)

    def _forget(self, node: int) -> None:
        del self.parents[node], self.children[node]
        self.roots.discard(node)
