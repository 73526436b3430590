"""The package keeps its shape: few modules at its root, no cycles, one class per name."""

import ast
import functools
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "jax_agent_rl").rglob("*.py"), *(ROOT / "gpu_backend").rglob("*.py")])


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def module(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module(file): file for file in FILES}


def imports(tree: ast.Module, *, types: bool = False) -> set[str]:
    """Modules that a module imports when it is imported, packages as what is imported of them.

    Args:
        types: also those that are imported for annotations alone.
    """
    found = set()
    body = []
    for node in tree.body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            if types:
                body += node.body
        else:
            body.append(node)
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in MODULES else node.module for name in names}
    return found & MODULES.keys()


def require_no_cycle(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_no_file_imports_itself_through_others():
    require_no_cycle({name: imports(tree_of(file)) - {name} for name, file in MODULES.items()})


@pytest.mark.parametrize("package", ["jetstream", "rollout"])
def test_no_file_imports_itself_through_others_for_types(package: str):
    graph = {}
    for name, file in MODULES.items():
        if name.startswith(f"jax_agent_rl.{package}."):
            graph[name] = imports(tree_of(file), types=True) - {name}
    require_no_cycle(graph)


def test_every_public_class_has_a_name_of_its_own():
    where = defaultdict(list)
    for file in FILES:
        for node in tree_of(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(module(file))
    assert {name: files for name, files in where.items() if len(files) > 1} == {}


def test_the_root_holds_few_modules():
    names = {file.stem for file in (ROOT / "jax_agent_rl").glob("*.py")} - {"__init__"}
    assert len(names) <= 8, names
