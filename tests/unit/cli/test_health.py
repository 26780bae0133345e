"""``kvmesh health``: one look at a service, and how the service says where it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest

from kvmesh.cli.main import USER_ERROR, main
from kvmesh.cli.rundir import MeshState, ProcessState, RunDir, start_ticks
from kvmesh.cli.serving_file import VARIABLE, Serving, read_serving, write_serving


class Answers(BaseHTTPRequestHandler):
    """Gives each path its answer."""

    answers: ClassVar[dict[str, tuple[int, Any]]] = {}

    def do_GET(self) -> None:
        status, body = self.answers[self.path]
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@contextmanager
def service(**answers: tuple[int, Any]) -> Iterator[str]:
    """A service with these answers by path; gives its base URL."""
    handler = type("Handler", (Answers,), {"answers": {f"/{path}": answer for path, answer in answers.items()}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def _no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


OK = (200, {"status": "ok", "detail": "", "service": "router"})


def test_a_well_service(capsys: pytest.CaptureFixture[str]) -> None:
    with service(health=OK) as url:
        assert main(["health", url]) == 0
        assert main(["health", url.removeprefix("http://")]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"{url} ok"


def test_a_service_that_is_not_well_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    with service(health=(503, {"status": "unavailable", "detail": "draining", "service": "router"})) as url:
        assert main(["health", url]) == 1
    assert capsys.readouterr().out == f"{url} 503: draining\n"


def test_ready_is_another_question(capsys: pytest.CaptureFixture[str]) -> None:
    with service(health=OK, ready=(503, {"ready": False, "detail": "no context server"})) as url:
        assert main(["health", url]) == 0
        assert main(["health", url, "--ready"]) == 1
    assert capsys.readouterr().out.splitlines()[1] == f"{url} 503: no context server"


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'"x"'])
def test_something_else_at_that_port(capsys: pytest.CaptureFixture[str], body: bytes) -> None:
    with service(health=(404, body)) as url:
        assert main(["health", url]) == 1
    assert "404: an answer that is not of this product" in capsys.readouterr().out


def test_nobody_at_that_port(capsys: pytest.CaptureFixture[str]) -> None:
    with service(health=OK) as url:
        pass
    assert main(["health", url]) == 1
    assert capsys.readouterr().out.startswith(f"{url} does not answer: ")


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port"])
def test_no_address(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert main(["health", url]) == USER_ERROR
    assert "is not an HTTP address" in capsys.readouterr().err


def test_the_service_beside_it_says_where_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "url"))
    assert main(["health"]) == USER_ERROR
    assert "still starting, or has failed" in capsys.readouterr().err
    with service(health=OK) as url:
        write_serving(Serving(url))
        assert main(["health"]) == 0
    assert capsys.readouterr().out == f"{url} ok\n"
    assert [path.name for path in tmp_path.iterdir()] == ["url"]


def test_what_tls_needs_goes_along(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "url"))
    serving = Serving("https://10.0.0.1:8000", "ca.crt", "tls.crt", "tls.key")
    write_serving(serving)
    assert read_serving() == serving


def test_nothing_is_said_without_the_variable() -> None:
    write_serving(Serving("http://127.0.0.1:1"))
    assert read_serving() is None


def test_a_file_that_cannot_be_written_names_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nowhere" / "url"))
    assert main(["coordinator", "--port", "0"]) == USER_ERROR


def test_it_starts_without_an_http_stack() -> None:
    """It runs every few seconds beside each service."""
    program = (
        "import sys; from kvmesh.cli.main import main; main(['health', 'http://127.0.0.1:9']);"
        "print(sorted({'aiohttp', 'numpy', 'pydantic', 'rich', 'zmq'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_the_mesh_of_up_is_asked_where_nothing_else_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVMESH_RUN_DIR", str(tmp_path))
    with service(health=OK) as url:
        own = ProcessState(name="supervisor", pid=os.getpid(), start_ticks=start_ticks(os.getpid()))
        run_dir = RunDir(tmp_path)
        run_dir.prepare()
        run_dir.write(
            MeshState(
                phase="ready", supervisor=own, url=url, coordinator_url="", indexer_url="", model="m", temp_dir=""
            )
        )
        assert main(["health"]) == 0
    assert capsys.readouterr().out == f"{url} ok\n"
