"""The strict base of every configuration class."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from kvmesh.config.nearest import unknown_key_message

__all__ = ["StrictModel"]


class StrictModel(BaseModel):
    """A pydantic model that refuses unknown keys and names the nearest right one.

    Values follow pydantic's lax conversions (``"5"`` is an int). A field's docstring is its description.
    """

    model_config = ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    @model_validator(mode="before")
    @classmethod
    def reject_unknown_keys(cls, data: Any) -> Any:
        """Report every unknown key at once, before pydantic's own less helpful "extra inputs" error."""
        if not isinstance(data, dict):
            return data
        problems = [unknown_key_message(str(key), cls.model_fields) for key in data if key not in cls.model_fields]
        if problems:
            raise PydanticCustomError("unknown_key", "{problems}", {"problems": "; ".join(problems)})
        return data
