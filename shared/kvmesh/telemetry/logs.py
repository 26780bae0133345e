"""Structured logs: one processor chain, rendered as JSON for machines or as text for a console."""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal, cast

import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import EventDict, Processor, WrappedLogger

__all__ = ["configure_logging", "get_logger"]

LogFormat = Literal["json", "console"]


def configure_logging(service: str, level: str = "info", format: LogFormat = "console") -> None:
    """Send this process's logs, ours and the libraries', to stderr through one chain.

    Args:
        service: name that every line carries.
        level: ``debug``, ``info``, ``warning`` or ``error``.
        format: ``json`` (one object a line) or ``console``.
    """

    def add_service(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event.setdefault("service", service)
        return event

    chain: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        add_service,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # Tracebacks without local variables, which hold prompts, keys and secrets.
    renderer: list[Processor] = (
        [
            structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)),
            structlog.processors.JSONRenderer(),
        ]
        if format == "json"
        else [
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
        ]
    )
    structlog.configure(
        processors=[*chain, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(_number(level)),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=chain,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Libraries speak up only when something is wrong; what the mesh does is said by the mesh.
    root.setLevel(max(_number(level), logging.WARNING))
    logging.getLogger("kvmesh").setLevel(_number(level))


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger named below ``kvmesh``; context bound with ``structlog.contextvars`` appears on its lines."""
    return cast("structlog.stdlib.BoundLogger", structlog.get_logger(f"kvmesh.{name}"))


def _number(level: str) -> int:
    number: Any = getattr(logging, level.upper(), None)
    if not isinstance(number, int):
        raise ValueError(f"log level {level!r} is not debug, info, warning or error")
    return number
