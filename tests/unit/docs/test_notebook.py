"""docs/first_run.ipynb runs from its first cell to its last, and the policy learns."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.unit.docs.pages import DOCS, ROOT


def test_the_notebook_runs_and_its_reward_rises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    nbformat = pytest.importorskip("nbformat", reason="needs the extra docs")
    nbclient = pytest.importorskip("nbclient", reason="needs the extra docs")
    pytest.importorskip("ipykernel", reason="needs the extra docs")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(DOCS / "first_run.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute(cwd=str(tmp_path))
    said = "\n".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", ()))
    rewards = [float(value) for value in re.findall(r"^step \d+: reward ([\d.]+)", said, re.M)]
    assert len(rewards) == 8 and rewards[-1] > rewards[0] + 0.2


def test_it_is_committed_without_outputs():
    nbformat = pytest.importorskip("nbformat", reason="needs the extra docs")
    cells = nbformat.read(DOCS / "first_run.ipynb", as_version=4).cells
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
