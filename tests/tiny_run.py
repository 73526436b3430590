"""A whole run in seconds: a random model of 400 ids that writes noise, scored by how long the noise
is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from jax_agent_rl.models.hf import save_hf
from jax_agent_rl.observe.run_dir import read_records
from tests.tiny_chat import CONFIG, params, tokenizer

REWARD = """
from jax_agent_rl.rewards import register_reward

@register_reward("noise", override=True)  # a process may make several runs
def compute_score(solution_str, ground_truth):
    return float(len(solution_str) % 3 == int(ground_truth))
"""
GATED_REWARD = """
import pathlib, time
from jax_agent_rl.rewards import register_reward

@register_reward("noise", override=True)
def compute_score(solution_str, ground_truth):
    while not pathlib.Path({gate!r}).exists():
        time.sleep(0.01)
    return float(len(solution_str) % 3 == int(ground_truth))
"""
"""The same once a file exists: until then no trajectory ends, and a test can change the run."""
PAIR_AGENT = """
from jax_agent_rl.agents import AgentLoop, register_agent
from jax_agent_rl.types import FinishReason

@register_agent("pair_of_noise")
class Pair(AgentLoop):
    roles = ("solver", "checker")

    async def play(self, request):
        made = []
        for role in self.roles:
            episode = self.start(request.as_role(role))
            await episode.generate(session_ends=True, max_tokens=6)
            made.append(episode.finish(FinishReason.ANSWER))
        return made
"""
"""An agent of two roles that write noise, one after the other."""
SMALL = {"max_concurrent_decodes": 2, "prefill_buckets": [32], "decode_steps": 4}
"""An engine with few programs, for runs whose every process compiles its own."""
WORDS = "what is one plus two the answer three add numbers here".split()


def tiny_model(folder: Path) -> Path:
    """Writes weights, config and tokenizer; returns the folder."""
    save_hf(folder, CONFIG, params())
    tokenizer().save_pretrained(folder)
    return folder


def tiny_recipe(folder: Path, **sections: dict[str, Any]) -> Path:
    """Writes model, rows, reward function and configuration; ``run_dir`` is ``folder / "run"``.
    Returns the YAML.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "data_source": "noise",
            "prompt": [{"role": "user", "content": " ".join(WORDS[i % 7 : i % 7 + 4])}],
            "reward_model": {"ground_truth": str(i % 3)},
        }
        for i in range(11)
    ]
    for name, part in (("train", rows), ("heldout", rows[:3])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (folder / "reward.py").write_text(REWARD)
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": str(tiny_model(folder / "model"))},
        "data": {"train": str(folder / "train.jsonl"), "eval": str(folder / "heldout.jsonl")},
        "reward": {"path": str(folder / "reward.py")},
        "agent": {"tool_format": "hermes", "max_prompt_length": 32, "max_response_length": 16},
        "rollout": {
            "prompts_per_step": 2,
            "group_size": 4,
            "max_in_flight": 8,
            "max_model_len": 64,
        },
        "learner": {"pack_length": 64, "learning_rate": 1e-3},
        "algorithm": {"filter_zero_variance": False},
        "trainer": {"steps": 4, "checkpoint_every": 1},
    }
    tree["rollout"]["jetstream"] = {
        "max_concurrent_decodes": 8,
        "prefill_buckets": [32],
        "decode_steps": 4,
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump({"run_dir": str(folder / "run"), **tree}))
    return file


def step_records(run: Path) -> list[dict[str, Any]]:
    """Return what the metrics of a run say of its steps."""
    return [record for record in read_records(run / "metrics.jsonl") if record["kind"] == "step"]


def saved_steps(run: Path) -> list[int]:
    """Return the steps of a run's checkpoints."""
    names = [folder.name for folder in (run / "checkpoints").iterdir()]
    return sorted(int(name) for name in names if name.isdigit())
