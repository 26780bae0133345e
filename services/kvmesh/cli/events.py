"""``kvmesh events``: the KV cache event streams of all workers, readable, as they come."""

from __future__ import annotations

import argparse
import functools
import os

import anyio
from rich.console import Console

from kvmesh.cli.errors import UserError
from kvmesh.cli.events_follow import follow_indexer, follow_mesh, follow_one
from kvmesh.cli.events_view import EVENT_TYPES, DecodeTokens, EventFilter, Printer
from kvmesh.cli.target import (
    add_coordinator_flags,
    auth_headers,
    coordinator_url,
    curve_of,
    indexer_url,
    tls_of,
)
from kvmesh.cli.trust import add_curve_flags
from kvmesh.config import ConfigError
from kvmesh.events.keyed import KeyRing
from kvmesh.events.records import Tier
from kvmesh.models.errors import ModelError
from kvmesh.models.store import resolve_model
from kvmesh.models.tokenizer import Tokenizer

__all__ = ["add_arguments", "run"]

OF_THE_MESH = "-"
"""Value of ``--indexer`` without a URL."""

KEY_FILE_VARIABLE = "KVMESH_EVENT_KEY_FILE"


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:  # noqa: ARG001 - one command
    """Whose events, which of them, and what is shown."""
    add_coordinator_flags(parser)
    parser.add_argument("--endpoint", metavar="ZMQ", help="one publisher, such as tcp://127.0.0.1:5557; no coordinator")
    parser.add_argument(
        "--indexer",
        metavar="URL",
        nargs="?",
        const=OF_THE_MESH,
        help="the merged stream of an indexer (default: that of the mesh 'up' started)",
    )
    parser.add_argument("--worker", action="append", metavar="ID", help="only this worker; may be repeated")
    parser.add_argument("--type", action="append", choices=EVENT_TYPES, help="only such events; may be repeated")
    parser.add_argument("--model", metavar="NAME", help="only events of this model")
    parser.add_argument("--tenant", metavar="NAME", help="only events of this tenant")
    parser.add_argument("--tier", choices=[tier.name.lower() for tier in Tier], help="only of this tier, and 'cleared'")
    parser.add_argument("--lora", metavar="NAME", help="only blocks of this adapter (name or number), and removals")
    parser.add_argument("--salt", metavar="TEXT", help="only blocks of sequences with this cache salt, and removals")
    parser.add_argument("--text", action="store_true", help="show the text of stored blocks")
    parser.add_argument("--text-chars", type=int, default=200, metavar="N", help="at most so much of it (default: 200)")
    parser.add_argument(
        "--tokenizer", metavar="MODEL", help="for --text: this model's tokenizer instead of the worker's"
    )
    add_curve_flags(parser)
    parser.add_argument(
        "--event-key-file",
        metavar="FILE",
        help=f"keys of publishers that tell names instead of tokens (default: {KEY_FILE_VARIABLE})",
    )
    parser.add_argument("--count", type=int, metavar="N", help="leave after N events")


def run(args: argparse.Namespace) -> int:
    """Follow until Ctrl-C.

    Raises:
        UserError: nothing answers, or what is asked for does not go together.
    """
    if args.endpoint and (args.indexer or args.worker or args.model):
        raise UserError(
            "--endpoint is one publisher that says nothing of itself: leave out --indexer, --worker, --model"
        )
    if args.endpoint and args.text and not args.tokenizer:
        raise UserError("--text needs --tokenizer MODEL here: a publisher does not say which model it serves")
    if args.count is not None and args.count < 1:
        raise UserError(f"--count must be at least 1, not {args.count}; leave it out to follow until Ctrl-C")
    workers = frozenset(args.worker or ())
    wanted = EventFilter(
        frozenset(args.type or ()),
        model=args.model,
        tenant=args.tenant,
        tier=None if args.tier is None else Tier[args.tier.upper()],
        lora=args.lora,
        salt=args.salt,
    )
    printer = Printer(
        Console(),
        args.count,
        wanted,
        decode=_decoder(args.tokenizer) if args.text else None,
        text_chars=max(1, args.text_chars),
        keys=_keys(args.event_key_file or os.environ.get(KEY_FILE_VARIABLE)),
    )
    security = curve_of(args)
    if args.endpoint:
        anyio.run(follow_one, args.endpoint, printer, security)
    elif args.indexer:
        url = indexer_url(None if args.indexer == OF_THE_MESH else args.indexer)
        anyio.run(follow_indexer, url, workers, printer, auth_headers(args), tls_of(args), security)
    else:
        url, headers, given = coordinator_url(args), auth_headers(args), bool(args.coordinator)
        follow = functools.partial(follow_mesh, given=given)
        anyio.run(follow, url, workers, printer, headers, tls_of(args), security)
    return 0


def _keys(path: str | None) -> KeyRing | None:
    try:
        return KeyRing.load(path, "--event-key-file")
    except ConfigError as error:
        raise UserError(str(error)) from error


def _decoder(fixed: str | None) -> DecodeTokens:
    """Decodes tokens with the tokenizer of a stream's model, or of ``fixed``, loaded when it is first needed."""
    loaded: dict[str, Tokenizer | str] = {}

    def decode(model: str, token_ids: list[int]) -> str:
        name = fixed or model
        tokenizer = loaded.get(name)
        if tokenizer is None:
            try:
                tokenizer = Tokenizer.from_source(resolve_model(name))
            except ModelError as error:
                tokenizer = f"no tokenizer of {name!r}: {error}; give one with --tokenizer"
            loaded[name] = tokenizer
        if isinstance(tokenizer, str):
            raise ValueError(tokenizer)
        if any(not 0 <= token < tokenizer.vocab_size for token in token_ids):
            raise ValueError("these are no token ids of this model: keyed, or multimodal")
        return tokenizer.decode(token_ids, skip_special_tokens=False)

    return decode
