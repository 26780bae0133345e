"""The command of the fault matrix, as far as it starts no mesh."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"


def matrix(results: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tests" / "faults" / "matrix.py"), "--results", str(results), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_text_that_no_case_has_is_an_error_and_leaves_the_published_table_alone(tmp_path: Path) -> None:
    before = PAGE.read_bytes()
    done = matrix(tmp_path / "results.json", "--only", "memfd", "--only", "nobody, kill")
    assert done.returncode == 2
    assert "no case has 'nobody, kill' in its name; --list prints them" in done.stderr
    assert PAGE.read_bytes() == before


def test_the_names_of_cases_are_listed(tmp_path: Path) -> None:
    done = matrix(tmp_path / "results.json", "--list", "--only", "memfd: receiver, kill")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        f"memfd: receiver, kill, {point}"
        for point in ("before send", "first slice", "between slices", "last slice", "before acknowledgement")
    ]
