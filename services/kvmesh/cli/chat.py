"""``kvmesh chat``: a conversation in the terminal, or one question from the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
from rich.console import Console
from rich.markup import escape

from kvmesh.cli.errors import UserError
from kvmesh.cli.openai_stream import StreamTimes, stream
from kvmesh.cli.served import served_model
from kvmesh.cli.target import add_target_flags, auth_headers, router_url, tls_of
from kvmesh.net.client import HttpClient, PeerUnreachableError
from kvmesh.protocol.errors import ApiError

__all__ = ["add_arguments", "run"]

ANSWER_TIMEOUT_S = 600.0


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:  # noqa: ARG001 - one command
    """What to say and how to sample."""
    parser.add_argument("message", nargs="*", help="ask this and leave; without it, talk (Ctrl-D leaves)")
    add_target_flags(parser)
    parser.add_argument("--model", help="model name (default: the first one served)")
    parser.add_argument("--system", help="system prompt")
    parser.add_argument("--max-tokens", type=int, default=512, help="longest answer (default: 512)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is deterministic (default: 0.7)")


def run(args: argparse.Namespace) -> int:
    """Talk until the end of input."""
    console = Console()
    url = router_url(args)
    headers, tls = auth_headers(args), tls_of(args)
    model = args.model or anyio.run(served_model, url, headers, bool(args.url), tls)
    open_http = partial(HttpClient, headers=headers, tls=tls)
    history = [{"role": "system", "content": args.system}] if args.system else []
    options = {"model": model, "max_tokens": args.max_tokens, "temperature": args.temperature}
    if args.message:
        history.append({"role": "user", "content": " ".join(args.message)})
        anyio.run(_answer, console, url, open_http, options, history)
        return 0
    console.print(f"[dim]{escape(model)} at {url}; Ctrl-C stops an answer, Ctrl-D leaves[/]", highlight=False)
    while (text := _read(console)) is not None:
        if text.strip():
            history.append({"role": "user", "content": text})
            _turn(console, url, open_http, options, history)
    return 0


def _read(console: Console) -> str | None:
    try:
        return console.input("[bold cyan]> [/]")
    except EOFError:
        console.print()
        return None


def _turn(
    console: Console,
    url: str,
    open_http: Callable[[], HttpClient],
    options: dict[str, Any],
    history: list[dict[str, str]],
) -> None:
    """One answer; what went wrong is said and the conversation goes on."""
    try:
        anyio.run(_answer, console, url, open_http, options, history)
    except KeyboardInterrupt:
        console.print("[dim] (stopped)[/]")
    except UserError as error:
        console.print(f"[red]{escape(str(error))}[/]")
        history.pop()


async def _answer(
    console: Console,
    url: str,
    open_http: Callable[[], HttpClient],
    options: dict[str, Any],
    history: list[dict[str, str]],
) -> None:
    times = StreamTimes()
    pieces: list[str] = []
    try:
        async with open_http() as http:
            body = {**options, "messages": history}
            async for piece in stream(http, f"{url}/v1/chat/completions", body, times, timeout_s=ANSWER_TIMEOUT_S):
                pieces.append(piece)
                console.out(piece, end="", highlight=False)
                console.file.flush()
    except (PeerUnreachableError, ApiError) as error:
        raise UserError(str(error)) from error
    finally:
        # What was said is part of the conversation, even when it was interrupted.
        if pieces:
            console.print()
            history.append({"role": "assistant", "content": "".join(pieces)})
    if times.error is not None:
        raise UserError(times.error)
    cached = f", {times.cached_tokens} of {times.prompt_tokens} prompt tokens cached" if times.cached_tokens else ""
    console.print(
        f"[dim]{times.completion_tokens} tokens, first after {times.ttft_s * 1e3:.0f} ms, "
        f"then {times.tpot_s * 1e3:.1f} ms each{cached}[/]",
        highlight=False,
    )
