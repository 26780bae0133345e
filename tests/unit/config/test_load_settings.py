"""``load_settings``: layers, environment, files and messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvmesh.config import (
    ConfigError,
    CoordinatorSettings,
    IndexerSettings,
    KvCacheAwarePolicy,
    MeshSettings,
    RouterSettings,
    WorkerSettings,
    load_settings,
)
from kvmesh.config.mesh import spread_over_workers

Write = Callable[[str], Path]


def test_precedence(write_yaml: Write) -> None:
    """design §4: flag > environment > file > default, field by field through nested classes."""
    file = write_yaml(
        "max_batch_size: 1\nmax_num_tokens: 1\nmax_queue: 1\nkv_cache_config: {max_tokens: 1, dtype: fp8}"
    )
    env = {"KVMESH_MAX_NUM_TOKENS": "2", "KVMESH_MAX_QUEUE": "2", "KVMESH_KV_CACHE_CONFIG__MAX_TOKENS": "2"}
    settings = load_settings(WorkerSettings, file, env, {"max_queue": 3})
    assert (settings.max_batch_size, settings.max_num_tokens, settings.max_queue) == (1, 2, 3)
    assert (settings.kv_cache_config.max_tokens, settings.kv_cache_config.dtype) == (2, "fp8")
    assert settings.max_seq_len is None


@pytest.mark.parametrize(
    ("variable", "right"),
    [
        ("KVMESH_PROT", "KVMESH_PORT"),
        ("KVMESH_LEASE_SS", "KVMESH_LEASE_S"),
        ("KVMESH_CONTXT__NUM_THREADS", "KVMESH_CONTEXT__NUM_THREADS"),
        ("KVMESH_KV_CACHE_CONFG__MAX_TOKENS", "KVMESH_KV_CACHE_CONFIG__MAX_TOKENS"),
    ],
)
def test_a_misspelt_variable_names_the_nearest(variable: str, right: str) -> None:
    """Whichever service is started: nobody would read it."""
    for settings in (CoordinatorSettings, MeshSettings):
        with pytest.raises(ConfigError, match=f"{variable} names no setting; did you mean {right}"):
            load_settings(settings, env={variable: "2"})


def test_variables_of_others_are_left_alone() -> None:
    """Those of other services, of commands, of Compose, and anybody's."""
    names = (
        "MAX_QUEUE",
        "API_KEY",
        "RUN_DIR",
        "MODELS",
        "COORDINATOR_PORT",
        "INDEXER_PORT",
        "FAULTS",
        "ENGINE_IMAGE",
        "SOMETHING",
    )
    assert load_settings(CoordinatorSettings, env={f"KVMESH_{name}": "x" for name in names}) == CoordinatorSettings()


def test_flags_nest_and_may_be_absent() -> None:
    """A flag that was not given is None; dotted and nested names mean the same."""
    flags = {"port": None, "kv_cache_config.max_tokens": 7, "kv_cache_config": {"tokens_per_block": 16}}
    settings = load_settings(WorkerSettings, env={}, overrides=flags)
    assert (settings.kv_cache_config.max_tokens, settings.kv_cache_config.tokens_per_block) == (7, 16)


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("KVMESH_PORT", "9000", "port", 9000),
        ("KVMESH_COORDINATOR_URL", "null", "coordinator_url", None),
        ("KVMESH_CONTEXT_SERVERS", "h1:1, h2:2", "context_servers", ["http://h1:1", "http://h2:2"]),
        ("KVMESH_CONTEXT_SERVERS", '["http://h1:1/"]', "context_servers", ["http://h1:1"]),
        (
            "KVMESH_CONTEXT_ROUTER",
            "{type: kv_cache_aware, load_cap: 3}",
            "context_router",
            KvCacheAwarePolicy(load_cap=3),
        ),
        ("KVMESH_CONTEXT_ROUTER__LOAD_CAP", "3", "context_router", KvCacheAwarePolicy(load_cap=3)),
        ("KVMESH_CONTEXT_ROUTER__LOAD_CAP", "none", "context_router", KvCacheAwarePolicy()),
    ],
)
def test_environment_values(variable: str, text: str, field: str, value: Any) -> None:
    """Plain values are converted by pydantic; lists may be comma-separated; mappings are YAML."""
    assert getattr(load_settings(RouterSettings, env={variable: text}), field) == value


def test_variables_of_other_services_are_left_alone() -> None:
    """One environment serves all services."""
    env = {"KVMESH_MODEL_DIR": "/m", "KVMESH_LEDGER_MAX": "5", "KVMESH_KV_CACHE_CONFIG__NO_SUCH": "1", "PORT": "1"}
    assert load_settings(CoordinatorSettings, env=env).ledger_max == 5
    with pytest.raises(ConfigError, match=r"unknown key 'no_such'.*environment"):
        load_settings(WorkerSettings, env=env)


def test_contradicting_variables() -> None:
    """A whole and a part of it cannot both be set."""
    env = {"KVMESH_EVENTS": "{}", "KVMESH_EVENTS__HASH_SIGN": "signed"}
    assert load_settings(WorkerSettings, env=env).events.hash_sign == "signed"
    env = {"KVMESH_CONTEXT_SERVERS": "a:1", "KVMESH_CONTEXT_SERVERS__0": "b:1"}
    with pytest.raises(ConfigError, match="KVMESH_CONTEXT_SERVERS__0"):
        load_settings(RouterSettings, env=env)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "must hold a mapping"),
        ("a: [", "is not valid YAML"),
        ("portt: 1", "unknown key 'portt'; did you mean 'port'"),
    ],
)
def test_bad_files(write_yaml: Write, text: str, message: str) -> None:
    """Each says what is wrong and names the file."""
    with pytest.raises(ConfigError, match=message) as caught:
        load_settings(IndexerSettings, write_yaml(text), {})
    assert "config.yaml" in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read configuration file .*No such file"):
        load_settings(IndexerSettings, tmp_path / "nope.yaml", {})


def test_empty_file(write_yaml: Write) -> None:
    assert load_settings(IndexerSettings, write_yaml(""), {}) == IndexerSettings()


def test_every_problem_and_its_source_is_named(write_yaml: Write) -> None:
    """One message for all; values are left out, they may be secrets."""
    file = write_yaml("port: x\ncontext_router: {load_weight: -1}")
    with pytest.raises(ConfigError) as caught:
        load_settings(RouterSettings, file, {"KVMESH_MAX_RETRIES": "hunter2"}, {"schedule_style": "sideways"})
    message = str(caught.value)
    assert f"port: must be an integer (from {file})" in message
    assert f"context_router.load_weight: Input should be greater than or equal to 0 (from {file})" in message
    assert "max_retries: " in message
    assert "(from the environment)" in message
    assert "schedule_style: " in message
    assert "(from flags)" in message
    assert "hunter2" not in message


@pytest.mark.parametrize(
    ("cls", "wrong", "message"),
    [
        (RouterSettings, {"context_router": {"type": "random"}}, "unknown router type; use round_robin"),
        (RouterSettings, {"context_router": {"type": "round_robin", "load_cap": 1}}, "unknown key 'load_cap'"),
        (RouterSettings, {"coordinator_url": "ftp://x"}, "not an HTTP address"),
        (RouterSettings, {"indexer_match_endpoint": "http://x"}, "not a ZeroMQ endpoint"),
        (RouterSettings, {"port": 65536}, "port"),
        (RouterSettings, {"node_id": 256}, "node_id"),
        (
            RouterSettings,
            {"max_local_prefill_length": 1, "generation_router": {"type": "round_robin"}},
            "requires generation_router.type kv_cache_aware",
        ),
        (WorkerSettings, {"request_timeout_s": float("inf")}, "request_timeout_s"),
        (WorkerSettings, {"role": "prefill"}, "role"),
        (CoordinatorSettings, {"lease_s": 0}, "lease_s"),
    ],
)
def test_wrong_values(cls: Any, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(cls, env={}, overrides=wrong)


def test_conditional_disaggregation_by_default_policy() -> None:
    """§5.5: it needs matches, which the default policy has."""
    assert load_settings(RouterSettings, env={"KVMESH_MAX_LOCAL_PREFILL_LENGTH": "32"}).max_local_prefill_length == 32


class TestClusterSecret:
    def test_is_read_from_its_file(self, tmp_path: Path) -> None:
        secret = tmp_path / "secret"
        secret.write_text("s3cret\n", encoding="utf-8")
        settings = WorkerSettings(cluster_secret_file=str(secret))
        assert settings.cluster_secret == "s3cret"
        secret.unlink()
        assert WorkerSettings.model_validate_json(settings.model_dump_json()) == settings, (
            "the engine process needs none"
        )

    def test_is_never_shown(self) -> None:
        assert "s3cret" not in repr(WorkerSettings(cluster_secret="s3cret"))

    def test_missing_or_empty_file(self, tmp_path: Path) -> None:
        (tmp_path / "empty").touch()
        for name, message in (("nope", "cannot read cluster_secret_file"), ("empty", "is empty")):
            with pytest.raises(ConfigError, match=message):
                load_settings(WorkerSettings, env={}, overrides={"cluster_secret_file": str(tmp_path / name)})


def test_worker_settings_survive_the_engine_border() -> None:
    """The engine process gets them as JSON."""
    settings = load_settings(
        WorkerSettings,
        env={},
        overrides={"role": "context", "kv_cache_config": {"kv_events_config": {"enable_kv_cache_events": True}}},
    )
    assert WorkerSettings.model_validate_json(settings.model_dump_json()) == settings


def test_what_is_wrong_for_every_kind_of_worker_is_said_once() -> None:
    flags = spread_over_workers({"cache_transceiver_config": {"backend": "ucx"}})
    with pytest.raises(ConfigError) as error:
        load_settings(MeshSettings, env={}, overrides=flags)
    message = str(error.value)
    assert message.startswith("cache_transceiver_config.backend: Input should be 'DEFAULT', 'UCX',")
    assert message.count("backend") == 1
    assert "in just these letters" in message
    with pytest.raises(ConfigError, match=r"^context\.max_batch_size: Input should be greater than 0 \(from flags\)$"):
        load_settings(MeshSettings, env={}, overrides={"context.max_batch_size": 0})
