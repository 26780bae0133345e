"""Where a service says at which URL it serves, so that ``kvmesh health`` beside it needs no settings.

``$KVMESH_URL_FILE`` names the file; without the variable nothing is written. Container images set it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from kvmesh.cli.errors import UserError

__all__ = ["Serving", "read_serving", "write_serving"]

VARIABLE = "KVMESH_URL_FILE"


class Serving(NamedTuple):
    """A service in the same container: its base URL, and the files that a TLS connection to it needs."""

    url: str
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None


def write_serving(serving: Serving) -> None:
    """Say it, if the variable is set.

    Raises:
        UserError: the file cannot be written.
    """
    if not (name := os.environ.get(VARIABLE)):
        return
    path = Path(name)
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(json.dumps(serving._asdict()), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}); change or unset {VARIABLE}") from error


def read_serving() -> Serving | None:
    """What was said; None without the variable.

    Raises:
        UserError: nothing has been said yet.
    """
    if not (name := os.environ.get(VARIABLE)):
        return None
    try:
        return Serving(**json.loads(Path(name).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"no service has said in {name} where it serves: it is still starting, or has failed"
        ) from error
