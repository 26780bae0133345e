"""The command line of ``kvmesh bench``."""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
import itertools
import time
from pathlib import Path
from urllib.parse import urlsplit

import anyio
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvmesh.cli.bench.report import print_report, write_json, write_plot
from kvmesh.cli.bench.runner import Load, Runner, read_vocabulary
from kvmesh.cli.bench.summary import summarize
from kvmesh.cli.bench.workload import LengthRange, arrivals_s, requests
from kvmesh.cli.errors import UserError
from kvmesh.cli.served import served_model
from kvmesh.cli.target import add_target_flags, auth_headers, router_url, tls_of

__all__ = ["add_arguments", "run"]

MOST_REQUESTS = 100_000
MOST_DURATION_S = 3600.0
MOST_CONCURRENCY = 4096
STEADY_PROMPT = LengthRange(32, 32)
FAILED = 1


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:  # noqa: ARG001 - one command
    """What to send, how fast, for how long, and where to write the result."""
    add_target_flags(parser)
    parser.add_argument("--model", help="model name (default: the first one served)")
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument("--rate", type=float, metavar="R", help="R requests a second on average (Poisson), open loop")
    pace.add_argument("--concurrency", type=int, default=4, metavar="C", help="C clients, closed loop (default: 4)")
    parser.add_argument("--requests", type=int, default=50, metavar="N", help="N requests in all (default: 50)")
    parser.add_argument("--duration-s", type=float, default=120.0, help="stop after this time (default: 120)")
    parser.add_argument("--request-timeout-s", type=float, default=180.0, help="bound of one request (default: 180)")
    parser.add_argument(
        "--prompt-tokens", type=_lengths, default=LengthRange(256, 256), metavar="N[:M]", help="(default: 256)"
    )
    parser.add_argument(
        "--output-tokens", type=_lengths, default=LengthRange(64, 64), metavar="N[:M]", help="(default: 64)"
    )
    parser.add_argument(
        "--shared-prefix-tokens", type=int, default=0, metavar="N", help="leading tokens that all prompts share"
    )
    parser.add_argument(
        "--steady", type=int, default=0, metavar="S", help="S streams that run beside the load and are measured apart"
    )
    parser.add_argument(
        "--steady-output-tokens", type=int, default=256, metavar="N", help="length of theirs (default: 256)"
    )
    parser.add_argument("--seed", type=int, default=0, help="equal seeds send equal requests (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write parameters, summary and every request")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="write a plot (needs matplotlib)")
    parser.add_argument("--allow-remote", action="store_true", help="send to a server that is not on this machine")


def run(args: argparse.Namespace) -> int:
    """Send the load and report; 1 when any request failed."""
    _check(args)
    console = Console()
    url = router_url(args)
    headers, tls = auth_headers(args), tls_of(args)
    if not args.allow_remote and not _is_loopback(url):
        raise UserError(f"{url} is not this machine; add --allow-remote if its owner knows about the load")
    model = args.model or anyio.run(served_model, url, headers, bool(args.url), tls)
    load = _load(args, anyio.run(read_vocabulary, url, model, headers, bool(args.url), tls))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"{model} at {url}", total=None if args.steady else args.requests)
        runner = Runner(url, model, headers, args.request_timeout_s, lambda done: bar.update(task, completed=done), tls)
        records, wall_s = anyio.run(runner.run, load, args.duration_s)
    summaries = summarize(records, wall_s)
    print_report(console, summaries, records)
    if args.json:
        write_json(args.json, _parameters(args, url, model), summaries, records)
    if args.plot:
        write_plot(args.plot, summaries, records)
    return 0 if all(record.outcome in ("ok", "unfinished") for record in records) and records else FAILED


def _check(args: argparse.Namespace) -> None:
    bounds = (
        ("--requests", args.requests, 1, MOST_REQUESTS),
        ("--concurrency", args.concurrency, 1, MOST_CONCURRENCY),
        ("--duration-s", args.duration_s, 0.001, MOST_DURATION_S),
        ("--rate", 1.0 if args.rate is None else args.rate, 0.001, 100_000.0),
        ("--steady", args.steady, 0, MOST_CONCURRENCY),
        ("--steady-output-tokens", args.steady_output_tokens, 2, 1_000_000),
        ("--shared-prefix-tokens", args.shared_prefix_tokens, 0, args.prompt_tokens.least),
    )
    for name, value, least, most in bounds:
        if not least <= value <= most:
            raise UserError(f"{name} must be between {least:g} and {most:g}, not {value:g}")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib; run `make venv EXTRAS=bench`")


def _load(args: argparse.Namespace, vocabulary: list[int]) -> Load:
    specs = requests(
        "load",
        vocabulary,
        args.prompt_tokens,
        args.output_tokens,
        seed=args.seed,
        shared_prefix_tokens=args.shared_prefix_tokens,
    )
    length = LengthRange(args.steady_output_tokens, args.steady_output_tokens)
    return Load(
        requests=itertools.islice(specs, args.requests),
        arrivals_s=None if args.rate is None else arrivals_s(args.rate, seed=args.seed),
        concurrency=args.concurrency,
        steady=tuple(
            requests("steady", vocabulary, STEADY_PROMPT, length, seed=args.seed + 1 + index)
            for index in range(args.steady)
        ),
    )


def _parameters(args: argparse.Namespace, url: str, model: str) -> dict[str, object]:
    names = ("rate", "requests", "duration_s", "shared_prefix_tokens", "steady", "steady_output_tokens", "seed")
    return {
        "url": url,
        "model": model,
        "ended_unix_s": round(time.time(), 3),
        "concurrency": None if args.rate is not None else args.concurrency,
        "prompt_tokens": list(args.prompt_tokens),
        "output_tokens": list(args.output_tokens),
        **{name: getattr(args, name) for name in names},
    }


def _lengths(text: str) -> LengthRange:
    try:
        return LengthRange.parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a length such as 128, or a range such as 128:512") from None


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
