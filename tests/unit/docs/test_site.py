"""The site builds, every link leads somewhere, and nothing is loaded from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.docs.pages import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_and_the_picture_are_there(site: Path):
    pages = {file.relative_to(ROOT / "docs").with_suffix("") for file in (ROOT / "docs").rglob("*.md")}
    built = {file.parent.relative_to(site) for file in site.rglob("index.html")}
    assert {page for page in pages if page.name != "index"} <= built
    assert "data_flow.svg" in (site / "concepts" / "index.html").read_text()


def test_pages_load_nothing_from_elsewhere(site: Path):
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|iframe)[^>]+src="([^"]+)"', page.read_text())
        loaded += re.findall(r'<link[^>]+rel="stylesheet"[^>]+href="([^"]+)"', page.read_text())
        assert not [address for address in loaded if "//" in address], page


def test_pages_follow_each_other_in_the_order_that_was_given(site: Path):
    text = (site / "index.html").read_text()
    order = ["first_run/", "concepts/", "write/tool/", "write/backend/", "moving/"]
    navigation = text[text.index("md-nav--primary") :]
    places = [navigation.index(f'href="{name}"') for name in order]
    assert places == sorted(places)
