"""What of a coordinator survives it, as keys and values: members, epochs that are over, open transfers, stored keys.

Loads are left out: they change with every heartbeat and are told anew. Leases are not stored as times: who takes over
could hear nobody before, and gives every member a whole lease.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from typing import NamedTuple

import msgspec

from kvmesh.coordinator.ledger import TransferLedger
from kvmesh.coordinator.past import Past
from kvmesh.coordinator.registry import MemberRegistry
from kvmesh.coordinator.storage import MemoryStore, StoredItem
from kvmesh.protocol.members import Load, Member
from kvmesh.protocol.transfer import TransferRecord
from kvmesh.telemetry import get_logger

__all__ = ["CoordinatorState", "Restored"]

SLICE_KEYS = 200
"""Keys that are restored without a break."""

_NO_PAST = Past()
_log = get_logger("coordinator.state")


class Restored(NamedTuple):
    """How much was news."""

    members: int
    transfers: int
    stored_keys: int


class CoordinatorState:
    """Registry, ledger and store as one set of keys.

    ``members/ID``, ``epochs/ID``, ``transfers/ID`` and ``storage/KEY``, each with a JSON value.
    """

    def __init__(self, registry: MemberRegistry, ledger: TransferLedger, store: MemoryStore) -> None:
        self._registry = registry
        self._ledger = ledger
        self._store = store

    def on_touched(self, callback: Callable[[str], None]) -> None:
        """Tell ``callback`` of every key whose value may have changed."""

        def touch_member(instance_id: str) -> None:
            callback(f"members/{instance_id}")
            callback(f"epochs/{instance_id}")

        self._registry.on_touched = touch_member
        self._ledger.on_touched = lambda transfer_id: callback(f"transfers/{transfer_id}")
        self._store.on_touched = lambda key: callback(f"storage/{key}")

    def keys(self) -> Iterator[str]:
        """Every key that has a value now."""
        for member in self._registry.members().members:
            yield f"members/{member.instance_id}"
        for instance_id in self._registry.pasts():
            yield f"epochs/{instance_id}"
        for transfer_id in self._ledger.open_ids():
            yield f"transfers/{transfer_id}"
        for key in self._store.stored_keys():
            yield f"storage/{key}"

    def read(self, key: str) -> bytes | None:
        """The value of a key now; None when it has none."""
        kind, _, name = key.partition("/")
        value: object = None
        if kind == "members":
            member = self._registry.member(name)
            value = None if member is None else msgspec.structs.replace(member, load=Load())
        elif kind == "epochs":
            past = self._registry.past(name)
            value = None if past == _NO_PAST else past
        elif kind == "transfers":
            # What somebody else has stored may have any name.
            value = self._ledger.open_transfer(int(name)) if name.isascii() and name.isdigit() else None
        elif kind == "storage":
            value = self._store.item(name)
        return None if value is None else msgspec.json.encode(value)

    def restore(self, stored: Mapping[str, bytes]) -> Restored:
        """:meth:`restoring` at one go."""
        slices = self.restoring(stored)
        while True:
            try:
                next(slices)
            except StopIteration as end:
                restored: Restored = end.value
                return restored

    def restoring(self, stored: Mapping[str, bytes]) -> Generator[None, None, Restored]:
        """Take in what an earlier coordinator has stored, in slices of some milliseconds.

        Of a member the later life counts, and what is over stays over. What this ledger has heard itself counts more.
        The storage becomes what is stored: whoever led last has decided who holds which key.
        """
        storage: dict[str, StoredItem] = {}
        counts = {"members": 0, "epochs": 0, "transfers": 0}
        # What is over first, so that nothing comes back that has ended.
        for number, key in enumerate(sorted(stored, key=lambda key: not key.startswith("epochs/")), start=1):
            if number % SLICE_KEYS == 0:
                yield
            kind, _, name = key.partition("/")
            try:
                if kind == "storage":
                    storage[name] = msgspec.json.decode(stored[key], type=StoredItem)
                else:
                    counts[kind] += self._take(kind, name, stored[key])
            except (msgspec.MsgspecError, ValueError, KeyError) as error:
                _log.warning("a stored key cannot be read; it is left out", key=key, error=str(error))
        return Restored(counts["members"], counts["transfers"], self._store.replace(storage))

    def forget_all(self, incarnation: str) -> None:
        """Begin anew: another coordinator has taken over, and what is here grows old."""
        self._registry.forget_all(incarnation)
        self._ledger.forget_all()
        self._store.forget_all()

    def _take(self, kind: str, name: str, value: bytes) -> bool:
        if kind == "epochs":
            self._registry.recall(name, msgspec.json.decode(value, type=Past))
            return True
        if kind == "members":
            return self._registry.restore(msgspec.json.decode(value, type=Member))
        if kind == "transfers":
            return self._ledger.restore(msgspec.json.decode(value, type=TransferRecord))
        raise KeyError(kind)
