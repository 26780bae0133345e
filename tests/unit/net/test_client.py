"""The client of services: keys that change, and redirects that may take them along, or not."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from aiohttp import web

from kvmesh.net.auth import ApiKeys
from kvmesh.net.client import HttpClient, PeerUnreachableError
from kvmesh.net.http import api_key_middleware, json_response
from kvmesh.net.service import Service, serving
from kvmesh.protocol.errors import ApiError


class Leader(Service):
    """Asks for a key and echoes bodies."""

    def __init__(self, keys: ApiKeys) -> None:
        super().__init__("leader", middleware=[api_key_middleware(keys)])
        self.app.router.add_post("/members", self._echo)

    async def _echo(self, request: web.Request) -> web.Response:
        return json_response({"body": (await request.read()).decode(), "query": request.query_string})


class Follower(Service):
    """Sends everybody elsewhere."""

    def __init__(self, elsewhere: str = "") -> None:
        super().__init__("follower")
        self.elsewhere = elsewhere
        self.app.router.add_post("/members", self._redirect)

    async def _redirect(self, request: web.Request) -> web.Response:
        return json_response({}, 307, {"Location": f"{self.elsewhere}{request.path_qs}"})


async def test_a_redirect_takes_body_and_key_along_to_another_host(tmp_path: Path) -> None:
    """A coordinator that follows sends to the one that leads, which asks for the same key."""
    file = tmp_path / "keys"
    file.write_text("mesh sk-1\n")
    keys = ApiKeys(file)
    async with serving(Leader(keys)) as leader, serving(Follower(leader)) as follower:
        wanted = {"body": '{"a":1}', "query": "x=1"}
        async with HttpClient(keys=keys, follow_leader=True) as http:
            assert await http.call("POST", f"{follower}/members?x=1", dict[str, str], body={"a": 1}) == wanted
        async with HttpClient(headers={"Authorization": "Bearer sk-1"}, follow_leader=True) as http:
            assert await http.call("POST", f"{follower}/members?x=1", dict[str, str], body={"a": 1}) == wanted
        async with HttpClient(follow_leader=True) as http:
            with pytest.raises(ApiError) as caught:
                await http.call("POST", f"{follower}/members", dict[str, str], body={})
            assert caught.value.status == 401


async def test_nobody_but_a_coordinator_sends_elsewhere() -> None:
    """Else any address that is asked gets the key into other hands, and requests to other places."""
    asked: list[str] = []

    class Elsewhere(Leader):
        async def _echo(self, request: web.Request) -> web.Response:
            asked.append(request.headers.get("Authorization", ""))
            return await super()._echo(request)

    keys = ApiKeys(fixed=["sk-1"])
    async with serving(Elsewhere(keys)) as victim, serving(Follower(victim)) as url, HttpClient(keys=keys) as http:
        with pytest.raises(ApiError, match="does not follow") as caught:
            await http.call("POST", f"{url}/members", dict[str, str], body={})
    assert (caught.value.status, asked) == (307, [])


@pytest.mark.parametrize(
    "location",
    [
        "http://169.254.169.254/latest/meta-data",
        "http://other:8400/members?x=2",
        "http://other:8400/members",
        "https://other:8400/members?x=1",
        "http://user:password@other:8400/members?x=1",
        "file:///members?x=1",
        "http://other:99999/members?x=1",
        "http://[::1/members?x=1",
        "http:///members?x=1",
        "",
    ],
)
async def test_a_coordinator_sends_nowhere_but_to_the_same_request_at_another(location: str) -> None:
    class Liar(Service):
        def __init__(self) -> None:
            super().__init__("liar")
            self.app.router.add_post("/members", self._lie)

        async def _lie(self, _request: web.Request) -> web.Response:
            return json_response({}, 307, {"Location": location})

    async with serving(Liar()) as url, HttpClient(timeout_s=5.0, follow_leader=True) as http:
        with pytest.raises(ApiError, match="does not follow"):
            await http.call("POST", f"{url}/members?x=1", dict[str, str], body={})


async def test_a_key_that_changes_is_sent_from_the_next_request_on(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-old\n")
    async with serving(Leader(ApiKeys(fixed=["sk-new"]))) as url, HttpClient(keys=ApiKeys(file)) as http:
        with pytest.raises(ApiError):
            await http.call("POST", f"{url}/members", dict[str, str], body={})
        file.write_text("sk-new\n")
        assert (await http.call("POST", f"{url}/members", dict[str, str], body={}))["body"] == "{}"


async def test_redirects_in_a_circle_end() -> None:
    follower = Follower()
    async with serving(follower) as url, HttpClient(timeout_s=5.0, follow_leader=True) as http:
        follower.elsewhere = url
        with pytest.raises((ApiError, PeerUnreachableError)):
            await http.call("POST", f"{url}/members", dict[str, str], body={})


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_nobody_listening_is_said_without_objects(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    async with HttpClient() as client:
        with pytest.raises(PeerUnreachableError) as caught:
            await client.call("GET", f"{scheme}://127.0.0.1:{port}/health", dict[str, str])
    assert f"cannot connect to 127.0.0.1:{port} (" in str(caught.value)
    assert "ssl" not in str(caught.value).lower()


class Talker(Service):
    """Answers with as many bytes as are asked for, in pieces, as an answer or as an error."""

    def __init__(self) -> None:
        super().__init__("talker")
        self.app.router.add_get("/say/{status}/{count}", self._say)

    async def _say(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=int(request.match_info["status"]))
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(b'"' + b"x" * (int(request.match_info["count"]) - 2))
        await response.write(b'"')
        return response


@pytest.mark.parametrize("status", [200, 500])
async def test_an_answer_without_end_is_not_kept(status: int) -> None:
    """Who answers need not be a friend: a coordinator asks whoever is at an address."""
    async with serving(Talker()) as url, HttpClient() as http:
        assert await http.call("GET", f"{url}/say/200/1000", str, max_bytes=1000) == "x" * 998
        with pytest.raises(PeerUnreachableError, match="answers with more than"):
            await http.call("GET", f"{url}/say/{status}/{(1 << 20) + 1}", str, max_bytes=1 << 20)
        assert await http.call("GET", f"{url}/say/200/10", str) == "x" * 8, "the client goes on"
