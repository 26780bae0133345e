"""What ``kvmesh events`` shows of an event, and which events it shows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import anyio
import numpy as np
from rich.console import Console
from rich.markup import escape

from kvmesh.events.decoding import BatchError, decode_batch
from kvmesh.events.index.scope import DEFAULT_TENANT, salts_on_the_wire
from kvmesh.events.keyed import KeyRing, key_of
from kvmesh.events.records import Cleared, EventRecord, LoraKey, Removed, Stored, Tier
from kvmesh.protocol.mesh_events import TIER_MEDIA

__all__ = ["EVENT_TYPES", "EventFilter", "Printer", "Stream", "describe", "event_type", "printable"]

EVENT_TYPES = ("stored", "moved", "removed", "cleared")

SHOWN_HASHES = 4

KEYED_TEXT = "(named by a key: no tokens are told)"

SALTED_BLOCKS = 100_000
"""Blocks whose salt is remembered for the filter: only the first of a sequence tells it."""

DecodeTokens = Callable[[str, list[int]], str]
"""Text of token ids, by the model that the stream is of; raises ``ValueError`` when they cannot be read."""


class Stream(NamedTuple):
    """Whose events they are."""

    name: str
    """The worker, or its rank."""
    model: str = ""
    lora: LoraKey = None
    """Adapter of blocks that name none."""
    salt: str | None = None
    """Salt of blocks that name none."""
    tenant: str = DEFAULT_TENANT
    """Whose the blocks are that name nobody."""


class EventFilter:
    """Which events are shown: those that fit every condition that is given.

    Args:
        types: of :data:`EVENT_TYPES`; empty: all.
        model: only events of this model: of its streams, and of others what names it.
        tenant: the same of tenants.
        tier: only what lies in this tier, or leaves it; ``cleared`` is of all.
        lora: only blocks of this adapter, by name or number; removals do not tell theirs and are shown.
        salt: only blocks of sequences with this salt, by the text or as the events write it; the same of removals.
    """

    def __init__(
        self,
        types: frozenset[str] = frozenset(),
        *,
        model: str | None = None,
        tenant: str | None = None,
        tier: Tier | None = None,
        lora: str | None = None,
        salt: str | None = None,
    ) -> None:
        self._types = types
        self._model = model
        self._tenant = tenant
        self._tier = tier
        self._lora = lora
        self._salts = None if salt is None else frozenset(salts_on_the_wire(salt))
        self._salt_of: dict[tuple[str, int], str] = {}

    def shows(self, stream: Stream, record: EventRecord) -> bool:
        """Whether an event fits."""
        fits = not isinstance(record, Stored) or self._fits(stream, record)
        if isinstance(record, Stored | Removed):
            of = record if isinstance(record, Stored) else record.owner
            model, tenant = (None, None) if of is None else (of.model, of.tenant)
            fits = fits and self._tier in (None, record.tier)
        else:
            model = tenant = None
        fits = fits and self._model in (None, model or stream.model)
        fits = fits and self._tenant in (None, tenant or stream.tenant)
        return fits and (not self._types or event_type(record) in self._types)

    def _fits(self, stream: Stream, record: Stored) -> bool:
        lora = stream.lora if record.lora is None else record.lora
        if self._lora is not None and str(lora) != self._lora:
            return False
        return self._salts is None or self._salt(stream, record) in self._salts

    def _salt(self, stream: Stream, record: Stored) -> str | None:
        """The salt of a sequence, which its first block tells; blocks that move tell nothing but their hashes."""
        salt = record.salt
        if salt is None and not len(record.token_ids):
            salt = self._salt_of.get((stream.name, record.hashes[0]))
        if salt is None and record.parent is not None:
            salt = self._salt_of.get((stream.name, record.parent))
        if salt is not None:
            for hash_ in record.hashes:
                self._salt_of[stream.name, hash_] = salt
            while len(self._salt_of) > SALTED_BLOCKS:
                del self._salt_of[next(iter(self._salt_of))]
        return stream.salt if salt is None else salt


class Printer:
    """Prints batches and notices what was missed; ends the process's work after ``count`` events.

    Args:
        console: to print to.
        count: events to print; None: all.
        wanted: which.
        decode: text of tokens, None: none is shown.
        text_chars: most of an event's text that is shown.
        keys: by which keyed events may be read; those of other keys are left out with a note.
    """

    def __init__(
        self,
        console: Console,
        count: int | None = None,
        wanted: EventFilter | None = None,
        *,
        decode: DecodeTokens | None = None,
        text_chars: int = 200,
        keys: KeyRing | None = None,
    ) -> None:
        self._console = console
        self._left = count
        self._wanted = wanted or EventFilter()
        self._decode = decode
        self._text_chars = text_chars
        self._keys = None if keys is None else keys.part()
        self._last: dict[str, int] = {}
        self.done = anyio.Event()

    def sequence(self, stream: str, sequence: int) -> None:
        """Note the number of a message, and tell what is missing before it."""
        last = self._last.get(stream)
        if last is not None and sequence != last + 1:
            self.note(stream, f"missed {sequence - last - 1} batches" if sequence > last else "publisher restarted")
        self._last[stream] = sequence

    def batch(self, stream: Stream, sequence: int, payload: bytes) -> None:
        """Print one batch."""
        try:
            batch = decode_batch(payload, self._keys)
        except BatchError:
            self.note(stream.name, f"#{sequence} is no batch that this command can read ({len(payload)} bytes)")
            return
        clock = _clock(batch.ts)
        for record in batch.records:
            if self._left == 0:
                return
            if self._wanted.shows(stream, record):
                self._print(stream, clock, sequence, record)
        for reason, count in batch.rejected.items():
            self.note(stream.name, f"#{sequence}: {count} events left out: {reason}")

    def note(self, stream: str, text: str) -> None:
        """Something to know about a stream."""
        self._console.print(f"[cyan]{_shown(stream)}[/] [yellow]{_shown(text)}[/]", highlight=False, soft_wrap=True)

    def _print(self, stream: Stream, clock: str, sequence: int, record: EventRecord) -> None:
        line = f"[dim]{clock}[/] [cyan]{_shown(stream.name)}[/] #{sequence} {_shown(describe(record))}"
        self._console.print(line, highlight=False, soft_wrap=True)
        if self._decode is not None and isinstance(record, Stored) and len(record.token_ids):
            text = KEYED_TEXT if key_of(record.salt) else self._text(stream.model, record.token_ids)
            self._console.print(f"    [green]{escape(text)}[/]", highlight=False)
        if self._left is not None:
            self._left -= 1
            if self._left == 0:
                self.done.set()

    def _text(self, model: str, token_ids: np.ndarray) -> str:
        assert self._decode is not None, "asked for"
        # No token is less than a character often enough for more tokens to be needed than characters.
        shown = token_ids[: self._text_chars].tolist()
        try:
            text = self._decode(model, shown)
        except ValueError as error:
            return f"({error})"
        cut = len(shown) < len(token_ids) or len(text) > self._text_chars
        return repr(text[: self._text_chars]) + (" ..." if cut else "")


def _clock(ts: float) -> str:
    """What a publisher's clock says, which may be anything."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(ts))
    except (ValueError, OverflowError, OSError):
        return "--:--:--"


def printable(text: str) -> str:
    """Text of others as it can be given to a terminal: what is not printable is spelled out."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _shown(text: str) -> str:
    """The same for a console that reads markup."""
    return escape(printable(text))


def event_type(record: EventRecord) -> str:
    """One of :data:`EVENT_TYPES`."""
    match record:
        case Stored():
            return "stored" if len(record.token_ids) else "moved"
        case Removed():
            return "removed"
        case Cleared():
            return "cleared"


def describe(record: EventRecord) -> str:
    """One event in one line."""
    match record:
        case Stored() if not len(record.token_ids):
            medium = TIER_MEDIA[record.tier]
            return f"moved    {len(record.hashes)} blocks to {medium}: {_hashes(record.hashes)}"
        case Stored():
            parent = "root" if record.parent is None else _hash(record.parent)
            extra = "" if record.lora is None else f" lora {record.lora}"
            key = key_of(record.salt)
            extra += f" named by key {key}" if key else "" if record.salt is None else f" salt {record.salt}"
            return (
                f"stored   {len(record.hashes)} blocks, {len(record.token_ids)} tokens, after {parent}, "
                f"{TIER_MEDIA[record.tier]}{extra}: {_hashes(record.hashes)}"
            )
        case Removed():
            return f"removed  {len(record.hashes)} blocks, {TIER_MEDIA[record.tier]}: {_hashes(record.hashes)}"
        case Cleared():
            return "cleared  everything"


def _hashes(hashes: list[int]) -> str:
    shown = " ".join(map(_hash, hashes[:SHOWN_HASHES]))
    return shown + (f" ... {len(hashes) - SHOWN_HASHES} more" if len(hashes) > SHOWN_HASHES else "")


def _hash(value: int) -> str:
    return f"{value & (2**64 - 1):016x}"
