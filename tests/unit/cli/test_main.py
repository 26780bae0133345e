from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvmesh.cli.errors import UserError
from kvmesh.cli.main import COMMANDS, USER_ERROR, main


def test_help_lists_every_command(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kvmesh 0")


def test_an_unknown_command_names_the_known_ones(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["serve"])
    assert exit_.value.code == USER_ERROR
    assert "there is no command 'serve'" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([name, "--help"])
    assert exit_.value.code == 0
    assert f"usage: kvmesh {name}" in capsys.readouterr().out


def test_a_mistyped_flag_names_the_nearest(capsys):
    with pytest.raises(SystemExit):
        main(["context", "--kv-cache-config.max-tokns", "3"])
    assert "did you mean --kv-cache-config.max-tokens?" in capsys.readouterr().err


def test_a_bad_setting_is_one_sentence(capsys):
    assert main(["coordinator", "--lease-s", "-2"]) == USER_ERROR
    error = capsys.readouterr().err
    assert error.startswith("kvmesh coordinator: lease_s: ")
    assert "Traceback" not in error


def test_an_error_in_one_of_several_tasks_is_one_sentence(capsys):
    assert main(["events", "--endpoint", "junk"]) == USER_ERROR
    error = capsys.readouterr().err
    assert error == (
        "kvmesh events: cannot subscribe to junk (Invalid argument); an endpoint is like tcp://127.0.0.1:5557\n"
    )


def test_a_group_that_holds_our_own_mistakes_is_raised(monkeypatch):
    def run(_args: object) -> int:
        raise ExceptionGroup("tasks", [UserError("a sentence"), ExceptionGroup("more", [KeyError("a mistake")])])

    monkeypatch.setattr("kvmesh.cli.events.run", run)
    with pytest.raises(ExceptionGroup):
        main(["events"])


def test_commands_do_not_load_torch():
    """Of all commands only servers need tensors, and they load them in the engine's process."""
    program = (
        "import importlib, json, sys\n"
        "from kvmesh.cli.main import COMMANDS\n"
        "[importlib.import_module(command.module) for command in COMMANDS.values()]\n"
        "print(json.dumps([name for name in ('torch', 'transformers', 'nixl') if name in sys.modules]))"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout
    assert json.loads(output) == []


def test_a_wrong_choice_is_one_line(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["transfers", "--state", "fail"])
    assert exit_.value.code == USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvmesh transfers: argument --state: invalid choice: 'fail'")


def test_a_snapshot_that_cannot_be_written_is_told_at_the_start(capsys):
    assert main(["indexer", "--port", "0", "--snapshot-path", "/proc/nope/index"]) == USER_ERROR
    assert "snapshot_path /proc/nope/index: /proc/nope cannot be made: " in capsys.readouterr().err
