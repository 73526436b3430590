"""Habits of prose that a reader stumbles over are on no page. CONTRIBUTING.md says how pages are
written.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.docs.pages import DOCS, ROOT

GENERATED_TABLES = {"results.md"}  # whose columns are named like the keys of a result
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted(DOCS.rglob("*.md")),
]
BLOCK = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)


def prose(page: Path) -> str:
    """The page without its blocks of code, each of which leaves an empty line."""
    return BLOCK.sub("", page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_ends_with_too(page: Path):
    assert re.findall(r"[^.]{0,40},\s+too(?=\s*[.,;:)|]|\s*$)", prose(page), re.MULTILINE) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_noun_is_replaced_by_those_of_or_that_of(page: Path):
    assert (
        re.findall(
            r"[^.]{0,40}\b(?:those|that)\s+of\b|[^.]{0,40}(?<!each )\bof\s+which\b", prose(page)
        )
        == []
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_goes_on_after_a_block_of_code(page: Path):
    blocks = [match.end() for match in BLOCK.finditer(page.read_text())]
    following = [page.read_text()[end:].lstrip().partition("\n")[0] for end in blocks]
    assert [
        line
        for line in following
        if re.match(r"[a-z]", line) and not line.startswith("jax_agent_rl")
    ] == []


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in GENERATED_TABLES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_ids_are_token_ids_where_a_page_first_names_them(page: Path):
    text = prose(page)
    first = re.search(r"(?<!`)\bids\b(?!`)", text)
    assert first is None or text[: first.start()].lower().rstrip().endswith("token"), text[
        : first.end()
    ][-80:]


def test_what_is_looked_for_is_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("The ids of it, too.\n\n```\ncode\n```\n\nruns it.\n")
    for check in (
        test_no_sentence_ends_with_too,
        test_no_sentence_goes_on_after_a_block_of_code,
        test_ids_are_token_ids_where_a_page_first_names_them,
    ):
        with pytest.raises(AssertionError):
            check(page)
