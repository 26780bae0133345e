"""``kvmesh model fetch|list|path``."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from kvmesh.cli.errors import UserError
from kvmesh.models.errors import ModelError
from kvmesh.models.progress import download_bar
from kvmesh.models.store import DEFAULT_MODEL, list_models, path_of, resolve_model

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:  # noqa: ARG001 - one command
    """The three actions."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="fetch|list|path")
    for action, text in (("fetch", "download a built-in model"), ("path", "say where a model lies")):
        command = actions.add_parser(action, help=text, description=f"{text.capitalize()}.")
        command.add_argument("name", nargs="?", default=DEFAULT_MODEL, help=f"(default: {DEFAULT_MODEL})")
    actions.add_parser("list", help="list the models on this machine", description="List the models on this machine.")


def run(args: argparse.Namespace) -> int:
    """Do the action."""
    try:
        if args.action == "list":
            _list()
        elif args.action == "path":
            print(path_of(args.name))
        else:
            with download_bar(f"fetching {args.name}") as progress:
                print(resolve_model(args.name, progress=progress).path)
    except ModelError as error:
        raise UserError(str(error)) from error
    return 0


def _list() -> None:
    table = Table("model", "size", "from", "path", box=None)
    for model in list_models():
        table.add_row(model.name, f"{model.nbytes / 1e6:.0f} MB", model.origin, str(model.path or "not fetched yet"))
    Console().print(table)
