"""Steps of real runs, repeated from their folders: equal to the bit, and what is not is named."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save
from typer.testing import CliRunner, Result

from jax_agent_rl.agents.loop import AGENTS
from jax_agent_rl.cli import app
from jax_agent_rl.models.hf import save_hf
from jax_agent_rl.observe.run_dir import read_records
from jax_agent_rl.utils.fingerprints import PREFIX, digest
from tests.messages import assert_message
from tests.tiny import EXPERTS, tiny_params
from tests.tiny_chat import CONFIG, tokenizer
from tests.tiny_run import PAIR_AGENT, tiny_recipe
from tests.warm import python

CONSTANT_REWARD = """
from jax_agent_rl.rewards import register_reward

@register_reward("noise", override=True)
def compute_score(solution_str, ground_truth):
    return 1.0
"""

COMMENT = """
from jax_agent_rl.rewards import register_reward

@register_reward("noise", override=True)
def compute_score(solution_str, ground_truth):
    return {"score": 1.0, "feedback": "no"}
"""

LIMITS = {"tool_format": "hermes", "max_prompt_length": 32, "max_response_length": 16}

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "a critic and a controlled KL": {
        "algorithm": {
            "adv_estimator": "gae",
            "filter_zero_variance": False,
            "kl": {"where": "loss", "coef": 0.05, "controller": "adaptive"},
        },
    },
    "several updates in a step, clipped": {
        "algorithm": {"filter_zero_variance": True},
        "learner": {"pack_length": 64, "ppo_epochs": 2, "num_minibatches": 2},
    },
    "penalties of long responses": {
        "algorithm": {"shaping": {"overlong_buffer": 8}, "filter_zero_variance": False},
    },
    "stale tokens, corrected": {
        "trainer": {"steps": 4, "checkpoint_every": 2, "mode": "fully_async", "max_staleness": 1},
        "algorithm": {
            "filter_zero_variance": False,
            "rollout_correction": {"rollout_is": "token"},
        },
    },
    "two adapters": {
        "agent": {
            **LIMITS,
            "default_agent": "pair_of_noise",
            "role_adapters": {"solver": "one", "checker": "two"},
        },
        "learner": {"pack_length": 64, "learning_rate": 1e-2, "lora": {"rank": 2}},
    },
    "greedy baselines": {
        "algorithm": {"adv_estimator": "remax", "filter_zero_variance": False},
    },
    "running baselines of two roles": {
        "agent": {**LIMITS, "default_agent": "pair_of_noise"},
        "algorithm": {"adv_estimator": "rae", "filter_zero_variance": False},
    },
}


def train(folder: Path, **sections: dict[str, Any]) -> Path:
    """Trains four steps with checkpoints of the second and the fourth; returns the run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if "default_agent" in sections.get("agent", {}):
        (folder / "agent.py").write_text(PAIR_AGENT)
        sections["agent"] = {**sections["agent"], "module": str(folder / "agent.py")}
    recipe = tiny_recipe(folder, **{"trainer": {"steps": 4, "checkpoint_every": 2}, **sections})
    command = [*python(), "-m", "jax_agent_rl.cli", "train", str(recipe)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return folder / "run"


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def replay(run: Path, step: int, *arguments: object) -> tuple[int, dict[str, Any]]:
    """Returns the exit status and what --json says."""
    result = invoke("replay", run, "--step", step, "--json", *arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.stdout)


def edit(run: Path, step: int, **fields: Any) -> None:
    """Changes fields of the first training trajectory of a step."""
    file = run / "trajectories.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    chosen = next(r for r in records if r["split"] == "train" and r["step"] == step)
    chosen.update(fields)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("replayed"))


@pytest.fixture
def forgotten_agents() -> Iterator[None]:
    """Forget what a replayed run's module has registered: a process knows an agent's name once."""
    known_agents = dict(AGENTS)
    yield
    AGENTS.clear()
    AGENTS.update(known_agents)


@pytest.fixture
def edited(run: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be changed."""
    return Path(shutil.copytree(run, tmp_path / "run"))


@pytest.mark.parametrize(("step", "from_step"), [(1, 0), (2, 0), (3, 2), (4, 2)])
def test_a_step_is_equal_to_the_bit(run: Path, step: int, from_step: int):
    status, result = replay(run, step)

    assert (status, result["verdict"], result["from_step"]) == (0, "equal", from_step)
    compared = {part["what"]: part["compared"] for part in result["comparisons"]}
    assert compared["rewards"] == 8 and compared["metrics"] > 10
    assert ("weights and optimizer" in compared) == (step in (2, 4))


def test_another_recorded_reward_is_found_first(edited: Path):
    edit(edited, 4, reward=0.5)
    status, result = replay(edited, 4)
    assert (status, result["verdict"]) == (1, "different")
    first = read_records(edited / "trajectories.jsonl")
    name = next(r["trajectory_id"] for r in first if r["split"] == "train" and r["step"] == 4)
    assert name in result["first_difference"] and "0.5" in result["first_difference"]
    assert {part["what"] for part in result["comparisons"] if part["first"]} >= {
        "rewards",
        "advantages",
        "weights and optimizer",
    }


def test_another_recorded_id_changes_what_the_learner_computes(edited: Path):
    record = next(
        r
        for r in read_records(edited / "trajectories.jsonl")
        if r["split"] == "train" and r["step"] == 3
    )
    ids = record["response_ids"]
    edit(edited, 3, response_ids=[ids[0] + 1, *ids[1:]])
    status, result = replay(edited, 3)
    assert status == 1
    assert any(part["what"] == "metrics" and part["first"] for part in result["comparisons"])


def test_without_a_trajectory_a_step_is_refused(edited: Path):
    file = edited / "trajectories.jsonl"
    lines = file.read_text().splitlines()
    last = max(n for n, line in enumerate(lines) if json.loads(line)["split"] == "train")
    file.write_text("".join(line + "\n" for n, line in enumerate(lines) if n != last))
    error = invoke("replay", edited, "--step", 4).exception
    assert_message(error, key="trainer.keep_trajectories", value=(7, 8))


def test_a_step_that_is_on_record_twice_is_refused(edited: Path):
    file = edited / "trajectories.jsonl"
    lines = file.read_text().splitlines()
    again = [line for line in lines if json.loads(line)["split"] == "train"][-1]
    file.write_text("".join(f"{line}\n" for line in [*lines, again]))
    error = str(invoke("replay", edited, "--step", 4).exception)
    assert "9 trajectories of step 4" in error and "from 8" in error


def test_a_line_that_is_being_written_does_not_matter(edited: Path):
    with (edited / "trajectories.jsonl").open("a") as stream:
        stream.write('{"step": 5, "split": "tr')
    _, result = replay(edited, 4)
    assert result["verdict"] == "equal"


def test_images_that_are_not_on_record_are_named(edited: Path):
    edit(edited, 2, prompt_media={"image": 1})
    assert "images" in str(invoke("replay", edited, "--step", 2).exception)


def test_a_step_that_is_not_on_record_is_named(run: Path):
    assert "1 to 4" in str(invoke("replay", run, "--step", 5).exception)


def test_another_estimator_changes_the_advantages(run: Path):
    _, result = replay(run, 4, "algorithm.adv_estimator=rloo")
    change = result["change"]
    assert result["verdict"] == "equal"
    # Of four members, RLOO compares each with the other three: 4/3 of the distance to the mean,
    # which GRPO divides by the standard deviation.
    assert change["metrics"]["advantage_std"][0] != change["metrics"]["advantage_std"][1]
    assert change["turned_advantages"] == 0
    assert 0 < change["update_cosine"] <= 1 + 1e-6


def test_a_reward_that_tells_nothing_apart_changes_nothing(run: Path, tmp_path: Path):
    (tmp_path / "constant.py").write_text(CONSTANT_REWARD)
    _, result = replay(run, 4, "--reward", tmp_path / "constant.py")
    change = result["change"]
    assert change["reward_mean"][1] == 1.0
    assert change["metrics"]["advantage_abs_max"][1] == 0.0
    assert change["turned_advantages"] == 8 - sum_of_zero_advantages(run, step=4)


def test_what_a_new_reward_says_teaches_the_policy(run: Path, tmp_path: Path):
    (tmp_path / "comment.py").write_text(COMMENT)
    overrides = [
        "algorithm.adv_estimator=none",
        "algorithm.kl.where=advantage",
        "algorithm.kl.estimator=k1",
        "algorithm.kl.reference=feedback",
        "learner.pack_length=256",
    ]
    _, result = replay(run, 4, "--reward", tmp_path / "comment.py", *overrides)
    assert result["change"]["metrics"]["advantage_abs_max"][1] > 0

    template = "algorithm.feedback.template=Not so, {feedback}"
    _, other = replay(run, 4, "--reward", tmp_path / "comment.py", *overrides, template)
    assert other["change"]["metrics"] != result["change"]["metrics"]


def sum_of_zero_advantages(run: Path, *, step: int) -> int:
    """The number of trajectories of a step whose advantages were 0 as recorded."""
    count = 0
    for record in read_records(run / "trajectories.jsonl"):
        if record["split"] == "train" and record["step"] == step:
            count += not any(record["advantages"])
    return count


def test_what_greedy_rollouts_would_earn_is_not_known(run: Path):
    error = invoke("replay", run, "--step", 4, "algorithm.adv_estimator=remax").exception
    assert_message(error, key="algorithm.adv_estimator", value="greedy")


def test_the_experts_that_the_engine_chose_are_repeated(tmp_path: Path):
    model = replace(EXPERTS, vocab_size=CONFIG.vocab_size, family="qwen3_moe")
    save_hf(tmp_path / "experts", model, tiny_params(5, model))
    tokenizer().save_pretrained(tmp_path / "experts")
    run = train(tmp_path, model={"path": str(tmp_path / "experts")})
    for step in (2, 3):
        status, result = replay(run, step)
        assert (status, result["verdict"]) == (0, "equal"), result

    # Others, in a file as a run writes it: the learner reads what is on record.
    record = next(
        r
        for r in read_records(run / "trajectories.jsonl")
        if r["split"] == "train" and r["step"] == 2
    )
    name = record["learner_inputs"]
    arrays = load_file(run / "attachments" / f"{name}.safetensors")
    others = {**arrays, "experts.0": np.roll(arrays["experts.0"], 1, axis=-1) ^ 1}
    edit(run, 2, learner_inputs=write_arrays(run, others))
    status, result = replay(run, 2)
    assert (status, result["verdict"]) == (1, "different")

    # The model has eight.
    edit(run, 2, learner_inputs=write_arrays(run, {**arrays, "experts.0": arrays["experts.0"] + 8}))
    error = str(invoke("replay", run, "--step", 2).exception)
    assert record["trajectory_id"] in error and "8" in error

    (run / "attachments" / f"{name}.safetensors").write_bytes(b"")
    edit(run, 2, learner_inputs=name)
    assert name in str(invoke("replay", run, "--step", 2).exception)

    edit(run, 2, learner_inputs=None)  # as an earlier version recorded it
    error = str(invoke("replay", run, "--step", 2).exception)
    assert record["trajectory_id"] in error and "earlier versions" in error


def write_arrays(run: Path, arrays: dict[str, np.ndarray]) -> str:
    """Writes a file of arrays as a run does; returns what names it."""
    data = save(arrays)
    name = digest(data).removeprefix(PREFIX)
    (run / "attachments" / f"{name}.safetensors").write_bytes(data)
    return name


def test_how_trajectories_were_sampled_cannot_be_changed(run: Path):
    error = invoke("replay", run, "--step", 4, "rollout.temperature=0.5").exception
    assert_message(error, key="rollout.temperature", value=0.5)


@pytest.mark.usefixtures("forgotten_agents")
@pytest.mark.parametrize("name", VARIANTS)
def test_steps_of_every_kind_are_equal_to_the_bit(tmp_path: Path, name: str):
    run = train(tmp_path / "run", **VARIANTS[name])
    for step in (2, 3, 4):
        status, result = replay(run, step)
        assert (status, result["verdict"]) == (0, "equal"), result


def test_runs_of_one_seed_are_the_same_and_those_of_two_are_not(tmp_path: Path):
    # Else log-probs may depend on which requests happened to arrive together.
    rollout = {"deterministic": True}
    runs = {}
    for name, learner in (("first", {}), ("again", {}), ("faster", {"learning_rate": 2e-3})):
        runs[name] = train(tmp_path / name, rollout=rollout, learner={"pack_length": 64, **learner})

    result = invoke("same", runs["first"], runs["again"], "--json")
    summary = json.loads(result.stdout)
    assert result.exit_code == 0 and summary["same"] and summary["steps"] == 4
    assert all(tmp_path.name in str(cause) for cause in summary["causes"]), "paths alone differ"

    result = invoke("same", runs["first"], runs["faster"], "--json")
    summary = json.loads(result.stdout)
    assert result.exit_code == 1 and summary["steps"] == 0
    assert "config.learner.learning_rate" in [cause["where"] for cause in summary["causes"]]
    assert summary["outcome"]["where"] == "step 1, metrics.learning_rate"
