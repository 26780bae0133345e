"""What a log line holds, and what it must never hold."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from kvmesh.telemetry import configure_logging, get_logger
from kvmesh.telemetry.logs import LogFormat


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("kvmesh")
    before = (root.handlers[:], root.level, ours.level)
    yield
    root.handlers[:], root.level, ours.level = before
    structlog.reset_defaults()


PROMPT = "my password is swordfish"


def fail(prompt: str) -> None:
    secret = prompt.upper()
    raise ValueError(f"{len(secret)} characters are too many")


@pytest.mark.parametrize("format", ["json", "console"])
@pytest.mark.parametrize("library", [False, True], ids=["ours", "a library's"])
def test_a_traceback_shows_no_local_variables(
    format: LogFormat, library: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("test", format=format)
    log = logging.getLogger("aiohttp.server") if library else get_logger("test")
    try:
        fail(PROMPT)
    except ValueError:
        log.exception("it failed")
    line = capsys.readouterr().err
    for part in ("it failed", "ValueError", "24 characters are too many", "test_logs.py", "fail"):
        assert part in line
    assert "swordfish" not in line.lower()


def test_a_json_line_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("test", format="json")
    with structlog.contextvars.bound_contextvars(request_id="r1"):
        get_logger("here").warning("something", pages=3)
    record = json.loads(capsys.readouterr().err)
    assert record.pop("timestamp")
    assert record == {"event": "something", "level": "warning", "pages": 3, "request_id": "r1", "service": "test"}
