"""What ``kvmesh events`` shows, and of what."""

from __future__ import annotations

import io
import socket
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console

from kvmesh.cli import main as cli
from kvmesh.cli.events_view import EventFilter, Printer, Stream, describe
from kvmesh.config.curve import CurveSettings
from kvmesh.events.keyed import KeyRing, StreamKey
from kvmesh.events.publisher import ZmqPublisher
from kvmesh.events.records import Cleared, EventRecord, Owner, Removed, Stored, Tier
from kvmesh.hashing import salt_id
from kvmesh.net.curve import CurveSecurity, create_key_pair
from kvmesh.protocol.events import AllBlocksCleared, BlockStored, EventBatch, KeyedBlocksStored


@pytest.mark.parametrize("ts", [float("nan"), float("inf"), 1e300, -1e18])
def test_a_clock_that_shows_no_time_ends_nothing(ts: float) -> None:
    """The time is for people only, and any publisher of a mesh may get it wrong."""
    view = make_printer()
    view.batch(Stream("w"), 0, msgspec.msgpack.encode([ts, [["AllBlocksCleared"]], 0]))
    assert view._console.export_text().startswith("--:--:-- w #0 cleared")


def test_publishers_cannot_steer_the_terminal() -> None:
    view = make_printer()
    event = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 1, "cache_salt": "\x1b[2Jü"}
    view.batch(Stream("w\x1b]0;x\x07"), 0, msgspec.msgpack.encode([0.0, [event], 0]))
    view.note("w\r", "\x9b2J")
    text = view._console.export_text()
    assert "w\\x1b]0;x\\x07 #0 stored" in text
    assert "salt \\x1b[2Jü: " in text
    assert "w\\r \\x9b2J" in text


def stored(hashes: list[int], parent: int | None = None, tokens: list[int] | None = None, **fields: Any) -> Stored:
    ids = np.array([0] * 4 * len(hashes) if tokens is None else tokens, np.int32)
    return Stored(hashes=hashes, parent=parent, token_ids=ids, block_size=4, **fields)


def printed(printer: Printer) -> str:
    return printer._console.export_text()


def make_printer(*args: Any, **options: Any) -> Printer:
    return Printer(Console(record=True, width=200, file=io.StringIO()), *args, **options)


def payload(*events: Any) -> bytes:
    return msgspec.msgpack.encode(EventBatch(ts=0.0, events=list(events), data_parallel_rank=0))


def test_events_are_readable() -> None:
    assert (
        describe(stored([1, 2**64 - 1])) == "stored   2 blocks, 8 tokens, after root, GPU: 0000000000000001 " + "f" * 16
    )
    assert describe(stored([1], tokens=[], tier=Tier.HOST)) == "moved    1 blocks to CPU: 0000000000000001"
    assert " lora sql salt s: " in describe(stored([1], lora="sql", salt="s"))
    assert describe(Removed(hashes=[1] * 6)).endswith("0000000000000001 ... 2 more")
    assert describe(Cleared()) == "cleared  everything"


async def test_gaps_restarts_and_the_end_are_noticed() -> None:
    printer = make_printer(3)
    for sequence in (0, 1, 5, 0):
        printer.sequence("context-0", sequence)
        printer.batch(Stream("context-0"), sequence, payload(AllBlocksCleared()))
    printer.batch(Stream("context-1"), 0, b"\xc1")
    text = printed(printer)
    assert "missed 3 batches" in text
    assert "publisher restarted" in text
    assert "no batch that this command can read" in text
    assert text.count("cleared  everything") == 3
    assert printer.done.is_set()


def test_filters_by_type_model_and_adapter() -> None:
    stream = Stream("w", "m", lora="of the worker")
    shows = EventFilter(frozenset({"moved", "removed"})).shows
    shown = [shows(stream, record) for record in (stored([1], tokens=[]), Removed(hashes=[1]), stored([1]), Cleared())]
    assert shown == [True, True, False, False]
    assert EventFilter(model="m").shows(stream, Cleared())
    assert not EventFilter(model="n").shows(stream, Cleared())
    assert EventFilter(lora="of the worker").shows(stream, stored([1]))
    assert EventFilter(lora="7").shows(stream, stored([1], lora=7))
    assert not EventFilter(lora="7").shows(stream, stored([1]))


def test_filters_by_what_the_event_names() -> None:
    """One stream may be of several models and tenants."""
    stream = Stream("w", "m", tenant="acme")
    other = stored([1], model="other", tenant="else")
    gone = Removed(hashes=[1], owner=Owner("other", "else", None, None))
    for record in (other, gone):
        assert EventFilter(model="other", tenant="else").shows(stream, record)
        assert not EventFilter(model="m").shows(stream, record)
        assert not EventFilter(tenant="acme").shows(stream, record)
    unnamed: list[EventRecord] = [stored([1]), Removed(hashes=[1]), Cleared()]
    for one in unnamed:
        assert EventFilter(model="m", tenant="acme").shows(stream, one)
        assert not EventFilter(tenant="else").shows(stream, one)
    shows = EventFilter(tier=Tier.HOST).shows
    assert shows(stream, stored([1], tier=Tier.HOST))
    assert shows(stream, Cleared())
    assert not shows(stream, stored([1]))
    assert not shows(stream, Removed(hashes=[1]))


def test_a_salted_block_that_moves_is_shown() -> None:
    shows = EventFilter(salt="tenant-a").shows
    assert shows(Stream("w"), stored([1, 2], salt="tenant-a"))
    assert shows(Stream("w"), stored([2], tokens=[], tier=Tier.HOST))
    assert not shows(Stream("w"), stored([3], tokens=[], tier=Tier.HOST))


@pytest.mark.parametrize("on_the_wire", ["tenant-a", str(salt_id("tenant-a"))])
def test_a_salt_holds_for_the_whole_sequence(on_the_wire: str) -> None:
    """Only the first block tells it; workers write the text or its number."""
    shows = EventFilter(salt="tenant-a").shows
    stream = Stream("w")
    assert shows(stream, stored([1, 2], salt=on_the_wire))
    assert shows(stream, stored([3], parent=2))
    assert shows(stream, stored([4], parent=3))
    assert not shows(stream, stored([5]))
    assert not shows(stream, stored([6], parent=5))
    assert not shows(Stream("another"), stored([3], parent=2))
    assert not shows(stream, stored([7], salt="tenant-b"))


def test_text_is_shown_and_bounded() -> None:
    def decode(model: str, ids: list[int]) -> str:
        if model != "m":
            raise ValueError("no tokenizer")
        return "".join(chr(token) for token in ids)

    event = BlockStored(block_hashes=[1, 2], parent_block_hash=None, token_ids=list(b"a[b]\nfgh"), block_size=4)
    printer = make_printer(decode=decode, text_chars=6)
    printer.batch(Stream("w", "m"), 0, payload(event))
    printer.batch(Stream("w", "other"), 1, payload(event))
    text = printed(printer)
    assert r"'a[b]\nf' ..." in text
    assert "(no tokenizer)" in text


@pytest.mark.parametrize(
    "flags",
    [
        ["--endpoint", "tcp://127.0.0.1:1", "--worker", "w"],
        ["--endpoint", "tcp://127.0.0.1:1", "--text"],
        ["--indexer", "http://127.0.0.1:1"],
        ["--count", "0"],
        ["--count", "-3", "--endpoint", "tcp://127.0.0.1:1"],
    ],
)
def test_what_does_not_go_together_is_a_sentence(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["events", *flags]) == cli.USER_ERROR
    told = capsys.readouterr()
    assert told.err.startswith("kvmesh events: ")
    assert (told.out, told.err.count("\n")) == ("", 1)


def test_encrypted_events_are_followed_with_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, secret = create_key_pair(tmp_path)
    publisher = ZmqPublisher("tcp://127.0.0.1:*", security=CurveSecurity.load(CurveSettings(key_file=str(secret))))
    publisher.start()
    stop = threading.Event()

    def publish() -> None:
        while not stop.wait(0.02):
            publisher.publish([AllBlocksCleared()])

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        assert publisher.endpoint is not None
        command = ["events", "--endpoint", publisher.endpoint, "--count", "1"]
        assert cli.main([*command, "--curve-key-file", str(secret)]) == 0
        monkeypatch.setenv("KVMESH_CURVE__KEY_FILE", str(secret))
        assert cli.main(command) == 0
        assert capsys.readouterr().out.count("cleared") == 2
        assert cli.main([*command, "--curve-key-file", str(tmp_path / "missing")]) == 2
        assert "kvmesh keys curve DIR" in capsys.readouterr().err
    finally:
        stop.set()
        thread.join()
        publisher.shutdown()


@pytest.mark.parametrize("given", [None, "other"])
def test_a_refused_connection_is_told(
    given: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the pair, or with another one, nothing would ever come; nothing else says why."""
    for stem in ("mesh", "other"):
        create_key_pair(tmp_path, stem)
    security = CurveSecurity.load(CurveSettings(key_file=str(tmp_path / "mesh.key_secret")))
    publisher = ZmqPublisher("tcp://127.0.0.1:*", security=security)
    publisher.start()
    assert publisher.endpoint is not None
    told: list[str] = []

    def note(printer: Printer, name: str, text: str) -> None:
        told.append(text)
        printer.done.set()

    monkeypatch.setattr(Printer, "note", note)
    keys = [] if given is None else ["--curve-key-file", str(tmp_path / f"{given}.key_secret")]
    try:
        assert cli.main(["events", "--endpoint", publisher.endpoint, *keys]) == 0
    finally:
        publisher.shutdown()
    assert told[0].startswith(f"{publisher.endpoint} refuses the connection")


def test_a_port_without_a_publisher_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something listens, and says nothing that a publisher would."""
    told: list[str] = []

    def note(printer: Printer, name: str, text: str) -> None:
        told.append(text)
        printer.done.set()

    monkeypatch.setattr(Printer, "note", note)
    monkeypatch.setattr("kvmesh.cli.events_follow.FIND_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        assert cli.main(["events", "--endpoint", endpoint]) == 0
    assert told == [f"no publisher answers at {endpoint} yet; waiting"]


@pytest.mark.parametrize("known", [True, False])
def test_blocks_that_are_named_by_a_key(known: bool) -> None:
    """Shown to who has the key, without text: a name says nothing of its tokens."""
    key = StreamKey(bytes(32))
    shown = make_printer(keys=KeyRing([key]) if known else None, decode=lambda _model, _tokens: "never asked")
    event = KeyedBlocksStored(key_id=key.key_id, block_hashes=[5, 6], parent_block_hash=None, block_size=4)
    shown.batch(Stream("w"), 0, payload(event))
    text = printed(shown)
    if known:
        assert f"stored   2 blocks, 8 tokens, after root, GPU named by key {key.key_id}: 0000000000000005" in text
        assert "(named by a key: no tokens are told)" in text
        assert "never asked" not in text
    else:
        assert "1 events left out: keyed_without_its_key" in text


def test_a_key_file_that_cannot_be_read_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["events", "--endpoint", "tcp://127.0.0.1:1", "--event-key-file", "/nowhere"]) == 2
    assert "--event-key-file /nowhere cannot be read" in capsys.readouterr().err
