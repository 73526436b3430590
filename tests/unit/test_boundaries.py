"""Every place of the sources that reaches outside of the process, found by their syntax, keeps its rule."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("jax_agent_rl", "gpu_backend", "benchmarks", "examples")
SOURCES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
PACKAGE = [file for file in SOURCES if file.relative_to(ROOT).parts[0] in ("jax_agent_rl", "gpu_backend")]
TREES = {file: ast.parse(file.read_text()) for file in SOURCES}


def place(file: Path, node: ast.AST) -> str:
    return f"{file.relative_to(ROOT)}:{node.lineno}"  # type: ignore[attr-defined]


def calls(files: list[Path]) -> Iterator[tuple[Path, ast.Call, str]]:
    """Every call with the text of what is called."""
    for file in files:
        for node in ast.walk(TREES[file]):
            if isinstance(node, ast.Call):
                yield file, node, ast.unparse(node.func)


# --- code that a model's folder brings -----------------------------------------------------------------------

RUNS_REMOTE_CODE = ("from_pretrained", "from_config", "load_dataset", "SentenceTransformer", "pipeline")
"""Functions of transformers, datasets and sentence-transformers that take ``trust_remote_code``."""
OWN_CLASSES = {node.name for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def test_no_call_runs_or_asks_to_run_a_folders_code():
    found = 0
    for file, call, name in calls(SOURCES):
        receiver, _, function = name.rpartition(".")
        if function not in RUNS_REMOTE_CODE or receiver in {*OWN_CLASSES, "cls"}:
            continue
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert given.get("trust_remote_code") == "False", f"{place(file, call)} leaves trust_remote_code to the library"
        found += 1
    assert found >= 12


def test_nothing_trusts_remote_code():
    for file in SOURCES:
        for node in ast.walk(TREES[file]):
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert ast.unparse(node.value) == "False", place(file, node)


def test_nothing_asks_the_terminal_of_a_run():
    asking = [place(file, call) for file, call, name in calls(PACKAGE) if name == "input"]
    assert asking == []


# --- YAML ---------------------------------------------------------------------------------------------------------

YAML_READERS = (
    "load",
    "load_all",
    "safe_load",
    "safe_load_all",
    "full_load",
    "unsafe_load",
    "compose",
    "parse",
    "scan",
)


def test_yaml_is_read_with_bounds_alone():
    readers = {f"yaml.{name}" for name in YAML_READERS}
    found = [place(file, call) for file, call, name in calls(SOURCES) if name in readers or name == "DatasetCard.load"]
    assert found == [], "read it by utils/yaml_text.py"
