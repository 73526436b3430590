"""docs/first_run.ipynb runs from its first cell to its last, the policy learns, and its outputs are
stored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.docs.notebook import NOTEBOOK, execute


def text_of(value: str | list[str]) -> str:
    """Notebooks on disk hold lists of lines."""
    return value if isinstance(value, str) else "".join(value)


def texts(cells: Iterable[Any]) -> str:
    """What the cells printed and returned."""
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    return "\n".join(
        text_of(output.get("text") or output.get("data", {}).get("text/plain", ""))
        for output in outputs
    )


def rewards(said: str) -> list[float]:
    return [float(value) for value in re.findall(r"^step \d+: reward ([\d.]+)", said, re.M)]


@pytest.fixture(scope="module")
def stored() -> list[dict[str, Any]]:
    """The cells as they are in the repository."""
    return json.loads(NOTEBOOK.read_text())["cells"]


def test_it_runs_and_its_reward_rises(tmp_path: Path):
    for package in ("nbformat", "nbclient", "ipykernel"):
        pytest.importorskip(package, reason="needs the extra docs")
    said = rewards(texts(execute(tmp_path).cells))
    assert len(said) == 8
    assert said[-1] > said[0] + 0.2


def test_its_outputs_are_stored_in_the_order_of_the_cells(stored: list[dict[str, Any]]):
    code = [cell for cell in stored if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    said = rewards(texts(stored))
    assert len(said) == 8
    assert said[-1] > said[0] + 0.2
    assert "'in_flight': 0" in texts(code[-1:])


def test_its_outputs_hold_nothing_but_printed_text(stored: list[dict[str, Any]]):
    outputs = [output for cell in stored for output in cell.get("outputs", ())]
    assert {output["output_type"] for output in outputs} == {"stream", "execute_result"}
    assert {output["name"] for output in outputs if output["output_type"] == "stream"} == {"stdout"}
    assert not re.findall(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", texts(stored)
    )  # control codes, but for tab and line feed


def test_its_outputs_name_no_path_of_a_machine(stored: list[dict[str, Any]]):
    assert not re.findall(r"(?<![\w.])/(?:\w[\w.-]*/)+\w*|[A-Za-z]:\\|~/", texts(stored))


def test_its_cells_hold_no_times_of_a_run(stored: list[dict[str, Any]]):
    assert not [cell for cell in stored if "execution" in cell.get("metadata", {})]
