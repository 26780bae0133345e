#!/usr/bin/env python3
"""Copies alert rules and dashboards of ``compose/observability`` into the chart, which can read its own files only.

usage: copy_observability.py     (after a change of those files; a test compares them)
"""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "compose" / "observability"
TARGET = ROOT / "k8s" / "chart" / "observability"


def copies() -> dict[Path, Path]:
    """Each file of the chart with the one that it is a copy of."""
    dashboards = sorted(SOURCE.rglob("*.json"))
    rules = [path for suffix in ("yml", "yaml") for path in sorted(SOURCE.rglob(f"*.{suffix}")) if has_alerts(path)]
    return {
        **{TARGET / "dashboards" / path.name: path for path in dashboards},
        **{TARGET / "rules" / f"{path.stem}.yml": path for path in rules},
    }


def has_alerts(path: Path) -> bool:
    """Whether a file holds groups of rules: not Prometheus' own configuration, nor cases of ``promtool test rules``."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return isinstance(content, dict) and set(content) == {"groups"}


def main() -> None:
    """Replace what the chart has."""
    shutil.rmtree(TARGET, ignore_errors=True)
    for copy, original in copies().items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(original, copy)


if __name__ == "__main__":
    main()
