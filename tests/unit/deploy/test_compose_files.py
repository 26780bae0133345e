"""The compose file and the Dockerfile, as far as they can be judged without a Docker engine."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from containers.engine import CACHE, REPOSITORY

from kvmesh.cli.certificates import make_certificate
from kvmesh.config import (
    CoordinatorSettings,
    IndexerSettings,
    RouterSettings,
    WorkerSettings,
    load_settings,
)
from kvmesh.config.startup import refuse_unsupported
from kvmesh.config.tls import TlsSettings
from kvmesh.net.tls import Tls

COMPOSE = REPOSITORY / "compose"
SETTINGS = {
    "router": RouterSettings,
    "context": WorkerSettings,
    "generation": WorkerSettings,
    "indexer": IndexerSettings,
    "coordinator": CoordinatorSettings,
}
OF_THE_IMAGE = {"KVMESH_HOST": "0.0.0.0", "KVMESH_LOG_FORMAT": "json"}
VARIABLE = re.compile(r"\$\{([A-Z_0-9]+)(?:(:?[-+?])((?:[^{}])*))?\}")


def interpolated(text: str, env: Mapping[str, str] | None = None) -> str:
    """What Compose makes of ``${NAME:-default}`` and its relatives."""
    values = dict(env or {})

    def value(match: re.Match[str]) -> str:
        name, operator, other = match.groups()
        found = values.get(name)
        missing = found is None or (found == "" and (operator or "").startswith(":"))
        if (operator or "").endswith("-") and missing:
            return other
        if (operator or "").endswith("+"):
            return "" if missing else other
        return found or ""

    return VARIABLE.sub(value, text)


def services(env: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(interpolated((COMPOSE / "compose.yaml").read_text(), env))[
        "services"
    ]
    return found


def core(env: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """Services that run without a profile."""
    return {name: service for name, service in services(env).items() if "profiles" not in service}


@pytest.mark.parametrize("switch", ["", "1"], ids=["plain", "encrypted"])
@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_the_environment_of_a_service_is_its_settings(name: str, switch: str, tmp_path: Path) -> None:
    """Each variable is a setting of the service, and all together are ones that it takes."""
    env = {key: str(value or "") for key, value in core({"KVMESH_ENCRYPTED": switch})[name]["environment"].items()}
    fields = SETTINGS[name].model_fields
    for variable in env:
        assert variable.startswith("KVMESH_")
        assert variable.removeprefix("KVMESH_").lower().split("__")[0] in fields, variable
    if "KVMESH_CLUSTER_SECRET_FILE" in env:
        (tmp_path / "secret").write_text("s")
        env["KVMESH_CLUSTER_SECRET_FILE"] = str(tmp_path / "secret")
    settings = load_settings(SETTINGS[name], env={**OF_THE_IMAGE, **env})
    refuse_unsupported(settings)
    assert settings.host == "0.0.0.0"
    assert settings.tls.serves == bool(switch)
    urls = [value for key, value in env.items() if key.endswith(("_URL", "_ENDPOINTS")) and value]
    assert urls
    assert {url.startswith("https://") for url in urls} == {bool(switch)}
    if name != "coordinator":
        assert (settings.curve.key_file is not None) == bool(switch)


def test_everything_is_locked() -> None:
    for name, service in services().items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not {"privileged", "cap_add", "devices"} & service.keys(), name
        assert service.get("network_mode") in (None, "none"), name


def test_ports_are_published_on_loopback_only() -> None:
    ports = {name: service["ports"] for name, service in services().items() if "ports" in service}
    assert set(ports) >= {"router", "coordinator", "indexer"}
    assert all(str(port).startswith("127.0.0.1:") for published in ports.values() for port in published)


def test_what_runs_has_a_health_check_and_time_to_drain() -> None:
    for name, service in core().items():
        if service["restart"] == "no":
            assert service["healthcheck"] == {"disable": True}, name
            continue
        # There may be no shell; without any check Compose does not wait for a service.
        assert service["healthcheck"]["test"][0] == "CMD", name
        drain_s = float((service.get("environment") or {}).get("KVMESH_DRAIN_S", 10))
        assert float(service["stop_grace_period"].removesuffix("s")) > drain_s, name


def test_who_waits_for_whom() -> None:
    needs = {name: set(service.get("depends_on", {})) for name, service in core().items()}
    assert needs["router"] >= {"coordinator", "indexer", "context", "generation", "model"}
    assert needs["context"] == needs["generation"] >= {"coordinator", "memory", "model", "secrets"}
    assert all(needed in needs for wanted in needs.values() for needed in wanted)


def test_the_example_names_every_variable_with_its_default() -> None:
    """Also what has no default is named, so that people find it."""
    used: dict[str, str] = {}
    for name, operator, default in VARIABLE.findall((COMPOSE / "compose.yaml").read_text()):
        if operator.endswith("-"):
            used[name] = default
        else:
            used.setdefault(name, "")
    example = dict(re.findall(r"^#?([A-Z_0-9]+)=(.*)$", (COMPOSE / "example.env").read_text(), re.MULTILINE))
    assert example == {**used, "COMPOSE_PROFILES": ""}


def test_no_secret_is_a_variable() -> None:
    """Files only: an environment is seen by `docker inspect`."""
    variables = {variable for service in services().values() for variable in service.get("environment") or {}}
    variables.remove("ETCDCTL_KEY")  # the name of a file, in etcd's words
    assert [name for name in variables if re.search("SECRET|KEY|PASSWORD|TOKEN$", name) and "_FILE" not in name] == []


RECEIVERS = ("servers", "router", "indexer", "coordinator", "etcd", "prometheus")
PAIR = {"tls/ca.crt", "tls/tls.crt", "tls/tls.key"}


def run_secrets(root: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The job that makes secrets, with its volumes in a directory."""
    [script] = services()["secrets"]["command"]
    for name in ("kvmesh", "authority", *(f"of/{name}" for name in RECEIVERS)):
        (root / name).mkdir(parents=True, exist_ok=True)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["sh", "-euc", script.replace("$$", "$").replace("/run/", f"{root}/")],
        env={"PATH": path, "HOME": str(root), "ENCRYPTED": "1", **environment},
        cwd=root / "kvmesh",
        capture_output=True,
        text=True,
        timeout=120,
    )


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_service_has_its_own_secrets_and_no_others() -> None:
    """The volume with all of them, and the one with the authority's key, are for the job that gives them out."""
    mounted: dict[str, set[str]] = {}
    for name, service in services().items():
        for volume in map(str, service.get("volumes", ())):
            if volume.startswith(("secrets", "authority")):
                mounted.setdefault(name, set()).add(volume.partition(":")[0])
    assert mounted.pop("secrets") == {"secrets", "authority", *(f"secrets-{name}" for name in RECEIVERS)}
    assert mounted.pop("context") == mounted.pop("generation") == {"secrets-servers"}
    assert mounted == {name: {f"secrets-{name}"} for name in RECEIVERS if name != "servers"}
    assert all(
        str(volume).endswith(":ro")
        for name, service in services().items()
        for volume in service.get("volumes", ())
        if name != "secrets" and ":/run/kvmesh" in str(volume)
    )


def test_etcd_asks_for_certificates_where_there_are_some() -> None:
    asks = {
        switch: services({"KVMESH_ENCRYPTED": switch})["etcd"]["environment"]["ETCD_CLIENT_CERT_AUTH"]
        for switch in ("", "1")
    }
    # YAML has a boolean here, which Compose hands on as its text.
    assert asks == {"": None, "1": True}


def test_secrets_are_made_once_and_certificates_are_renewed(tmp_path: Path) -> None:
    assert run_secrets(tmp_path).returncode == 0
    made = contents(tmp_path)
    curve = {"curve/kvmesh.key_secret"}
    assert contents(tmp_path / "kvmesh").keys() == curve | {"cluster_secret", "curve/kvmesh.key"}
    wanted = {"servers": PAIR | curve | {"cluster_secret"}, "router": PAIR | curve, "indexer": PAIR | curve}
    given = {name: set(contents(tmp_path / "of" / name)) for name in RECEIVERS}
    assert given == {**dict.fromkeys(RECEIVERS, PAIR), **wanted}
    assert len({made[f"of/{name}/tls/tls.key"] for name in RECEIVERS}) == len(RECEIVERS), "each has a key of its own"
    assert run_secrets(tmp_path).returncode == 0
    assert contents(tmp_path) == made, "nothing is made twice"
    old_s = time.time() - 310 * 86_400
    os.utime(tmp_path / "of" / "router" / "tls" / "tls.crt", (old_s, old_s))
    (tmp_path / "kvmesh" / "api_keys").write_text("sk-one")
    (tmp_path / "kvmesh" / "cluster_secret.old").write_text("not the router's")
    assert run_secrets(tmp_path).returncode == 0
    renewed = contents(tmp_path / "of")
    changed = {name for name in renewed if renewed[name] != made.get(f"of/{name}")}
    assert changed == {"router/tls/tls.crt", "router/tls/tls.key", "router/api_keys"}, "of the same authority"
    for name in ("router", "etcd"):
        tls = tmp_path / "of" / name / "tls"
        files = {"cert_file": tls / "tls.crt", "key_file": tls / "tls.key", "ca_file": tls / "ca.crt"}
        certificate = Tls(TlsSettings(**{setting: str(file) for setting, file in files.items()})).certificate
        assert certificate is not None
        assert {"kvmesh.internal", name} <= set(certificate.names)


def test_an_authority_beside_its_certificates_signs(tmp_path: Path) -> None:
    """As earlier versions left it, or as its owner did, who keeps it."""
    make_certificate(tmp_path / "kvmesh" / "tls")
    before = contents(tmp_path / "kvmesh")
    assert run_secrets(tmp_path).returncode == 0
    assert before.items() <= contents(tmp_path / "kvmesh").items()
    assert (tmp_path / "authority" / "ca.key").read_bytes() == before["tls/ca.key"]
    given = {name: contents(tmp_path / "of" / name) for name in RECEIVERS}
    assert {files["tls/ca.crt"] for files in given.values()} == {before["tls/ca.crt"]}
    assert before["tls/tls.key"] not in {files["tls/tls.key"] for files in given.values()}


def test_another_authority_than_before_signs_anew(tmp_path: Path) -> None:
    """Certificates that were passed on were taken away again."""
    make_certificate(tmp_path / "kvmesh" / "tls")
    (tmp_path / "kvmesh" / "tls" / "ca.key").unlink()
    assert run_secrets(tmp_path).returncode == 0
    foreign = contents(tmp_path / "of" / "router")
    shutil.rmtree(tmp_path / "kvmesh" / "tls")
    assert run_secrets(tmp_path).returncode == 0
    authority = (tmp_path / "authority" / "ca.crt").read_bytes()
    for name in RECEIVERS:
        given = contents(tmp_path / "of" / name)
        assert given["tls/ca.crt"] == authority != foreign["tls/ca.crt"]
        assert given["tls/tls.crt"] != foreign["tls/tls.crt"]


def test_keys_that_are_taken_away_are_gone_at_the_router(tmp_path: Path) -> None:
    for text in ("sk-one\nsk-two\n", "sk-two\n", ""):
        (tmp_path / "kvmesh").mkdir(exist_ok=True)
        (tmp_path / "kvmesh" / "api_keys").write_text(text)
        assert run_secrets(tmp_path, ENCRYPTED="").returncode == 0
        assert (tmp_path / "of" / "router" / "api_keys").read_text() == text
    (tmp_path / "kvmesh" / "api_keys").unlink()
    assert run_secrets(tmp_path, ENCRYPTED="").returncode == 0
    assert contents(tmp_path / "of" / "router") == {}


def test_certificates_of_another_authority_are_passed_on(tmp_path: Path) -> None:
    make_certificate(tmp_path / "kvmesh" / "tls")
    (tmp_path / "kvmesh" / "tls" / "ca.key").unlink()
    certificate = tmp_path / "kvmesh" / "tls" / "tls.crt"
    os.utime(certificate, (0, 0))
    before = contents(tmp_path / "kvmesh")
    assert run_secrets(tmp_path).returncode == 0
    assert before.items() <= contents(tmp_path / "kvmesh").items()
    for name in RECEIVERS:
        assert before.items() <= contents(tmp_path / "of" / name).items()
    assert contents(tmp_path / "authority") == {}


@pytest.mark.parametrize("value", ["0", "false"])
def test_the_switch_is_1_or_empty(value: str, tmp_path: Path) -> None:
    """In Compose's words any text turns it on."""
    refused = run_secrets(tmp_path, ENCRYPTED=value)
    assert refused.returncode == 1
    assert f"KVMESH_ENCRYPTED is 1 or empty, not {value}" in refused.stderr


@pytest.mark.skipif(shutil.which("docker") is None, reason="there is no docker command")
@pytest.mark.parametrize("profiles", [(), ("--profile", "*")])
def test_compose_takes_it(profiles: tuple[str, ...]) -> None:
    """As Compose itself reads it; no engine is needed."""
    fetched = CACHE / "docker-config"
    env = {**os.environ, **({"DOCKER_CONFIG": str(fetched)} if fetched.exists() else {})}
    version = subprocess.run(
        ["docker", "compose", "version"], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    if version.returncode != 0:
        pytest.skip("docker has no compose plugin (`make deploy-test` fetches one)")
    command = ["docker", "compose", "--file", str(COMPOSE / "compose.yaml"), *profiles, "config", "--quiet"]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")


# ---- the Dockerfile


def instructions() -> list[str]:
    """The Dockerfile's instructions, each in one line, without comments."""
    text = re.sub(r"^\s*#.*\n", "", (COMPOSE / "Dockerfile").read_text(), flags=re.MULTILINE)
    return [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def stages() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in instructions():
        if line.startswith("FROM "):
            found[line.split()[-1]] = current = [line]
        elif found:
            current.append(line)
    return found


def test_no_frontend_is_fetched() -> None:
    """A `# syntax=` line would look for its frontend in a registry, also where the base image is a local one."""
    assert "syntax=" not in (COMPOSE / "Dockerfile").read_text()


@pytest.mark.parametrize("target", ["light", "engine"])
def test_final_stages_only_copy(target: str) -> None:
    """No build tool, and no secret of a build step, can be in what is only copied from the environment."""
    base, *rest = stages()[target]
    assert base.startswith("FROM runtime AS ")
    assert rest == [f"COPY --from={target}-environment /opt/kvmesh /opt/kvmesh"]


def test_the_run_time_is_not_root_and_not_a_shell() -> None:
    runtime = stages()["runtime"]
    assert "USER 10001:10001" in runtime
    assert 'ENTRYPOINT ["kvmesh"]' in runtime
    assert any(line.startswith("HEALTHCHECK ") and line.endswith('CMD ["kvmesh", "health"]') for line in runtime)
    assert not [line for line in runtime if "apt-get" in line or "pip install" in line]


def test_everything_is_pinned() -> None:
    """Files by their hashes, torch by its version, and the compiler of CUDA's kernels by its major version."""
    installs = [line for line in instructions() if "pip install" in line and "--no-index" not in line]
    assert len(installs) >= 4
    for line in installs:
        for command in re.findall(r"pip install [^&;]*", line):
            hashed = re.search(r"--require-hashes --no-deps -r [a-z]+\.txt", command)
            assert hashed or "-r torch.txt" in command or "cuda-toolkit" in command, command


@pytest.mark.parametrize("group", ["base", "build", "engine", "keys"])
def test_locks_have_what_is_required(group: str) -> None:
    """In the versions of constraints.txt, which the tests run with; `make lock` writes them anew."""
    locks = COMPOSE / "locks"
    wanted = set(runpy.run_path(str(COMPOSE / "lock.py"))["pinned_groups"]()[group])
    entries = (locks / f"{group}.txt").read_text().replace("\\\n", " ").splitlines()
    assert all("--hash=sha256:" in entry for entry in entries)
    locked = {entry.split()[0] for entry in entries}
    if group == "engine":
        locked |= set((locks / "torch.txt").read_text().split())
        assert any(one.startswith("torch==") for one in wanted)
    assert wanted <= locked, "run 'make lock'"


def test_what_is_copied_is_in_the_context() -> None:
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()
    let_in = {line[1:] for line in ignored if line.startswith("!")}
    copied = {
        source
        for line in instructions()
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    }
    assert {re.sub(r"^compose/locks/.*", "compose/locks", source) for source in copied} == let_in
    assert all((REPOSITORY / source).exists() for source in copied)
