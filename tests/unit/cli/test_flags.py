from __future__ import annotations

import argparse

import pytest

from kvmesh.cli.errors import UserError
from kvmesh.cli.flags import add_settings_flags, load_from_flags, parse_assignments
from kvmesh.config import RouterSettings, WorkerSettings


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch):
    for name in ("KVMESH_PORT", "KVMESH_MODEL", "KVMESH_DRAIN_S"):
        monkeypatch.delenv(name, raising=False)


def load(settings, *flags, fixed=None):
    parser = argparse.ArgumentParser()
    add_settings_flags(parser, settings, skip=frozenset(fixed or {}))
    return load_from_flags(parser.parse_args(list(flags)), settings, fixed)


def test_flags_reach_nested_fields():
    settings = load(
        WorkerSettings,
        "--port=8101",
        "--kv-cache-config.max-tokens=4096",
        "--no-kv-cache-config.enable-partial-reuse",
        "--kv-cache-config.kv-events-config.endpoint=tcp://127.0.0.1:5557",
        "--cache-transceiver-config.backend=NIXL",
        "--kv-cache-config.max-attention-window=[128, 256]",
    )
    assert settings.port == 8101
    assert settings.kv_cache_config.max_tokens == 4096
    assert not settings.kv_cache_config.enable_partial_reuse
    assert settings.kv_cache_config.kv_events_config.endpoint == "tcp://127.0.0.1:5557"
    assert settings.cache_transceiver_config.backend == "NIXL"
    assert settings.kv_cache_config.max_attention_window == [128, 256]


def test_flags_beat_the_environment_which_beats_the_file(tmp_path, monkeypatch):
    file = tmp_path / "worker.yaml"
    file.write_text("port: 1\ndrain_s: 1\nmax_queue: 1\n")
    monkeypatch.setenv("KVMESH_PORT", "2")
    monkeypatch.setenv("KVMESH_DRAIN_S", "2")
    settings = load(WorkerSettings, f"--config={file}", "--port=3")
    assert (settings.port, settings.drain_s, settings.max_queue) == (3, 2.0, 1)


def test_none_can_be_said():
    settings = load(WorkerSettings, "--cache-transceiver-config.kv-transfer-timeout-ms=none")
    assert settings.cache_transceiver_config.kv_transfer_timeout_ms is None


def test_lists_and_unions():
    settings = load(
        RouterSettings,
        "--context-servers=a:1,b:2",
        "--generation-servers=[c:3]",
        "--context-router={type: round_robin}",
    )
    assert settings.context_servers == ["http://a:1", "http://b:2"]
    assert settings.generation_servers == ["http://c:3"]
    assert settings.context_router.type == "round_robin"


def test_fixed_values_have_no_flag():
    assert load(WorkerSettings, fixed={"role": "context"}).role == "context"
    with pytest.raises(SystemExit):
        load(WorkerSettings, "--role=both", fixed={"role": "context"})


@pytest.mark.parametrize("flag", ["--port=x", "--device=tpu", "--lease-s=0"])
def test_wrong_values_are_refused(flag):
    with pytest.raises((UserError, SystemExit)):
        load(WorkerSettings, flag)


def test_assignments():
    assert parse_assignments(["a.b=1", "a.c=[1, 2]", "d=x", "e-f=null"]) == {
        "a": {"b": 1, "c": [1, 2]},
        "d": "x",
        "e_f": None,
    }
    for text in ("a", "=1", "a={"):
        with pytest.raises(UserError):
            parse_assignments([text])
