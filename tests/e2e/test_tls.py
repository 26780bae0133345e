"""One mesh with everything on: TLS at every face, client certificates between services, API keys, a found server.

The context server knows no coordinator: that finds it in its list. The router asks its clients for a key instead of a
certificate.
"""

from __future__ import annotations

import json
import secrets
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from meshes.by_hand import Mesh
from meshes.process import Process, request, until

from kvmesh.cli.certificates import Files, make_certificate
from kvmesh.models.store import DEFAULT_MODEL

pytestmark = pytest.mark.slow

KEY = f"sk-{secrets.token_hex(16)}"
CLUSTER_SECRET = secrets.token_hex(16)
REQUIRED = {"tls": {"client_auth": "required"}}
GUARDED = ("coordinator", "context", "generation")
"""Those that ask for a certificate."""


class Secured(Mesh):
    """A mesh whose services all have the same certificate."""

    def __init__(self, files: Files, keys: Path) -> None:
        super().__init__(
            KVMESH_TLS__CERT_FILE=str(files.certificate),
            KVMESH_TLS__KEY_FILE=str(files.key),
            KVMESH_TLS__CA_FILE=str(files.ca),
            KVMESH_CLUSTER_SECRET=CLUSTER_SECRET,
        )
        self.files = files
        self.keys = keys
        self.context = client_context(files)

    def launch_all(self) -> None:
        context = self.launch_worker("context", REQUIRED)
        found = [{"type": "static", "urls": [context.wait_serving()]}]
        center = self.launch("coordinator", "coordinator", {"port": 0, "discovery": found, **REQUIRED})
        common = {"coordinator_url": center.wait_serving()}
        match = f"ipc://{self.directory}/match"
        self.launch("indexer", "indexer", {"port": 0, "match_endpoint": match, **common})
        self.launch_worker("generation", {**common, **REQUIRED})
        routing = {"port": 0, "indexer_match_endpoint": match, "api_keys_file": str(self.keys), **common}
        self.launch("router", "router", routing)
        for process in self.processes.values():
            process.wait_serving()
        self.wait_ready()

    def ask(self, body: dict[str, Any], key: str | None = KEY) -> tuple[int, Any]:
        headers = None if key is None else {"Authorization": f"Bearer {key}"}
        return self["router"].post("/v1/completions", {"model": DEFAULT_MODEL, **body}, headers=headers)


def client_context(files: Files, *, certificate: bool = True) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(files.ca))
    if certificate:
        context.load_cert_chain(files.certificate, files.key)
    return context


def serial(process: Process, context: ssl.SSLContext) -> str:
    address = urlsplit(process.url)
    assert address.hostname
    assert address.port
    plain = socket.create_connection((address.hostname, address.port), timeout=10)
    with plain, context.wrap_socket(plain, server_hostname=address.hostname) as secured:
        certificate = secured.getpeercert()
        assert certificate is not None
        return str(certificate["serialNumber"])


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    directory = tmp_path_factory.mktemp("secured")
    keys = directory / "keys"
    keys.write_text(f"ada {KEY}  # of the tests\n")
    mesh = Secured(make_certificate(directory / "certificates"), keys)
    try:
        mesh.launch_all()
        yield mesh
    finally:
        mesh.stop()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_answers_are_the_reference_s(secured: Secured, golden: list[dict[str, Any]], stream: bool) -> None:
    item = golden[0]
    wanted = item["certain"][:24]
    before = secured["generation"].stats()["transfers_completed_total"]
    status, answer = secured.ask(
        {
            "prompt": item["prompt"],
            "max_tokens": len(wanted),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": stream,
        }
    )
    assert status == 200, answer
    events = [json.loads(line) for line in answer[:-1]] if stream else [answer]
    tokens = [token for event in events for choice in event["choices"] for token in choice.get("token_ids") or []]
    assert tokens == wanted
    assert secured["generation"].stats()["transfers_completed_total"] == before + 1


def test_the_coordinator_has_found_one_and_heard_of_the_others(secured: Secured) -> None:
    members = {member["instance_id"]: member for member in secured["coordinator"].get("/members")["members"]}
    assert members["context"]["source"] == "static"
    assert members["context"]["url"] == secured["context"].url
    assert members["generation"]["source"] == ""
    assert {member["url"].partition(":")[0] for member in members.values()} == {"https"}
    [place] = secured["coordinator"].get("/discovery")["places"]
    assert (place["instance_id"], place["state"]) == ("context", "a member")


def test_plain_clients_are_told_and_counted_everywhere(secured: Secured) -> None:
    for process in secured.processes.values():
        status, body = request(process.url.replace("https", "http") + "/health", timeout_s=5.0)
        assert (status, json.loads(body)["error"]["code"]) == (400, "tls_required")
        assert process.metrics()['kvmesh_tls_refused_total{reason="plain_http"}'] == 1


def test_who_presents_no_certificate_is_refused_where_one_is_required(secured: Secured) -> None:
    bare = client_context(secured.files, certificate=False)
    answers = {name: request(one.url + "/health", None, 5.0, None, bare)[0] for name, one in secured.processes.items()}
    assert answers == {name: 0 if name in GUARDED else 200 for name in secured.processes}


def test_who_does_not_know_the_authority_does_not_speak(secured: Secured) -> None:
    status, why = request(secured["router"].url + "/health", None, 5.0, None, ssl.create_default_context())
    assert status == 0
    assert b"certificate verify failed" in why


@pytest.mark.parametrize("key", [None, "sk-wrong", KEY[:-1]], ids=["none", "another", "all but the last letter"])
def test_a_wrong_key_gets_openai_s_401(secured: Secured, key: str | None) -> None:
    status, answer = secured.ask({"prompt": "x", "max_tokens": 1}, key)
    assert status == 401
    assert answer["error"].pop("message").startswith("Missing or unknown API key")
    assert answer == {"error": {"type": "invalid_request_error", "param": None, "code": "invalid_api_key"}}


def test_a_key_that_is_added_is_accepted_at_once(secured: Secured) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    assert secured.ask(body, "sk-bob")[0] == 401
    secured.keys.write_text(f"ada {KEY}\nbob sk-bob\n")
    assert secured.ask(body, "sk-bob")[0] == 200
    secured.keys.write_text(f"ada {KEY}\n")
    assert secured.ask(body, "sk-bob")[0] == 401
    assert secured["router"].metrics()['kvmesh_api_key_requests_total{key="bob"}'] == 1


def test_certificates_are_replaced_without_a_restart(secured: Secured) -> None:
    before = {name: serial(one, client_context(secured.files)) for name, one in secured.processes.items()}
    assert len(set(before.values())) == 1
    make_certificate(secured.files.ca.parent)
    secured.context = client_context(secured.files)
    for process in secured.processes.values():
        process.context = secured.context
    [old] = set(before.values())
    for name, process in secured.processes.items():
        until(lambda one=process: serial(one, secured.context) != old, f"{name} has the new certificate", 10.0)
    assert secured.ask({"prompt": "x", "max_tokens": 2})[0] == 200


def test_the_command_line_speaks_tls(secured: Secured) -> None:
    files = secured.files
    flags = ["--ca-file", str(files.ca), "--cert-file", str(files.certificate), "--key-file", str(files.key)]
    argv = [sys.executable, "-m", "kvmesh.cli.main"]
    status = [*argv, "status", "--coordinator", secured["coordinator"].url]
    done = subprocess.run([*status, *flags], env=secured.env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "generation" in done.stdout
    without = {key: value for key, value in secured.env.items() if "TLS" not in key}
    refused = subprocess.run([*status, *flags[:2]], env=without, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert "asks for a client certificate" in refused.stderr


def test_no_secret_is_told(secured: Secured) -> None:
    """Neither logs nor what services say of themselves hold a key, the cluster secret, or a private key."""
    private = secured.files.key.read_text().splitlines()[1]
    said = "".join(process.log.read_text() for process in secured.processes.values())
    for name, paths in {
        "router": ("/metrics", "/cluster_info", "/health", "/ready", "/v1/models"),
        "context": ("/server_info", "/metrics", "/stats", "/health"),
        "coordinator": ("/members", "/transfers", "/metrics", "/discovery"),
        "indexer": ("/metrics", "/health"),
    }.items():
        for path in paths:
            headers = {"Authorization": f"Bearer {KEY}"}
            status, body = request(secured[name].url + path, headers=headers, context=secured.context)
            assert status == 200, (name, path)
            said += body.decode()
    assert "serving" in said
    for secret in (KEY, CLUSTER_SECRET, private):
        assert secret not in said
