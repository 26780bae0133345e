"""API keys from a file: reloaded when it changes, never opening the door by accident."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvmesh.net.auth import ApiKeys


def rewrite(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def test_keys_are_read_and_reloaded(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("alpha  # Ada's\n\n# nobody's\nbeta\n")
    keys = ApiKeys(path, ["fixed"])
    assert keys() == {"alpha", "beta", "fixed"}
    rewrite(path, "gamma\n")
    assert keys() == {"gamma", "fixed"}


def test_a_file_that_goes_bad_keeps_the_last_good_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("alpha\n")
    keys = ApiKeys(path)
    rewrite(path, "\n")
    assert keys() == {"alpha"}
    path.unlink()
    assert keys() == {"alpha"}
    path.write_text("beta\n")
    os.utime(path, ns=(1, 1))
    assert keys() == {"beta"}


def test_an_empty_or_missing_file_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# none\n")
    with pytest.raises(ValueError, match="holds no key"):
        ApiKeys(tmp_path / "keys")
    with pytest.raises(ValueError, match="cannot be read"):
        ApiKeys(tmp_path / "missing")


def test_without_a_file_no_key_is_asked_for() -> None:
    assert ApiKeys()() == frozenset()
