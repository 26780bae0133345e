"""``kvmesh COMMAND ...``: finds the command's module, parses its flags, runs it."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn, Protocol, cast

from kvmesh.cli.errors import UserError, user_errors
from kvmesh.protocol.version import package_version

__all__ = ["COMMANDS", "Command", "main"]


class CommandModule(Protocol):
    """What a command's module offers."""

    def add_arguments(self, parser: argparse.ArgumentParser, name: str) -> None:
        """Add the flags of command ``name``."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it; the exit status."""


class Command(NamedTuple):
    """Where a command lives and what ``kvmesh --help`` says of it."""

    module: str
    help: str


COMMANDS = {
    "up": Command("kvmesh.cli.up", "start a whole mesh on this machine"),
    "down": Command("kvmesh.cli.down", "stop the mesh that 'up' started"),
    "status": Command("kvmesh.cli.status", "members, loads, cache and transfers"),
    "transfers": Command("kvmesh.cli.transfers", "search the ledger of KV cache transfers"),
    "chat": Command("kvmesh.cli.chat", "talk to the model in the terminal"),
    "bench": Command("kvmesh.cli.bench.command", "measure a mesh under load"),
    "events": Command("kvmesh.cli.events", "follow the KV cache events"),
    "health": Command("kvmesh.cli.health", "ask one service whether it is well"),
    "model": Command("kvmesh.cli.model", "fetch, list and find models"),
    "keys": Command("kvmesh.cli.keys", "make certificates and keys for a mesh"),
    "router": Command("kvmesh.cli.services", "run a router"),
    "context": Command("kvmesh.cli.services", "run a context (prefill) server"),
    "generation": Command("kvmesh.cli.services", "run a generation (decode) server"),
    "worker": Command("kvmesh.cli.services", "run a server that does both"),
    "indexer": Command("kvmesh.cli.services", "run a KV event indexer"),
    "coordinator": Command("kvmesh.cli.services", "run a transfer coordinator"),
}

USER_ERROR = 2
"""Exit status when what was asked for cannot be done as it stands."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the list of all flags would hide it."""

    def error(self, message: str) -> NoReturn:
        """Exit with :data:`USER_ERROR`."""
        self.exit(USER_ERROR, f"{self.prog}: {message}; '{self.prog} --help' lists what there is\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the ``kvmesh`` script."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in COMMANDS:
        return _top_level(arguments)
    name, *rest = arguments
    command = COMMANDS[name]
    # Only this command's module is imported: 'kvmesh model path' must not pay for an HTTP stack or a tensor library.
    module = cast("CommandModule", importlib.import_module(command.module))
    parser = _Parser(
        prog=f"kvmesh {name}",
        description=f"{command.help[0].upper()}{command.help[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser, name)
    args, unknown = parser.parse_known_args(rest)
    if unknown:
        parser.error(_unknown(unknown[0], parser))
    args.command, args.raw = name, arguments
    try:
        return module.run(args)
    except UserError as error:
        print(f"kvmesh {name}: {error}", file=sys.stderr)
        return USER_ERROR
    except ExceptionGroup as group:  # from a command that works in several tasks
        sentences = user_errors(group)
        if not sentences:
            raise
        print(*(f"kvmesh {name}: {text}" for text in sentences), sep="\n", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return 130


def _unknown(text: str, parser: argparse.ArgumentParser) -> str:
    flag = text.partition("=")[0]
    known = [option for action in parser._actions for option in action.option_strings]  # noqa: SLF001 - no public list
    near = difflib.get_close_matches(flag, known, n=1)
    return f"unknown argument {flag!r}" + (f"; did you mean {near[0]}?" if near else "")


def _top_level(arguments: list[str]) -> int:
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="kvmesh",
        usage="kvmesh COMMAND [flags]",
        description="KVMesh: disaggregated LLM serving. 'kvmesh up' starts everything on this machine.",
        epilog="commands:\n"
        + "\n".join(f"  {name:{width}}  {c.help}" for name, c in COMMANDS.items())
        + "\n\n'kvmesh COMMAND --help' lists a command's flags.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="say which version this is")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    args, _ = parser.parse_known_args(arguments)
    if args.version:
        print(f"kvmesh {package_version()}")
        return 0
    if args.command is not None:
        parser.error(f"there is no command {args.command!r}; the commands are {', '.join(COMMANDS)}")
    parser.print_help()
    return 0 if not arguments else USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
