"""Streams that reveal no tokens: blocks go by a keyed name instead of their tokens and hashes.

A block's name is ``BLAKE2b-64(key, block key)``, and its V2 block key is a SHA-256 chain over everything it depends
on: adapter, salt, and all tokens up to its end. So one name of 8 bytes replaces tokens, hash, adapter and salt, and
without the key it says only whether two blocks are the same.

A reader that has the key asks with a prompt in disguise: each block's name, written as tokens. Names are equal where
blocks are, so the index answers as ever; it keeps what is keyed apart by a salt that no request can have.
"""

from __future__ import annotations

import re
import secrets
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvmesh.config.errors import ConfigError
from kvmesh.hashing import ReuseScope, TokenIds, v2_block_keys, v2_root

__all__ = [
    "KEYED_SALT_PREFIX",
    "MAX_KEYED_BLOCK",
    "MAX_UNSURE_TOKENS",
    "MIN_KEYED_BLOCK",
    "NAME_BYTES",
    "KeyRing",
    "KeyRingPart",
    "StreamKey",
    "disguised",
    "generate_key",
    "is_readable",
    "key_of",
    "keyed_salt",
]

KEY_BYTES = 32
NAME_BYTES = 8
ID_BYTES = 8

MIN_KEYED_BLOCK = 2
"""Tokens per block that a name of 8 bytes fits into, 4 bytes each."""

MAX_KEYED_BLOCK = 4096
"""Tokens per block that are believed. A name of 8 bytes stands for this many, so an event of some bytes could ask its
reader for any amount of memory."""

MAX_TOKENS, MAX_UNSURE_TOKENS = 1 << 28, 1 << 24
"""That the names of one batch are written out to, of a publisher whose block size is known, and of another. The whole
state of a large worker may come as one batch."""

SIZES_TOLD = 2
"""Block sizes that one publisher's events can make prompts be looked up in: one, and another after a restart."""

KEYED_SALT_PREFIX = "\0keyed:"

_KEY = re.compile(r"[0-9a-f]{64}")
_BLOCK_PURPOSE = b"kvmesh block"
_ID_PURPOSE = b"kvmesh key id"


class StreamKey:
    """A secret that publishers and readers share.

    Args:
        secret: 32 bytes.
    """

    def __init__(self, secret: bytes) -> None:
        self.key_id = blake2b(key=secret, digest_size=ID_BYTES, person=_ID_PURPOSE).hexdigest()
        """16 hexadecimal digits that tell keys apart and say nothing about the secret."""
        self._keyed = blake2b(key=secret, digest_size=NAME_BYTES, person=_BLOCK_PURPOSE)

    @property
    def salt(self) -> str:
        """What its blocks are kept apart by."""
        return keyed_salt(self.key_id)

    def names(self, block_keys: Sequence[bytes]) -> NDArray[np.uint64]:
        """Names of blocks, ``[n]``, from their V2 block keys."""
        # Copies of one prepared state: half the cost of keying each hash anew.
        copy, names = self._keyed.copy, []
        for key in block_keys:
            state = copy()
            state.update(key)
            names.append(state.digest())
        return np.frombuffer(b"".join(names), ">u8").astype(np.uint64)

    def disguise(self, token_ids: TokenIds, block_size: int, scope: ReuseScope) -> TokenIds:
        """A prompt as its keyed blocks look in the index: int32, without the last partial block."""
        keys = v2_block_keys(token_ids, block_size, v2_root(scope))
        return disguised(self.names(keys), block_size)


class KeyRing:
    """Every key that may be read with; the first is published with.

    Keys are no secret of one publisher and its block sizes are only its word, so each has a :meth:`part` of its own.

    Args:
        keys: at least one, no two equal.
    """

    def __init__(self, keys: Sequence[StreamKey]) -> None:
        self.first = keys[0]
        self._keys = {key.key_id: key for key in keys}
        self._block_sizes: Counter[int] = Counter()

    @classmethod
    def load(cls, path: str | Path | None, setting: str) -> KeyRing | None:
        """From a file of keys, 64 hexadecimal digits a line; ``#`` starts a comment. None without a file.

        Args:
            path: of the file.
            setting: that names it, for messages.

        Raises:
            ConfigError: it cannot be read, others may read it, or it holds no key; the message says what to do.
        """
        if path is None:
            return None
        try:
            mode = Path(path).stat().st_mode
            lines = Path(path).read_text(encoding="ascii").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"{setting} {path} cannot be read: {reason}; 'kvmesh keys events FILE' makes a key"
            ) from error
        if mode & (stat.S_IRWXO | stat.S_IWGRP):
            raise ConfigError(f"{setting} {path} may be read by others, or changed by its group; chmod 600 {path}")
        texts = dict.fromkeys(filter(None, (line.partition("#")[0].strip().lower() for line in lines)))
        if not texts or not all(_KEY.fullmatch(text) for text in texts):
            raise ConfigError(
                f"{setting} {path}: each line is a key of {2 * KEY_BYTES} hexadecimal digits, and there is at least "
                "one; 'kvmesh keys events FILE' makes a key"
            )
        return cls([StreamKey(bytes.fromhex(text)) for text in texts])

    def __contains__(self, key_id: str) -> bool:
        return key_id in self._keys

    def __iter__(self) -> Iterator[StreamKey]:
        return iter(self._keys.values())

    @property
    def block_sizes(self) -> frozenset[int]:
        """Of keyed blocks that may be in the index: prompts are disguised for each."""
        return frozenset(self._block_sizes)

    def part(self, block_size: int = 0) -> KeyRingPart:
        """The same keys for one publisher's events; :meth:`KeyRingPart.close` it when the publisher is gone.

        Args:
            block_size: tokens per block that it is known to have, 0: its events say.
        """
        return KeyRingPart(self, block_size)

    def expect(self, block_size: int) -> None:
        """Someone may have keyed blocks of this many tokens."""
        self._block_sizes[block_size] += 1

    def expect_no_more(self, block_size: int) -> None:
        """Takes one :meth:`expect` back."""
        self._block_sizes[block_size] -= 1
        self._block_sizes += Counter()  # without those at zero


class KeyRingPart:
    """What one publisher's keyed events are read with. See :meth:`KeyRing.part`."""

    def __init__(self, ring: KeyRing, block_size: int) -> None:
        self._ring = ring
        self._known = block_size
        self.max_tokens = MAX_TOKENS if block_size else MAX_UNSURE_TOKENS
        """To which the names of one batch may be written out."""
        self._told: list[int] = []
        self._closed = False
        if believable(block_size):
            # An index that was restored may hold blocks of a publisher whose events are yet to come.
            self._expect(block_size)

    def __contains__(self, key_id: str) -> bool:
        return key_id in self._ring

    def admits(self, block_size: int) -> bool:
        """Whether blocks of this many tokens can be the publisher's; prompts are looked up in them from now on."""
        if not believable(block_size) or self._known not in (0, block_size):
            return False
        if block_size not in self._told:
            self._expect(block_size)
        return True

    def close(self) -> None:
        """The publisher's blocks are gone. Idempotent."""
        self._closed = True
        while self._told:
            self._ring.expect_no_more(self._told.pop())

    def _expect(self, block_size: int) -> None:
        if self._closed:
            return
        self._told.append(block_size)
        self._ring.expect(block_size)
        if len(self._told) > SIZES_TOLD:
            self._ring.expect_no_more(self._told.pop(0))


def believable(block_size: int) -> bool:
    """Whether keyed blocks can have this many tokens."""
    return MIN_KEYED_BLOCK <= block_size <= MAX_KEYED_BLOCK


def keyed_salt(key_id: str) -> str:
    """Stands where a salt would, for everything that is named by one key."""
    return KEYED_SALT_PREFIX + key_id


def key_of(salt: str | None) -> str | None:
    """Of what is named by a key, that key's id; None for other salts."""
    return None if salt is None or not salt.startswith(KEYED_SALT_PREFIX) else salt.removeprefix(KEYED_SALT_PREFIX)


def is_readable(salt: str | None, keys: KeyRing | KeyRingPart | None) -> bool:
    """Whether what is told under a salt can be read: it is not keyed, or its key is known."""
    key = key_of(salt)
    return key is None or (keys is not None and key in keys)


def disguised(names: NDArray[np.uint64], block_size: int) -> TokenIds:
    """Names as tokens: the two halves of each, then zeros up to ``block_size``; int32 ``[n * block_size]``."""
    blocks = np.zeros((len(names), block_size), np.int32)
    blocks[:, :MIN_KEYED_BLOCK] = names.astype("<u8").view("<i4").reshape(-1, MIN_KEYED_BLOCK)
    return blocks.reshape(-1)


def generate_key() -> str:
    """A new key as the files hold it."""
    return secrets.token_hex(KEY_BYTES)
