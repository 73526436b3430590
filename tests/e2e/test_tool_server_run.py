"""A run over a tool server, started as users start it: settings by command line, counts, a server
that is gone.
"""

import asyncio
import json
from pathlib import Path

import yaml

from jax_agent_rl.observe.run_dir import read_records
from tests.http_service import ToolServer
from tests.ports import free_port
from tests.warm import python


async def train(recipe: Path, *overrides: str) -> tuple[int, str]:
    """Runs in a process of its own, while this one serves."""
    command = [*python(), "-m", "jax_agent_rl.cli", "train", str(recipe), *overrides]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


def without_agent_names(recipe: Path) -> None:
    """Leave the recipe's rows to the default agent, without the keys of the agent they named."""
    tree = yaml.safe_load(recipe.read_text()) | {"tools": {}}
    general_keys = ("tool_prompt", "max_prompt_length", "max_response_length")
    tree["agent"] = {key: tree["agent"][key] for key in general_keys}
    recipe.write_text(yaml.safe_dump(tree))
    for file in (recipe.parent / "data").glob("*.jsonl"):
        lines = []
        for line in file.read_text().splitlines():
            row = json.loads(line)
            row.pop("agent_name", None)
            lines.append(json.dumps(row) + "\n")
        file.write_text("".join(lines))


async def test_a_run_over_a_tool_server_trains_and_closes_every_environment(
    recipe: Path, tmp_path: Path
):
    without_agent_names(recipe)
    async with ToolServer(lambda action: {"obs": " 5.", "reward": 0.5}) as server:
        status, output = await train(
            recipe,
            "trainer.steps=1",
            f"agent.tool_server_url={server.url}",
            "agent.min_turns=1",
            "agent.max_turns=2",
            "agent.val_max_turns=1",
            "agent.max_action_length=4",
            "agent.mask_observations=false",
            "agent.rollout_mode=sync",
        )
        assert status == 0, output
    records = read_records(tmp_path / "run" / "trajectories.jsonl")
    assert {r["agent_name"] for r in records} == {"server_tool_agent"}
    assert all(
        call["reward"] == 0.5 for r in records for turn in r["turns"] for call in turn["tool_calls"]
    )
    called = [r["trajectory_id"] for r in records if any(turn["tool_calls"] for turn in r["turns"])]
    assert called
    assert server.closed == dict.fromkeys(called, 1)
    evaluated = [
        payload for payload in server.requests if payload["trajectory_ids"][0].startswith("heldout")
    ]
    assert {extra["max_turns"] for payload in evaluated for extra in payload["extra_fields"]} == {1}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["token_drift"] == 0
    assert summary["max_logprob_gap"] <= 1e-3
    assert summary["started"] == summary["trained"] + sum(summary["dropped"].values()) == 4


async def test_a_missing_tool_server_is_found_out_before_anything_is_loaded(
    recipe: Path, tmp_path: Path
):
    without_agent_names(recipe)
    url = f"http://127.0.0.1:{free_port()}"
    status, output = await train(
        recipe,
        "tool_config.enabled=true",
        f"tool_config.server_url={url}",
        "tool_config.max_retries=0",
    )
    assert status == 2
    assert "tool_config.server_url" in output
    assert "cannot be reached" in output
    assert "Traceback" not in output
