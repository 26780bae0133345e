"""API keys from a file: reloaded when it changes, never opening the door by accident, named in metrics only."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvmesh.config import ConfigError
from kvmesh.net.auth import ApiKeys, KeyMetrics, read_keys


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
    with pytest.raises(ConfigError, match="holds no key"):
        ApiKeys(tmp_path / "keys")
    with pytest.raises(ConfigError, match="cannot be read"):
        ApiKeys(tmp_path / "missing")


def test_without_a_file_no_key_is_asked_for() -> None:
    assert ApiKeys()() == frozenset()
    assert not ApiKeys().asked


def test_a_key_may_have_a_name_and_both_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("ada sk-1  # her laptop\nsk-2\nbob-ci\tsk-3\n")
    assert read_keys(path) == {"sk-1": "ada", "sk-2": "unnamed", "sk-3": "bob-ci"}
    keys = ApiKeys(path)
    assert [keys.admit(given) for given in ("sk-1", "sk-3", "sk-3", "sk-2", "ada", "", "sk-")] == [
        "ada", "bob-ci", "bob-ci", "unnamed", None, None, None,
    ]  # fmt: skip


def test_a_line_that_is_neither_is_named_without_its_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    for line in ("ada lovelace sk-secret", "a/b sk-secret"):
        path.write_text(f"sk-first\n{line}\n")
        with pytest.raises(ConfigError, match="line 2") as caught:
            ApiKeys(path)
        assert "secret" not in str(caught.value)


def test_metrics_show_names_and_no_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("ada sk-1\nsk-2\n")
    keys = ApiKeys(path, ["sk-3"])
    for given in ("sk-1", "sk-1", "sk-2", "sk-3", "wrong"):
        keys.admit(given)
    registry = CollectorRegistry()
    registry.register(KeyMetrics(keys))
    text = generate_latest(registry).decode()
    assert 'kvmesh_api_key_requests_total{key="ada"} 2.0' in text
    assert 'kvmesh_api_key_requests_total{key="unnamed"} 2.0' in text
    assert "kvmesh_api_key_refused_total 1.0" in text
    assert "sk-" not in text
