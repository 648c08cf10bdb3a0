"""The shape of the package, read from its imports: a pure core, thin edges, one direction.

A new module is core until it is named in EDGES, so that doing I/O is a decision somebody took.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "prefixproxy"

EDGES = {
    "__main__",
    "admission",
    "answering",
    "app",
    "backends*",
    "bench.command",
    "bench.run",
    "bench.send",
    "capacity.command",
    "cli",
    "commands*",
    "demo*",
    "dispatch",
    "doctor.command",
    "doctor.look",
    "doctor.probing",
    "ending",
    "engine*",
    "events",
    "exchange",
    "facts.gather",
    "facts.process",
    "fleet",
    "gate",
    "guard",
    "intake",
    "keeping",
    "lease",
    "lint.command",
    "listing",
    "logs",
    "metrics",
    "passthrough",
    "patience.beat",
    "relay",
    "reply",
    "served",
    "server",
    "serving",
    "settings*",
    "simulate.command",
    "slotwork",
    "state",
    "status",
    "tallies",
    "telemetry",
    "upkeep",
    "verify.command",
    "verify.run",
    "warming",
}
"""Modules that may wait, read a clock, log, or know a framework. Everything else is core."""

IMPURE = {
    "aiohttp",
    "anyio",
    "asyncio",
    "datetime",
    "httpx",
    "logging",
    "multiprocessing",
    "prometheus_client",
    "pydantic",
    "pydantic_settings",
    "random",
    "secrets",
    "socket",
    "sqlite3",
    "ssl",
    "starlette",
    "subprocess",
    "threading",
    "time",
    "typer",
    "uvicorn",
    "uvloop",
    "xllamacpp",
}
"""What no core module imports: clocks, chance, waiting, I/O and frameworks."""

PACKAGES = {
    ".".join(path.relative_to(PACKAGE.parent).parent.parts)
    for path in PACKAGE.rglob("__init__.py")
    if not path.read_text(encoding="utf-8").count("import ")
} | {"prefixproxy"}
"""Packages whose names are modules, not things."""

VOCABULARY = {"types", "errors"}

MAY_IMPORT = {
    "types": set[str](),
    "errors": set[str](),
    "prefix": set[str](),
    "prompt": set[str](),
    "schedule*": {"schedule*", "prefix", "routing"},
    "volatile*": {"volatile*", "prompt"},
    "chat*": {"chat*", "body", "prompt", "prefix"},
    "stabilise*": {"stabilise*", "chat*", "volatile*", "conversations", "evidence", "prompt", "prefix"},
    "sse": {"prompt"},
    "backends*": {"backends*", "capacity.gguf", "prompt", "usage"},
    "journal": set[str](),
    "metrics": {"labels", "tallies"},
    "classify": {"misses", "quotes", "sightings", "prefix"},
    "settings": {"settings_errors", "settings_layers"},
    "dispatch": {"backends*", "fleet", "lease", "prefix", "schedule*", "slotwork", "upkeep", "warming"},
}
"""For these modules, all they may import from the package besides the vocabulary."""

IMPORTED_BY = {
    "cli": {"__main__"},
    "app": {"cli", "demo*", "served", "serving"},
    "relay": {"app", "passthrough", "status"},
    "settings": {
        "admission",
        "app",
        "commands*",
        "bench.command",
        "demo*",
        "doctor.command",
        "served",
        "serving",
        "verify.command",
    },
    "state": {"app", "bench.command", "doctor.command", "keeping", "serving", "verify.command"},
}
"""For these modules, everybody who may import them."""


@dataclass(frozen=True)
class Import:
    importer: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}.py:{self.line} imports {self.target}"


def modules() -> dict[str, ast.Module]:
    """Every module by its name below the package, `backends` standing for backends/__init__.py."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


def imports(name: str, tree: ast.AST) -> Iterator[Import]:
    """What a module imports, anywhere in it: `target` is a top-level package, or `prefixproxy.x`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name, alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}.py:{node.lineno} imports relatively"
            if node.module in PACKAGES:
                yield from (Import(name, f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield Import(name, node.module or "", node.lineno)


def matches(name: str, patterns: set[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def own(target: str) -> str | None:
    """The module of this package that an import names, or None."""
    return target.removeprefix("prefixproxy.") if target.startswith("prefixproxy.") else None


def violations(name: str, tree: ast.AST) -> list[str]:
    """Every import of one module that the tables above forbid, in words."""
    out = []
    core = not matches(name, EDGES) and name != "__init__"
    whitelist = next((allowed for pattern, allowed in MAY_IMPORT.items() if fnmatch(name, pattern)), None)
    for found in imports(name, tree):
        module = own(found.target)
        if module is None:
            if core and found.target.partition(".")[0] in IMPURE:
                out.append(f"{found}: core modules are pure")
            continue
        if module.startswith("__"):
            continue
        if core and matches(module, EDGES):
            out.append(f"{found}: core modules know no edge")
        if whitelist is not None and not matches(module, whitelist | VOCABULARY):
            out.append(f"{found}: not among what it may import")
        if not matches(name, next((by for pattern, by in IMPORTED_BY.items() if pattern == module), {"*"})):
            out.append(f"{found}: only {sorted(IMPORTED_BY[module])} may")
    return out


MODULES = modules()


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_one_way(name: str) -> None:
    assert violations(name, MODULES[name]) == []


def test_there_are_no_import_cycles() -> None:
    graph = {
        name: {target for found in imports(name, tree) if (target := own(found.target)) in MODULES}
        for name, tree in MODULES.items()
    }
    assert cycle(graph) == []


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """One cycle of the graph, or an empty list."""
    done: set[str] = set()

    def search(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        found = next((hit for target in sorted(graph[name]) if (hit := search(target, [*path, name]))), [])
        done.add(name)
        return found

    return next((hit for name in sorted(graph) if (hit := search(name, []))), [])


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("schedule.new", "import time"),
        ("schedule.new", "from asyncio import Event"),
        ("prefix", "import random as r"),
        ("stabilise.new", "def f():\n    import logging"),
        ("brand_new", "from starlette.types import Scope"),
        ("brand_new", "from prefixproxy.relay import Relay"),
        ("brand_new", "from prefixproxy.settings import Settings"),
        ("schedule.place", "from prefixproxy.chat import parse_prompt"),
        ("volatile.rules", "from prefixproxy.stabilise import notes"),
        ("backends.ollama", "from prefixproxy.dispatch import Dispatcher"),
        ("metrics", "from prefixproxy.schedule.types import Policy"),
        ("relay", "from prefixproxy.app import create_app"),
        ("relay", "import prefixproxy.settings"),
    ],
)
def test_the_check_has_teeth(name: str, source: str) -> None:
    assert violations(name, ast.parse(source)) != []


def test_cycles_would_be_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_every_name_in_the_tables_is_meant() -> None:
    """A table entry for a module that is gone would guard nothing."""
    for pattern in {*EDGES, *MAY_IMPORT, *IMPORTED_BY, *(p for allowed in MAY_IMPORT.values() for p in allowed)}:
        assert any(fnmatch(name, pattern) for name in MODULES), pattern


def test_nothing_of_the_standard_library_is_shadowed() -> None:
    shadowed = {name for name in MODULES if name in sys.stdlib_module_names} - {"types"}
    assert shadowed == set()


def test_no_module_keeps_global_state_behind_a_global_statement() -> None:
    found = [
        f"{name}.py:{node.lineno}"
        for name, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Global)
    ]
    assert found == []


def test_files_and_functions_stay_readable() -> None:
    long_files = {name: n for name, tree in MODULES.items() if (n := last_line(tree)) > 400}
    long_functions = {
        f"{name}.{node.name}": n
        for name, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (n := last_line(node) - node.lineno + 1) > 60
    }
    assert (long_files, long_functions) == ({}, {})


def last_line(node: ast.AST) -> int:
    return max((getattr(child, "end_lineno", 0) or 0 for child in ast.walk(node)), default=0)
