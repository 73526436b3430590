"""What a run has recorded is replaced in one move and never deleted first.

``utils/files.py`` has the one way to replace a file (``replacing``, ``write_atomically``). Whatever
else deletes, moves or truncates a file in the packages that write results is listed here, with the
reason why nothing recorded can get lost.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "jax_agent_rl"
FOLDERS = (
    "cli",
    "collect",
    "data",
    "evaluate",
    "learner",
    "observe",
    "runtime",
    "supervised",
    "tinker_server",
    "trainer",
)
CHANGES = frozenset(
    {
        "unlink",
        "remove",
        "removedirs",
        "rmdir",
        "rmtree",
        "rename",
        "truncate",
        "write_text",
        "write_bytes",
        "move",
    }
)
ALLOWED = {
    "evaluate/export.py write unlink": "the journal, once the table and its summary are whole",
    "evaluate/export.py _write_dir rmtree": (
        "what a killed process left beside, and what was replaced"
    ),
    "evaluate/export.py _write_dir rename": "the whole folder takes its place",
    "evaluate/journal.py Journal._read truncate": "a last line that a crash cut off",
    "observe/run_dir.py RunDir.finish_step unlink": (
        "a disagreement of a step that has been made again"
    ),
    "observe/run_dir.py end_last_line open": "appends the end of a line",
    "runtime/policy.py resolve_model rename": "the whole export takes its place",
    "runtime/transports.py FileTransport.write rename": (
        "a temporary folder in memory, of weights for engines"
    ),
    "runtime/transports.py FileTransport.write unlink": "its delta is written, and offered instead",
    "runtime/transports.py FileTransport._remove_files unlink": "likewise",
    "tinker_server/retention.py Retention._remove_unknown_files unlink": (
        "no client was ever told of them"
    ),
    "tinker_server/training.py Models.remove_checkpoint unlink": "a client asked for it",
    "tinker_server/training.py Models.remove_expired unlink": (
        "their lives are over, and the database has removed them"
    ),
    "tinker_server/training.py Models._remove_snapshots rmdir": "of a model that is gone",
    "tinker_server/training.py Models._remove_snapshots unlink": (
        "the database names a later one, or the model is gone"
    ),
}


def changes(file: Path) -> Iterator[str]:
    """Yields ``file function call`` of every call that deletes, moves or truncates."""
    place = str(file.relative_to(PACKAGE))

    def visit(node: ast.AST, inside: tuple[str, ...]) -> Iterator[str]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = (*inside, node.name)
        if isinstance(node, ast.Call) and (name := changing(node)):
            yield f"{place} {'.'.join(inside) or '(module)'} {name}"
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(ast.parse(file.read_text()), ())


def changing(call: ast.Call) -> str | None:
    """The name of a call that deletes, moves or truncates a file; None for others."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    owner = getattr(getattr(function, "value", None), "id", "")
    if name == "replace" and owner == "os":
        return "os.replace"
    if name == "remove" and owner != "os":
        return None  # of a list
    if name == "truncate" and len(call.args) > 1:
        return None  # of a text
    if name in CHANGES and isinstance(function, ast.Attribute):
        return name
    modes = [
        arg.value
        for arg in call.args
        if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
    ]
    modes += [
        key.value.value
        for key in call.keywords
        if key.arg == "mode" and isinstance(key.value, ast.Constant)
    ]
    if name in ("open", "fdopen") and any(
        set(mode) & set("wx+") and set(mode) <= set("rwxabt+") for mode in modes
    ):
        return "open" if "a" not in "".join(modes) else None
    return None


def found() -> set[str]:
    all_changes = set()
    for folder in FOLDERS:
        for file in (PACKAGE / folder).rglob("*.py"):
            all_changes.update(changes(file))
    return all_changes


def test_nothing_that_writes_results_deletes_or_truncates_them():
    assert found() - ALLOWED.keys() == set(), (
        "use utils.files.replacing, or say here why nothing can get lost"
    )


def test_what_is_allowed_exists():
    assert ALLOWED.keys() - found() == set()


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("file.unlink()", "unlink"),
        ("shutil.rmtree(folder)", "rmtree"),
        ("os.replace(a, b)", "os.replace"),
        ("os.remove(a)", "remove"),
        ("file.open('w')", "open"),
        ("open(file, 'wb')", "open"),
        ("open(file, mode='x')", "open"),
        ("file.write_text(text)", "write_text"),
        ("text.replace('a', 'b')", None),
        ("names.remove(name)", None),
        ("file.open('a')", None),
        ("file.open(encoding='utf-8')", None),
    ],
)
def test_the_search_finds_what_it_should(code: str, name: str | None):
    (statement,) = ast.parse(code).body
    assert changing(statement.value) == name
