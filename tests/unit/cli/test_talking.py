"""``chat`` and ``bench`` against a small OpenAI-compatible server on a real socket."""

from __future__ import annotations

import itertools
import json

import anyio
import anyio.to_thread
import msgspec
import pytest
from aiohttp import web

from kvmesh.cli.bench.runner import Load, Runner, read_vocabulary
from kvmesh.cli.bench.workload import LengthRange, requests
from kvmesh.cli.errors import UserError
from kvmesh.cli.main import main
from kvmesh.cli.readiness import ask_first_question
from kvmesh.net.http import json_response
from kvmesh.net.service import Service, serving
from kvmesh.protocol.errors import ApiError


class Model(Service):
    """Answers with words; ``fault`` says what goes wrong."""

    def __init__(self, fault: str = "") -> None:
        super().__init__("router")
        self.fault = fault
        self.bodies: list[dict] = []
        self.at_once = self.most_at_once = 0
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_post("/tokenize", self._tokenize)
        self.app.router.add_post("/v1/completions", self._completions)
        self.app.router.add_post("/v1/chat/completions", self._completions)

    async def _models(self, _request: web.Request) -> web.Response:
        return json_response({"data": [{"id": "tiny"}]} if self.fault != "no model" else {"data": []})

    async def _tokenize(self, _request: web.Request) -> web.Response:
        return json_response({"count": 3, "max_model_len": 10, "tokens": [5, 6, 7, 5]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.bodies.append(body)
        if self.fault == "refused":
            raise ApiError(503, "Busy.", code="overloaded")
        chat = "messages" in body
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        count = body["max_tokens"] if not chat else 3
        for number in range(count):
            piece = {"delta": {"content": "word "}} if chat else {"text": "word "}
            finish = "length" if number == count - 1 and self.fault != "cut" else None
            await self._event(response, {"choices": [{**piece, "finish_reason": finish}]})
            await anyio.sleep(0.001)
            if self.fault == "broken" and number:
                request.transport.abort()
                return response
            if self.fault == "error":
                await self._event(response, {"error": {"message": "engine died"}})
                return response
        if self.fault == "slow":
            await anyio.sleep(30)
        self.at_once -= 1
        usage = {"prompt_tokens": 10, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 4}}
        await self._event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _event(self, response: web.StreamResponse, data: dict) -> None:
        await response.write(b"data: " + msgspec.json.encode(data) + b"\n\n")


def specs(count: int):
    return itertools.islice(requests("load", [5, 6], LengthRange(4, 4), LengthRange(3, 3), seed=0), count)


async def bench(model: Model, load: Load, limit_s: float = 20.0):
    async with serving(model) as url:
        return await Runner(url, "tiny", {"X-Key": "k"}, 10.0).run(load, limit_s)


async def test_a_closed_loop_keeps_its_concurrency():
    model = Model()
    records, wall_s = await bench(model, Load(specs(9), None, 3))
    assert [record.outcome for record in records] == ["ok"] * 9
    assert model.most_at_once == 3
    assert wall_s > 0
    record = records[0]
    assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (10, 4, 3)
    assert record.ttft_s > 0
    assert len(record.gaps_s) == 2
    assert record.tpot_s == pytest.approx(sum(record.gaps_s) / 2)
    assert model.bodies[0]["stream_options"] == {"include_usage": True}
    assert len(model.bodies[0]["prompt"]) == 4


async def test_an_open_loop_does_not_wait_for_answers():
    model = Model()
    records, _ = await bench(model, Load(specs(6), itertools.repeat(0.0), 1))
    assert len(records) == 6
    assert model.most_at_once == 6


async def test_steady_streams_run_beside_the_load_and_end_with_it():
    steady = requests("steady", [5], LengthRange(2, 2), LengthRange(2000, 2000), seed=1)
    records, _ = await bench(Model(), Load(specs(4), None, 1, (steady,)))
    outcomes = [(record.group, record.outcome) for record in records]
    assert outcomes.count(("load", "ok")) == 4
    assert ("steady", "unfinished") in outcomes


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [("refused", "503 overloaded"), ("cut", "cut off"), ("error", "engine died"), ("broken", "broke off")],
)
async def test_failures_are_named(fault, outcome):
    records, _ = await bench(Model(fault), Load(specs(1), None, 1))
    assert records[0].outcome.startswith(outcome)


async def test_nobody_there():
    records, _ = await Runner("http://127.0.0.1:9", "tiny", {}, 1.0).run(Load(specs(1), None, 1), 5.0)
    assert records[0].outcome == "unreachable"


async def test_the_run_is_bounded_in_time():
    records, wall_s = await bench(Model("slow"), Load(specs(2), None, 2), limit_s=0.2)
    assert [record.outcome for record in records] == ["unfinished"] * 2
    assert wall_s < 10


async def test_the_vocabulary_is_the_server_s():
    async with serving(Model()) as url:
        assert await read_vocabulary(url, "tiny", {}) == [5, 6, 7]


async def test_the_first_question():
    async with serving(Model()) as url:
        name, answer = await ask_first_question(url)
    assert (name, answer.answer, answer.tokens) == ("tiny", "word word word", 3)
    assert answer.ttft_ms > 0
    async with serving(Model("cut")) as url:
        with pytest.raises(ApiError):
            await ask_first_question(url)
    async with serving(Model("no model")) as url:
        with pytest.raises(UserError):
            await ask_first_question(url)


async def command(*argv: str) -> int:
    """A command runs its own event loop, so it runs in a thread of its own."""
    return await anyio.to_thread.run_sync(main, argv)


async def test_bench_command_writes_its_findings(tmp_path, capsys):
    async with serving(Model()) as url:
        status = await command(
            "bench", "--url", url, "--requests", "4", "--concurrency", "2", "--output-tokens", "3:5",
            "--json", str(tmp_path / "run.json"), "--plot", str(tmp_path / "run.png"), "--steady", "1",
        )  # fmt: skip
    assert status == 0
    output = capsys.readouterr().out
    assert "TTFT first token" in output
    assert "4 ok in" in output
    report = json.loads((tmp_path / "run.json").read_text())
    assert {group["group"] for group in report["groups"]} == {"load", "steady"}
    assert report["run"]["output_tokens"] == [3, 5]
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


async def test_bench_command_fails_when_requests_do(capsys):
    async with serving(Model("refused")) as url:
        assert await command("bench", "--url", url, "--requests", "2") == 1
    assert "2 503 overloaded" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    [("--url", "http://192.0.2.1"), ("--requests", "0"), ("--rate", "-1"), ("--shared-prefix-tokens", "1000")],
)
async def test_bench_command_refuses(flags, capsys):
    assert await command("bench", *flags) == 2
    assert capsys.readouterr().err.startswith("kvmesh bench: ")


async def test_chat_command_answers_one_question(capsys):
    model = Model()
    async with serving(model) as url:
        assert await command("chat", "--url", url, "--system", "Be brief.", "How", "are", "you?") == 0
    assert "word word word" in capsys.readouterr().out
    assert model.bodies[0]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How are you?"},
    ]


async def test_chat_command_keeps_the_history(capsys, monkeypatch):
    lines = iter(["first", "", "second"])

    def read(*_: object) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("rich.console.Console.input", read)
    model = Model()
    async with serving(model) as url:
        assert await command("chat", "--url", url) == 0
    assert [message["role"] for message in model.bodies[1]["messages"]] == ["user", "assistant", "user"]


async def test_chat_command_says_when_nobody_is_there(capsys):
    assert await command("chat", "--url", "http://127.0.0.1:9", "hello") == 2
    assert "check --url" in capsys.readouterr().err
