from __future__ import annotations

import json

from kvmesh.cli import logs
from kvmesh.cli.logs import LogFollower, LogLine, tail


def line(level: str, event: str, **fields: object) -> str:
    return json.dumps({"event": event, "level": level, "timestamp": "t", "service": "s", **fields}) + "\n"


def test_only_new_warnings_and_worse_are_shown(tmp_path):
    path = tmp_path / "router.log"
    path.write_text(line("error", "old"))
    follower = LogFollower([("router", path)])
    assert follower.poll() == []
    with path.open("a") as file:
        file.write(line("info", "fine") + "library chatter\n" + line("warning", "slow", after_s=3))
        file.write('{"event": "half')
    assert follower.poll() == [LogLine("router", "warning", "slow after_s=3")]
    with path.open("a") as file:
        file.write('", "level": "error"}\n')
    assert follower.poll() == [LogLine("router", "error", "half")]


def test_a_log_that_appears_later_or_is_truncated(tmp_path):
    path = tmp_path / "router.log"
    follower = LogFollower([("router", path)])
    assert follower.poll() == []
    path.write_text(line("error", "one") * 2)
    assert len(follower.poll()) == 2
    path.write_text(line("error", "two"))
    assert [shown.text for shown in follower.poll()] == ["two"]


def test_logs_are_kept_small(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "MAX_LOG_BYTES", 100)
    path = tmp_path / "router.log"
    follower = LogFollower([("router", path)])
    with path.open("a") as file:
        file.write(line("error", "x" * 100))
        file.flush()
        assert len(follower.poll()) == 1
        assert path.stat().st_size == 0
        assert (tmp_path / "router.log.1").stat().st_size > 100
        file.write(line("error", "after"))
        file.flush()
        assert [shown.text for shown in follower.poll()] == ["after"]


def test_tail_is_readable(tmp_path):
    path = tmp_path / "x.log"
    path.write_text("first\n" + line("info", "hello", port=1) + "Traceback\n")
    assert tail(path, 2) == "info: hello port=1\nTraceback"
    assert tail(tmp_path / "absent") == ""
