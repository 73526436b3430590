"""docs/testing.md lists the slow tests and those of each family, and each of them is there."""

import re
from pathlib import Path

import pytest

from tests.slow import NIGHTLY, PARTS_OF_ALL, REPRESENTATIVES, SLOW, STRUCTURAL, Parts

TESTS = Path(__file__).parents[2]


def lines_of(section: str) -> list[str]:
    page = (TESTS.parent / "docs/testing.md").read_text()
    text = page.partition(f"## {section}")[2].partition("\n## ")[0]
    return text.splitlines()


def rows_of(section: str) -> list[str]:
    return [line for line in lines_of(section) if line.startswith("| `")]


def test_the_page_lists_what_only_all_runs_and_why():
    expected = [f"| `{name}` | {why} |" for name, why in SLOW.items()]
    assert rows_of("What only `--all` runs")[: len(SLOW)] == expected


@pytest.mark.parametrize(
    ("section", "parts"),
    [
        ("What runs in part", REPRESENTATIVES),
        ("What `--all` runs in part", PARTS_OF_ALL),
    ],
)
def test_the_page_lists_the_files_of_which_a_part_runs(section: str, parts: Parts):
    expected = []
    for name, (running, why) in parts.items():
        names = ", ".join(f"`{part}`" for part in running)
        expected.append(f"| `{name}` | {names} | {why} |")
    assert rows_of(section) == expected


def test_the_page_lists_what_only_the_nightly_tests_run():
    expected = [f"| `{name}` | {why} |" for name, why in NIGHTLY.items()]
    assert rows_of("What only `--nightly` runs") == expected


@pytest.mark.parametrize("name", [*STRUCTURAL, *SLOW, *REPRESENTATIVES, *NIGHTLY, *PARTS_OF_ALL])
def test_what_is_listed_is_there(name: str):
    file, _, test = name.partition("[")[0].partition("::")
    assert f"def {test or 'test_'}" in (TESTS / file).read_text()


def family_rows() -> list[str]:
    rows = [row for row in lines_of("What is tested of each model family") if row.startswith("| ")]
    return [row for row in rows if "`" in row]


@pytest.mark.parametrize("row", family_rows(), ids=lambda row: row.split("|")[1].strip())
def test_what_is_tested_of_a_family_is_there(row: str):
    _, _, main, *cells = (cell.strip() for cell in row.removesuffix("|").split("|"))
    sources = {name: source_of(name) for name in re.findall(r"`([^`]+)`", main)}
    for name in re.findall(r"`([^`]+)`", " ".join(cells)):
        if ".py" in name:
            source_of(name)
            continue
        parameters = name.removeprefix("[").removesuffix("]").split(", ")
        for parameter in parameters:
            assert any(parameter in source for source in sources.values()), (name, main)


def source_of(name: str) -> str:
    """Return the source of a file, or of a test's file; the test has to be in it."""
    file, _, test = name.partition("::")
    source = (TESTS / file).read_text()
    assert f"def {test or 'test_'}" in source, name
    return source
