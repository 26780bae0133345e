"""The configuration reference page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, StrictInt

from kvmesh.config import KvCacheConfig, WorkerSettings
from kvmesh.config.reference import render
from kvmesh.config.type_text import constraint_text, default_text, type_text

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_page_is_up_to_date() -> None:
    """Regenerate it with ``python -m kvmesh.config.reference > docs/configuration.md``."""
    assert PAGE.read_text(encoding="utf-8") == render()


def test_every_field_is_described() -> None:
    for kind in (KvCacheConfig, WorkerSettings):
        assert [name for name, field in kind.model_fields.items() if not field.description] == []


def test_states() -> None:
    page = render()
    for line in (
        "| `enable_block_reuse` | `bool` | `true` |  | implemented |",
        "| `use_uvm` | `bool` | `false` |  | accepted without effect |",
        "| `pool_ratio` | `list[float] \\| None` | `null` | not empty | implemented |",
        "| `mamba_ssm_philox_rounds` | `int` | `10` | >= 1 | not supported yet: default only |",
        "| `dtype` | `str` | `'auto'` |  | implemented for auto, and the data type that the model is served in |",
        "| `copy_on_partial_reuse` | `bool` | `true` |  | implemented in V1; V2 always copies |",
        "| `secondary_offload_min_priority` | `int \\| None` | `null` |  | deprecated alias of",
    ):
        assert line in page


class Sample(BaseModel):
    """One field of each kind."""

    required: int
    choice: Literal["a", "b"] | None = None
    bounded: Annotated[float, Field(gt=0, le=1)] = 0.5
    maybe: Annotated[int, Field(ge=3)] | None = None
    offsets: list[Annotated[StrictInt, Field(gt=0)]] = Field(default_factory=list)
    named: str = "x"


def test_texts() -> None:
    fields = Sample.model_fields
    assert {name: type_text(field.annotation) for name, field in fields.items()} == {
        "required": "int",
        "choice": "'a' | 'b' | None",
        "bounded": "float",
        "maybe": "int | None",
        "offsets": "list[int]",
        "named": "str",
    }
    assert [default_text(field) for field in fields.values()] == ["", "null", "0.5", "null", "[]", "'x'"]
    constraints = [constraint_text(field) for field in fields.values()]
    assert constraints == ["", "", "> 0, <= 1", ">= 3", "each strict, > 0", ""]
