"""The causes inside nested exception groups."""

from __future__ import annotations

from kvmesh.net.groups import leaves


def test_every_cause_is_found_in_order() -> None:
    first, second, third = ValueError("1"), KeyError("2"), OSError("3")
    nested = ExceptionGroup("outer", [first, ExceptionGroup("inner", [ExceptionGroup("deep", [second]), third])])
    assert leaves(nested) == [first, second, third]
