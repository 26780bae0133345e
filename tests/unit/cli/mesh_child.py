"""A child of a mesh without a model: ``mesh_child.py COMMAND --config FILE``. Run by ``mesh_program.py``."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import yaml
from aiohttp import web

from kvmesh.cli.parent import end_with_parent
from kvmesh.net.discovery import CoordinatorClient
from kvmesh.net.http import json_response
from kvmesh.net.service import Service, run_service
from kvmesh.protocol.members import Member
from kvmesh.telemetry import configure_logging, get_logger


class Stand(Service):
    """Registers like a worker, answers like a router."""

    def __init__(self, command: str, settings: dict) -> None:
        super().__init__(command, drain_s=0.2)
        self.settings = settings
        self.role = command
        self.client = CoordinatorClient(settings["coordinator_url"])
        self.app.router.add_get("/ready", self._ready)
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_post("/v1/chat/completions", self._chat)

    async def start(self, tasks, url):
        await self.client.start(tasks)
        if "instance_id" in self.settings:
            member = Member(instance_id=self.settings["instance_id"], role=self.role, url=url, pid=os.getpid())
            self.client.announce(member)
            get_logger("stand").warning("a warning to show", secret=os.environ["KVMESH_CLUSTER_SECRET"][:3])

    async def stop(self):
        await self.client.stop()

    async def _ready(self, _request: web.Request) -> web.Response:
        roles = {member.role for member in self.client.members()}
        if self.settings.get("model") == "unready":
            return json_response({"ready": False, "detail": "no pair is usable"}, 503)
        return json_response({}, 200 if {"context", "generation"} <= roles else 503)

    async def _models(self, _request: web.Request) -> web.Response:
        return json_response({"data": [{"id": "stand-in"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        if self.settings.get("model") == "small":
            error = {
                "message": "It holds 10 tokens.",
                "type": "invalid_request_error",
                "code": "context_length_exceeded",
            }
            return json_response({"error": error}, 400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for text, finish in (("Par", "null"), ("is.", '"stop"')):
            event = f'data: {{"choices": [{{"delta": {{"content": "{text}"}}, "finish_reason": {finish}}}]}}\n\n'
            await response.write(event.encode())
            await anyio.sleep(0.001)
        await response.write(b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}\n\n')
        await response.write(b"data: [DONE]\n\n")
        return response


def main(command: str, _config: str, path: str) -> int:
    if command == "coordinator":
        from kvmesh.cli.main import main as real

        return real([command, "--config", path])
    end_with_parent()
    settings = yaml.safe_load(Path(path).read_text())
    configure_logging(command, "info", settings["log_format"])
    if settings.get("model") == "broken" and command == "generation":
        print("this model cannot be loaded", flush=True)
        return 2
    if "instance_id" in settings:
        publisher = urlsplit(settings["kv_cache_config"]["kv_events_config"]["endpoint"])
        try:
            socket.create_server((publisher.hostname, publisher.port))
        except OSError as error:
            print(error, flush=True)
            return 2
    run_service(Stand(command, settings), "127.0.0.1", settings.get("port", 0))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
