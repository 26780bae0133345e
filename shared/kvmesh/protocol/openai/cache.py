"""What a request says about the KV cache: how long its blocks are worth keeping, and which conversation it continues.

The JSON forms are TensorRT-LLM's ``kv_cache_retention_config`` and ``conversation_params``.
"""

from __future__ import annotations

import msgspec

from kvmesh.protocol.disagg import DisaggregatedParams
from kvmesh.protocol.errors import bad_request
from kvmesh.protocol.retention import DEFAULT_PRIORITY, MAX_PRIORITY, RetentionConfig, TokenRangeRetention

__all__ = [
    "MAX_CONVERSATION_ID_CHARS",
    "MAX_TOKEN_RANGES",
    "ConversationParams",
    "KvCacheRetention",
    "TokenRange",
    "conversation_id_of",
    "retention_of",
]

MAX_TOKEN_RANGES = 256
"""Every range is looked at for every block of the prompt."""
MAX_TOKEN_POSITION = 2**31 - 1
MAX_DURATION_MS = 10**12
"""Some 30 years; nanoseconds still fit into 64 bits."""
MAX_CONVERSATION_ID_CHARS = 512

_FIELD = "kv_cache_retention_config"
_DEBUGGING_ONLY = "it serves TensorRT-LLM's debugging only, and blocks move between this cache's tiers by themselves"


class TokenRange(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One of ``token_range_retention_configs``; see :class:`kvmesh.protocol.retention.TokenRangeRetention`."""

    token_start: int
    token_end: int | None = None
    priority: int
    duration_ms: int | None = None


class KvCacheRetention(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The JSON object ``kv_cache_retention_config``."""

    token_range_retention_configs: list[TokenRange] | None = None
    """Priorities of prompt blocks; where ranges overlap, the earlier one wins."""
    decode_retention_priority: int | None = None
    """Of blocks that hold generated tokens; default 35."""
    decode_duration_ms: int | None = None
    transfer_mode: str | None = None
    """Accepted only as TensorRT-LLM's default, ``DRAM``."""
    directory: str | None = None
    """Accepted only empty."""


class ConversationParams(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The JSON object ``conversation_params``."""

    conversation_id: str | None = None


def retention_of(config: KvCacheRetention | None) -> RetentionConfig | None:
    """The engine's form of a request's retention, None without one.

    Raises:
        ApiError: 400 naming the value that is out of range.
    """
    if config is None:
        return None
    if config.transfer_mode not in (None, "DRAM"):
        raise _refused("transfer_mode")
    if config.directory:
        raise _refused("directory")
    ranges = config.token_range_retention_configs or []
    where = f"{_FIELD}.token_range_retention_configs"
    if len(ranges) > MAX_TOKEN_RANGES:
        raise bad_request(f"'{where}' has {len(ranges)} ranges; at most {MAX_TOKEN_RANGES} are allowed.", param=where)
    priority = config.decode_retention_priority
    decode_priority = DEFAULT_PRIORITY if priority is None else priority
    _check(f"{_FIELD}.decode_retention_priority", decode_priority, 0, MAX_PRIORITY)
    _check_duration(f"{_FIELD}.decode_duration_ms", config.decode_duration_ms)
    return RetentionConfig(
        token_range_retention_configs=tuple(_range(f"{where}[{index}]", item) for index, item in enumerate(ranges)),
        decode_retention_priority=decode_priority,
        decode_duration_ms=config.decode_duration_ms,
    )


def conversation_id_of(conversation: ConversationParams | None, params: DisaggregatedParams | None) -> str | None:
    """The conversation that a request names, without surrounding blanks; None when it names none.

    Raises:
        ApiError: 400 when the id is too long, or both places name a different one.
    """
    newer = _stripped("conversation_params", None if conversation is None else conversation.conversation_id)
    older = _stripped("disaggregated_params", None if params is None else params.conversation_id)
    if newer is not None and older is not None and newer != older:
        raise bad_request(
            "'conversation_params' and 'disaggregated_params' name different conversations; send one of them.",
            param="conversation_params.conversation_id",
        )
    return newer or older


def _range(where: str, item: TokenRange) -> TokenRangeRetention:
    _check(f"{where}.token_start", item.token_start, 0, MAX_TOKEN_POSITION)
    if item.token_end is not None:
        if item.token_end <= item.token_start:
            raise _invalid(
                f"{where}.token_end",
                item.token_end,
                f"above token_start, which is {item.token_start}; leave it out for 'to the end of the prompt'",
            )
        _check(f"{where}.token_end", item.token_end, 1, MAX_TOKEN_POSITION)
    _check(f"{where}.priority", item.priority, 0, MAX_PRIORITY)
    _check_duration(f"{where}.duration_ms", item.duration_ms)
    return TokenRangeRetention(
        token_start=item.token_start, token_end=item.token_end, priority=item.priority, duration_ms=item.duration_ms
    )


def _check(where: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise _invalid(where, value, f"at least {least} and at most {most}")


def _check_duration(where: str, value: int | None) -> None:
    if value is not None and not 0 < value <= MAX_DURATION_MS:
        raise _invalid(where, value, f"at least 1 and at most {MAX_DURATION_MS}; leave it out for 'for ever'")


def _invalid(where: str, value: int, rule: str) -> Exception:
    shown = value if abs(value) < 10**30 else "an integer of that size"
    return bad_request(f"'{where}' is {shown}; it must be {rule}.", param=where, code="invalid_value")


def _refused(name: str) -> Exception:
    where = f"{_FIELD}.{name}"
    return bad_request(
        f"'{where}' is refused: {_DEBUGGING_ONLY}. Leave it out.", param=where, code="unsupported_parameter"
    )


def _stripped(where: str, conversation_id: str | None) -> str | None:
    stripped = (conversation_id or "").strip()
    if len(stripped) > MAX_CONVERSATION_ID_CHARS:
        param = f"{where}.conversation_id"
        raise bad_request(
            f"'{param}' has {len(stripped)} characters; at most {MAX_CONVERSATION_ID_CHARS} are allowed.", param=param
        )
    return stripped or None
