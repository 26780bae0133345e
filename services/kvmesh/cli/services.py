"""``kvmesh router|context|generation|worker|indexer|coordinator``: one service in the foreground."""

from __future__ import annotations

import argparse
import importlib
from typing import Any, NamedTuple

from pydantic import BaseModel

from kvmesh.cli.errors import UserError
from kvmesh.cli.flags import add_settings_flags, load_from_flags
from kvmesh.cli.parent import end_with_parent
from kvmesh.cli.serving_file import Serving, write_serving
from kvmesh.config import ConfigError, CoordinatorSettings, IndexerSettings, RouterSettings, WorkerSettings
from kvmesh.config.errors import sentence_of
from kvmesh.models.errors import ModelError
from kvmesh.net.address import BindError

__all__ = ["add_arguments", "run"]


class _Service(NamedTuple):
    module: str
    settings: type[BaseModel]
    fixed: dict[str, Any]


_SERVICES = {
    "router": _Service("kvmesh.router.main", RouterSettings, {}),
    "context": _Service("kvmesh.context.main", WorkerSettings, {"role": "context"}),
    "generation": _Service("kvmesh.generation.main", WorkerSettings, {"role": "generation"}),
    "worker": _Service("kvmesh.worker.main", WorkerSettings, {"role": "both"}),
    "indexer": _Service("kvmesh.indexer.main", IndexerSettings, {}),
    "coordinator": _Service("kvmesh.coordinator.main", CoordinatorSettings, {}),
}


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """One flag a setting."""
    service = _SERVICES[name]
    add_settings_flags(parser, service.settings, skip=frozenset(service.fixed))


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT."""
    service = _SERVICES[args.command]
    end_with_parent()
    settings = load_from_flags(args, service.settings, service.fixed)
    module = importlib.import_module(service.module)
    serve = module.run_worker if args.command == "worker" else module.run
    try:
        serve(settings, on_ready=lambda url: write_serving(_serving(url, settings)))
    except (ConfigError, ModelError, BindError, ExceptionGroup) as error:
        sentence = _sentence(error)
        if sentence is None:
            raise
        raise UserError(sentence) from error
    return 0


def _serving(url: str, settings: Any) -> Serving:
    return Serving(url, settings.tls.ca_file, settings.tls.cert_file, settings.tls.key_file)


def _sentence(error: Exception) -> str | None:
    """What a person should do about an error that stopped a service from starting; None for our own mistakes."""
    if isinstance(error, ExceptionGroup):
        return next((text for part in error.exceptions if (text := _sentence(part))), None)
    if isinstance(error, ConfigError):
        return sentence_of(error)
    if isinstance(error, ModelError):
        return str(error)
    if isinstance(error, BindError):
        flag = "--" + error.setting.replace("_", "-")
        return f"{error} with {flag}" + (" (0: any free one)" if error.setting == "port" else "")
    return None
