"""Hatch build hook: compiles the native code during every install and puts it into the wheel."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Builds in place (an editable install uses the files there) and marks the wheel as platform-specific."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Compile the CPU library and the extension, and add them to the wheel.

        Raises:
            BuildError: A compiler or a header is missing; the message says what to install.
        """
        root = Path(self.root)
        build = _load_build_module(root / "gpu_kernels" / "kvmesh" / "kernels" / "build.py")
        built: list[Path] = build.build_cpu()
        if build.CUDA_LIBRARY.is_file():  # built by hand before: it needs nvcc
            built.append(build.CUDA_LIBRARY)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["artifacts"] += [f"/{path.relative_to(root.resolve()).as_posix()}" for path in built]


def _load_build_module(path: Path) -> ModuleType:
    """Load build.py by its path: the package it belongs to is not installed yet."""
    spec = importlib.util.spec_from_file_location("kvmesh_native_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module
