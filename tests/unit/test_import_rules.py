"""Imports run one way: services -> shared -> gpu_kernels, and inside shared as the layout says."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).parents[2]
ROOTS = ("services", "shared", "gpu_kernels")

SERVICES = frozenset({"router", "context", "generation", "indexer", "coordinator", "cli"})
WITHOUT_TORCH = ("router", "indexer", "coordinator", "cli")
"""What runs from the base install, which has no torch and none of the engine's other dependencies."""

ENGINE_ONLY = frozenset({"torch", "safetensors", "nixl", "nixl_cu12", "nixl_cu13", "transformers"})

BELOW = {
    "kernels": frozenset({"kernels"}),
    "config": frozenset({"config", "protocol"}),
    "protocol": frozenset({"config", "protocol"}),
}
"""Packages at the bottom, and all of ours that they may import."""

NEVER = {
    "cache": frozenset({"engine", "transceiver", "models", "worker"}),
    "transceiver": frozenset({"engine", "models", "worker"}),
    "hashing": frozenset({"cache", "engine", "transceiver", "models", "worker"}),
    "models": frozenset({"engine", "transceiver", "worker"}),
    "telemetry": frozenset({"cache", "engine", "transceiver", "models", "worker", "events"}),
    "net": frozenset({"cache", "engine", "transceiver", "models", "worker", "events"}),
}
"""What a shared package must not know."""

CACHE_FACE = (
    "kvmesh.cache.layout",
    "kvmesh.cache.sharding",
    "kvmesh.cache.shared_memory",
    "kvmesh.cache.probe",
)
"""The modules of the cache that the transceiver and the models may know: its vocabulary, and the machine's memory."""


class Import(NamedTuple):
    """One import statement of ours."""

    module: str
    """The importing module."""
    target: str
    """What it imports, as far as it is written."""
    line: int
    eager: bool
    """Whether it happens when the module is imported."""


class Source(NamedTuple):
    root: str
    path: Path
    module: str

    @property
    def package(self) -> str:
        return self.module.split(".")[1]


@cache
def sources() -> tuple[Source, ...]:
    found = []
    for root in ROOTS:
        for path in sorted((REPOSITORY / root / "kvmesh").rglob("*.py")):
            parts = path.relative_to(REPOSITORY / root).with_suffix("").parts
            found.append(Source(root, path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)))
    return tuple(found)


@cache
def imports(source: Source) -> tuple[Import, ...]:
    tree = ast.parse(source.path.read_text(encoding="utf-8"), str(source.path))
    return tuple(_walk(source, tree, eager=True))


def _walk(source: Source, node: ast.AST, *, eager: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(source.module, alias.name, child.lineno, eager)
        elif isinstance(child, ast.ImportFrom):
            base = _absolute(source, child)
            for alias in child.names:
                yield Import(source.module, f"{base}.{alias.name}", child.lineno, eager)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            # Types only: nothing is loaded, but the direction still counts.
            yield from _walk(source, child, eager=False)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _walk(source, child, eager=False)
        else:
            yield from _walk(source, child, eager=eager)


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    package = source.module.split(".")
    is_package = source.path.name == "__init__.py"
    kept = package[: len(package) - node.level + is_package]
    return ".".join([*kept, *([node.module] if node.module else [])])


def _ours(statement: Import) -> str | None:
    """The package of ours that a statement imports from."""
    parts = statement.target.split(".")
    return parts[1] if parts[0] == "kvmesh" and len(parts) > 1 else None


def _violations(package: str, forbidden: frozenset[str]) -> list[str]:
    return [
        f"{statement.module}:{statement.line} imports {statement.target}"
        for source in sources()
        if source.package == package
        for statement in imports(source)
        if _ours(statement) in forbidden
    ]


def _packages(*roots: str) -> frozenset[str]:
    return frozenset(source.package for source in sources() if source.root in roots and source.package)


def test_roots_hold_their_packages() -> None:
    """Services are in services/, kernels in gpu_kernels/, the rest in shared/; the namespace itself has no module."""
    assert _packages("gpu_kernels") <= {"kernels"}
    assert _packages("services") <= SERVICES
    assert not _packages("shared") & (SERVICES | {"kernels"})
    for root in ROOTS:
        assert not (REPOSITORY / root / "kvmesh" / "__init__.py").exists()


@pytest.mark.parametrize("package", sorted(_packages("shared", "gpu_kernels")))
def test_nothing_below_imports_a_service(package: str) -> None:
    assert _violations(package, SERVICES) == []


@pytest.mark.parametrize("service", sorted(SERVICES - {"cli"}))
def test_services_do_not_import_each_other(service: str) -> None:
    """The command line may import all of them."""
    assert _violations(service, SERVICES - {service}) == []


@pytest.mark.parametrize("package", sorted(BELOW))
def test_the_bottom_imports_nothing_above_it(package: str) -> None:
    assert _violations(package, _packages(*ROOTS) - BELOW[package]) == []


@pytest.mark.parametrize("package", sorted(NEVER))
def test_shared_packages_know_only_what_they_need(package: str) -> None:
    assert _violations(package, NEVER[package]) == []


@pytest.mark.parametrize("package", ["transceiver", "models"])
def test_the_cache_is_known_by_its_layout_only(package: str) -> None:
    beyond = [
        f"{statement.module}:{statement.line} imports {statement.target}"
        for source in sources()
        if source.package == package
        for statement in imports(source)
        if _ours(statement) == "cache"
        and not f"{statement.target}.".startswith(tuple(f"{face}." for face in CACHE_FACE))
    ]
    assert beyond == []


def _eager_closure(package: str) -> dict[str, str]:
    """Every module that importing a package loads, ours and others', with the module that imports it."""
    by_name = {source.module: source for source in sources()}
    waiting = [source.module for source in sources() if source.package == package]
    seen: dict[str, str] = dict.fromkeys(waiting, "")
    while waiting:
        module = waiting.pop()
        for statement in imports(by_name[module]) if module in by_name else ():
            if not statement.eager:
                continue
            # "from a.b import c" loads a, a.b and, where it is a module, a.b.c.
            parts = statement.target.split(".")
            for end in range(1, len(parts) + 1):
                name = ".".join(parts[:end])
                if name not in seen and (name in by_name or end == 1):
                    seen[name] = module
                    waiting.append(name)
    return seen


def test_the_closure_sees_torch_where_it_is() -> None:
    """The next test would pass in silence if it saw nothing."""
    assert "torch" in _eager_closure("engine")


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_base_install_needs_no_torch_by_source(package: str) -> None:
    loaded = _eager_closure(package)
    assert {name: loaded[name] for name in ENGINE_ONLY & loaded.keys()} == {}


BLOCKER = """
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is not part of the base install")

sys.meta_path.insert(0, Blocked())
for module in {modules!r}:
    importlib.import_module(module)
"""


def test_base_install_needs_no_torch_by_import() -> None:
    """Every module of these services loads in a process in which torch cannot be imported."""
    modules = [
        source.module
        for source in sources()
        if source.package in WITHOUT_TORCH and not source.module.endswith("__main__")
    ]
    program = BLOCKER.format(blocked=set(ENGINE_ONLY), modules=modules)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
