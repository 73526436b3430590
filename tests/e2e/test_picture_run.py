"""A run whose tool shows pictures, built as from a configuration: engine, learner and transformers
agree on every sampled id over two turns, before an update of tower and decoder and after it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from jax_agent_rl.agents import loop
from jax_agent_rl.config import load
from jax_agent_rl.models.hf import load_config, save_hf
from jax_agent_rl.rewards import registry
from jax_agent_rl.runtime.build import build
from jax_agent_rl.trainer.components import RunComponents
from jax_agent_rl.types import Group, SamplingParams
from tests.gpu_backend.vision import IMAGE, KINDS, VisionReference, picture, write_model
from tests.warm import python

pytest.importorskip("torch")

PLUGIN = """
from dataclasses import replace

import numpy as np
from PIL import Image

from jax_agent_rl.agents import register_agent
from jax_agent_rl.agents.tool_agent import ToolAgent
from jax_agent_rl.chat.reply import Reply, ToolCall
from jax_agent_rl.rewards import register_reward
from jax_agent_rl.tools.base import BaseTool, ToolResponse


class Camera(BaseTool):
    async def execute(self, instance_id, arguments, **execute_kwargs):
        seed = sum(instance_id.encode()) % 2  # some trajectories see the same
        pixels = np.random.default_rng(seed).integers(0, 256, (50, 70, 3), dtype=np.uint8)
        return ToolResponse(text="look", image=(Image.fromarray(pixels),))


class Calling:
    \"\"\"A random model calls nothing: what it says is read as if it did.\"\"\"

    def __init__(self, codec):
        self._codec = codec

    def __getattr__(self, name):
        return getattr(self._codec, name)

    def parse_reply(self, sampled_ids, tools=(), *, context_ids=None):
        reply = self._codec.parse_reply(sampled_ids, tools)
        return Reply(reply.content, tool_calls=(ToolCall(name="camera", arguments={}),))


@register_agent("photographer")
class Photographer(ToolAgent):
    def __init__(self, context):
        super().__init__(replace(context, codec=Calling(context.codec)))


@register_reward("seed")
def compute_score(solution_str, ground_truth):
    return float(len(solution_str) % 3)
"""
ROWS = [
    {
        "data_source": "seed",
        "agent_name": "photographer",
        "prompt": [{"role": "user", "content": content}],
        "reward_model": {"ground_truth": ""},
    }
    for content in ("what is this?", "and that?")
]
# What a random model says of 264 ids ends soon: at whatever is no letter.
STOPS = ("\ufffd", *(chr(code) for code in range(33, 127) if not chr(code).isalpha()))
SAMPLING = SamplingParams(max_tokens=24, temperature=1.0, stop=STOPS)


@pytest.fixture(params=KINDS)
def recipe(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(
        loop, "AGENTS", dict(loop.AGENTS)
    )  # the plugin registers its names once a test
    monkeypatch.setattr(registry, "REWARDS", dict(registry.REWARDS))
    schema = {
        "name": "camera",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    }
    tool = {
        "class_name": f"{tmp_path / 'plugin.py'}:Camera",
        "tool_schema": {"type": "function", "function": schema},
    }
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (tmp_path / "tools.yaml").write_text(
        yaml.safe_dump({"tools": [tool | {"config": {"type": "native"}}]})
    )
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    engine = {
        "max_concurrent_decodes": 2,
        "prefill_buckets": [64],
        "decode_steps": 8,
        "patch_buckets": [16],
    }
    tree = {
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(write_model(tmp_path / "model", 0, request.param))},
        "data": {"train": str(tmp_path / "rows.jsonl")},
        "reward": {"path": str(tmp_path / "plugin.py")},
        "tools": {"tool_config_path": str(tmp_path / "tools.yaml")},
        "agent": {
            "module": str(tmp_path / "plugin.py"),
            "tool_format": "hermes",
            "tool_prompt": "none",
            "max_assistant_turns": 2,
            "max_prompt_length": 40,
            "max_response_length": 104,
        },
        "rollout": {
            "prompts_per_step": 2,
            "group_size": 4,
            "max_in_flight": 4,
            "max_model_len": 144,
        },
        "learner": {"pack_length": 192, "row_patches": 16, "learning_rate": 1e-3},
        "algorithm": {"adv_estimator": "dr_grpo"},
    }
    tree["rollout"]["jetstream"] = engine
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


async def collected(runtime: RunComponents, step: int, rows: Sequence[dict] = ROWS) -> list[Group]:
    return await runtime.collector.collect(rows, group_size=4, sampling=SAMPLING, step=step)


def assert_said_by(reference: VisionReference, groups: Sequence[Group]) -> None:
    """Every sampled id's log-prob is transformers', and later turns really followed a picture."""
    trajectories = [t for group in groups for t in group.trajectories]
    assert len(trajectories) == 8
    followed = 0
    for t in trajectories:
        ids = [*t.prompt_ids, *t.response_ids]
        mask = np.array(t.response_mask, bool)
        scores = reference.logprobs(ids, t.multi_modal)
        expected = scores[np.arange(len(ids) - 1), ids[1:]][len(t.prompt_ids) - 1 :]
        np.testing.assert_allclose(np.array(t.rollout_logprobs)[mask], expected[mask], atol=1e-4)
        followed += IMAGE in t.response_ids and len(t.turns) == 2
    assert followed >= 4


async def test_engine_learner_and_transformers_agree_before_and_after_an_update(
    recipe: Path, tmp_path: Path
):
    config = load(recipe)
    async with build(config, print_line=lambda line: None) as runtime:
        initial_params = jax.tree.map(np.asarray, runtime.learner.params)
        groups = await collected(runtime, 1)
        assert_said_by(VisionReference(tmp_path / "model"), groups)
        result = runtime.learner.update(groups)
        assert not result.skipped
        assert result.metrics["logprob_gap_max"] < 1e-4
        for path, new in jax.tree_util.tree_leaves_with_path(runtime.learner.params):
            old = initial_params
            for key in path:
                old = old[key.key]
            assert not np.array_equal(old, new), path
        await runtime.client.pool.update_weights(runtime.transport.offer(runtime.learner, 1))
        save_hf(tmp_path / "updated", load_config(config.model.path), runtime.learner.params)
        for file in (tmp_path / "model").glob("*processor_config.json"):
            (tmp_path / "updated" / file.name).write_text(file.read_text())
        compiled = runtime.learner.programs_compiled
        groups = await collected(runtime, 2)
        assert_said_by(VisionReference(tmp_path / "updated"), groups)
        assert runtime.learner.update(groups).metrics["logprob_gap_max"] < 1e-4
        assert runtime.learner.programs_compiled == compiled
        metrics = await runtime.metrics()
        assert metrics.recompilations == 0
        assert metrics.cached_tokens > 0


async def test_engine_learner_and_transformers_read_pictures_alike(recipe: Path, tmp_path: Path):
    for seed in (7, 8):
        picture(seed).save(tmp_path / f"{seed}.png")
    placeholder, parts = ({**row, "images": ["7.png"]} for row in ROWS)
    placeholder["prompt"] = [{"role": "user", "content": "is <image> it?"}]
    first = {"type": "image", "image": "8.png"}
    parts["prompt"] = [
        {"role": "user", "content": [first, {"type": "text", "text": "or"}, {"type": "image"}]}
    ]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in (placeholder, parts))
    )
    longer = ["agent.max_prompt_length=64", "rollout.max_model_len=168", "learner.row_patches=64"]
    async with build(load(recipe, longer), print_line=lambda line: None) as runtime:
        groups = await collected(runtime, 1, runtime.cursor.next_rows(2))
        assert_said_by(VisionReference(tmp_path / "model"), groups)
        assert sorted(len(group.trajectories[0].prompt_media["image"]) for group in groups) == [
            1,
            2,
        ]
        result = runtime.learner.update(groups)
        assert not result.skipped
        assert result.metrics["logprob_gap_max"] < 1e-4


def test_a_step_with_pictures_is_repeated_from_the_run_folder_alone(recipe: Path, tmp_path: Path):
    picture(7).save(tmp_path / "7.png")
    shown = {"role": "user", "content": "is <image> it?"}
    rows = [{**row, "images": ["7.png"], "prompt": [shown]} for row in ROWS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        "agent.max_prompt_length=64",
        "rollout.max_model_len=168",
        "learner.row_patches=64",
        "trainer.steps=2",
        "trainer.checkpoint_every=1",
    ]
    trained = invoke("train", recipe, *overrides)
    assert trained.returncode == 0, trained.stdout[-2000:] + trained.stderr[-2000:]
    run = tmp_path / "run"
    (tmp_path / "7.png").unlink()
    (tmp_path / "rows.jsonl").unlink()

    # The picture of all prompts, and the two that the tool shows: each is stored once.
    stored = list((run / "attachments").iterdir())
    assert 2 <= len(stored) <= 3
    repeated = invoke("replay", run, "--step", "2", "--json")
    result = json.loads(repeated.stdout)
    assert (result["verdict"], result["from_step"]) == ("equal", 1), repeated.stdout

    stored[0].write_bytes(stored[1].read_bytes())
    refused = invoke("replay", run, "--step", "2")
    assert refused.returncode != 0 and stored[0].name in " ".join(refused.stderr.split())


def invoke(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, whose programs are compiled as a user's are."""
    command = [*python(), "-m", "jax_agent_rl.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)
