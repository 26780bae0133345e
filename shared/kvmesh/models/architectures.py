"""Which module implements which architecture. A new architecture is a module and one row here. Never imports torch."""

from __future__ import annotations

from typing import NamedTuple

from kvmesh.models.errors import ModelError

__all__ = ["ARCHITECTURES", "Architecture", "architecture_of"]


class Architecture(NamedTuple):
    """A model family as checkpoints name it.

    ``module`` offers what :class:`kvmesh.models.base.ArchitectureModule` states.
    """

    name: str
    module: str
    huggingface: tuple[str, ...]
    """Names in ``architectures`` of config.json."""
    gguf: tuple[str, ...]
    """Values of ``general.architecture``."""


ARCHITECTURES = (
    Architecture("llama", "kvmesh.models.llama", ("LlamaForCausalLM",), ("llama",)),
    Architecture("mistral", "kvmesh.models.llama", ("MistralForCausalLM",), ()),
    Architecture("gemma2", "kvmesh.models.gemma2", ("Gemma2ForCausalLM",), ("gemma2",)),
    Architecture("gemma3", "kvmesh.models.gemma3", ("Gemma3ForCausalLM",), ("gemma3",)),
)


def architecture_of(checkpoint_name: str) -> Architecture:
    """The architecture that a checkpoint names, in either format's spelling.

    Raises:
        ModelError: it is not implemented.
    """
    for architecture in ARCHITECTURES:
        if checkpoint_name in (*architecture.huggingface, *architecture.gguf):
            return architecture
    known = ", ".join(name for architecture in ARCHITECTURES for name in architecture.huggingface)
    raise ModelError(f"The architecture {checkpoint_name!r} is not supported yet; supported: {known}.")
