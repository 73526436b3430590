"""Every recipe in ``configs/`` trains: on the calculator's task, with a small random model. Engine
and learner agree in all of them: a run in which they did not would stop.
"""

import json
import math
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.tiny_run import step_records
from tests.warm import python

RECIPES = sorted(
    p for p in (Path(__file__).parents[2] / "configs").glob("*.yaml") if p.stem != "tool_server"
)

# A random model earns nothing: without this filter the learner still runs.
SMALL = [
    "trainer.steps=2",
    "trainer.on_disagreement=stop",
    "rollout.prompts_per_step=2",
    "agent.max_response_length=32",
    "algorithm.filter_zero_variance=false",
]


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_a_recipe_trains_and_accounts_for_everything(path: Path, recipe: Path, tmp_path: Path):
    tree = yaml.safe_load(path.read_text())
    kept_sections = {key: tree[key] for key in ("algorithm", "critic", "learner") if key in tree}
    if "distill" in tree:
        kept_sections["distill"] = {"teachers": yaml.safe_load(recipe.read_text())["model"]["path"]}
    if "mode" in tree.get("trainer", {}):
        kept_sections["trainer"] = tree["trainer"]
    for key in ("pack_length", "mesh"):  # of the small model, on one device
        kept_sections.get("learner", {}).pop(key, None)
    if "num_minibatches" in kept_sections.get(
        "learner", {}
    ):  # no more than the two groups of a step
        kept_sections["learner"]["num_minibatches"] = 2
    if "critic_warmup" in kept_sections.get(
        "critic", {}
    ):  # of the two steps, the policy learns in one
        kept_sections["critic"]["critic_warmup"] = 1
    # a random model ends no turn before a limit does
    kept_sections.get("algorithm", {}).get("filters", {}).pop("overlong", None)
    rollout = tree.get("rollout", {})
    size = {"group_size": min(2, rollout.get("group_size", 2))}
    if "strategy" in rollout:  # which fixes the size of a group
        size = {key: rollout[key] for key in ("strategy", "group_size")}
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump({"base": recipe.name, "rollout": size} | kept_sections))
    command = [*python(), "-m", "jax_agent_rl.cli", "train", str(file), *SMALL]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr[-3000:]
    folder = tmp_path / "run"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["started"] == summary["trained"] + sum(summary["dropped"].values())
    assert summary["recompilations_after_warmup"] == 0
    if (
        path.stem == "simpletir"
    ):  # a random model never answers: each of its trajectories has a void turn
        assert summary["dropped"] == {"void_turn": 8}
        assert summary["trained"] == 0
        return
    assert "disagree" not in result.stdout
    assert not (folder / "disagreement.json").exists()
    *earlier_steps, last = step_records(folder)
    assert any(
        step["compared_tokens"] for step in (*earlier_steps, last)
    )  # not where a critic alone learns
    if (
        kept_sections.get("learner", {}).get("compute_dtype", "float32") == "float32"
    ):  # others have the run's own tolerance
        assert max(step["compared_gap_max"] for step in (*earlier_steps, last)) < 1e-4
    assert math.isfinite(last["loss"])
    assert last["trained_tokens"] > 0
    if "strategy" in rollout:
        assert last["tree/branches"] + last["tree/topped_up"] > 0
        report = subprocess.run(
            [*python(), "-m", "jax_agent_rl.cli", "view", str(folder), "--tree"],
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert report.returncode == 0 and "trees, mean reward" in report.stdout, report.stderr[
            -3000:
        ]
