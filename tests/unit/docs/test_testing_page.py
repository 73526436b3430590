"""docs/testing.md lists the slow tests, and each of them is there."""

from pathlib import Path

import pytest

from tests.slow import SLOW

TESTS = Path(__file__).parents[2]


def test_the_page_lists_what_only_all_runs_and_why():
    page = (TESTS.parent / "docs/testing.md").read_text()
    listed = [line for line in page.partition("## What only `--all` runs")[2].splitlines() if line.startswith("| `")]
    assert listed[: len(SLOW)] == [f"| `{name}` | {why} |" for name, why in SLOW.items()]


@pytest.mark.parametrize("name", SLOW)
def test_what_is_listed_is_there(name: str):
    file, _, test = name.partition("::")
    assert f"def {test or 'test_'}" in (TESTS / file).read_text()
