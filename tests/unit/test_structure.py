"""The package keeps its shape: few modules at its root, no cycles, one class per name."""

import ast
import functools
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "jax_agent_rl").rglob("*.py"), *(ROOT / "gpu_backend").rglob("*.py")])


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def module(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module(file): file for file in FILES}


def imports(name: str) -> set[str]:
    """Other modules that a module imports anywhere: at its top, in a function, or for types alone.

    ``from package import part`` imports the part if that is a module, else the package.
    """
    imported = set()
    for node in ast.walk(tree_of(MODULES[name])):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                part = f"{node.module}.{alias.name}"
                imported.add(part if part in MODULES else node.module)
        elif isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
    return (imported & MODULES.keys()) - {name}


def cycle(graph: dict[str, set[str]]) -> list[str] | None:
    """The modules of a cycle, each imported by the next, if there is one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def test_no_module_imports_itself_through_others():
    assert cycle({name: imports(name) for name in MODULES}) is None


def test_an_import_for_types_closes_a_cycle():
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) is not None
    assert "jax_agent_rl.rollout.client" in imports("jax_agent_rl.environments.users.builtin")


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
