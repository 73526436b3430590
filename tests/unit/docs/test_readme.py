"""README.md: its example runs, its links lead somewhere, and its tables name all that there is and
nothing else.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import get_args

import pytest

from jax_agent_rl.config.algorithm import ADV_ESTIMATORS, LOSS_MODES
from jax_agent_rl.config.rollout import StrategyConfig
from jax_agent_rl.config.trainer import TrainerConfig
from jax_agent_rl.models.families import FAMILIES
from tests.unit.docs.pages import ROOT, blocks

README = ROOT / "README.md"
TEXT = README.read_text()
LINKED_PAGES = (README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md")


def cells_of(heading: str) -> dict[str, str]:
    """Return the second cell of each row of a section's table, by the first."""
    section = TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("|")]
    return {row[1].strip(): row[2] for row in rows[2:]}


def named(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


def test_the_example_runs(tmp_path: Path):
    (program,) = [block.text for block in blocks(README) if block.language == "python"]
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{program}"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_table_of_models_names_every_family():
    assert set().union(*map(named, cells_of("Models").values())) == set(FAMILIES)


@pytest.mark.parametrize(
    ("key", "choices"),
    [
        ("algorithm.adv_estimator", ADV_ESTIMATORS),
        ("algorithm.policy_loss.loss_mode", LOSS_MODES),
        ("rollout.strategy.name", get_args(StrategyConfig.model_fields["name"].annotation)),
        ("trainer.mode", get_args(TrainerConfig.model_fields["mode"].annotation)),
    ],
)
def test_the_table_of_algorithms_names_every_choice(key: str, choices: Collection[str]):
    assert named(cells_of("Algorithms")[f"`{key}`"]) == set(choices)


def test_the_hardware_status_stands_beside_the_claim():
    first = TEXT.partition("\n![")[0]
    claim = first.index("JAX and TPU first")
    assert "docs/hardware.md" in first[claim : claim + 300]


@pytest.mark.parametrize("page", LINKED_PAGES, ids=lambda page: page.stem)
def test_its_links_and_pictures_lead_somewhere(page: Path):
    targets = [t for t in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if "://" not in t]
    files = {target.partition("#")[0] for target in targets} - {""}
    assert {file for file in files if not (page.parent / file).exists()} == set()
