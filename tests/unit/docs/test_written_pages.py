"""What the pages of docs/write/, and the one on traces, tell a reader to write runs, and does what
they say.
"""

from __future__ import annotations

import functools
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from jax_agent_rl.agents import EnvironmentAgent, get_agent, load_agents
from jax_agent_rl.config import Config, ToolsConfig
from jax_agent_rl.config.loading import build_tree
from jax_agent_rl.environments import EnvironmentPools, load_environments, require_environment
from jax_agent_rl.tools.registry import open_tools
from jax_agent_rl.tracing import Tracer
from jax_agent_rl.types import FinishReason, SamplingParams
from tests.agent_testbed import AgentHarness, assert_token_exact, episode_request
from tests.capabilities import needs_bwrap
from tests.http_service import serve
from tests.tiny_chat import assert_exact, tiny_context
from tests.unit.docs.pages import DOCS, ROOT, blocks, write_files
from tests.unit.environments import test_nemo_gym as nemo_gym
from tests.unit.environments import test_openenv as openenv

PAGES = [*sorted((DOCS / "write").glob("*.md")), DOCS / "traces.md"]
REQUIRED = {
    "run_dir": "runs/page",
    "model": {"path": "model"},
    "data": {"train": "t.jsonl", "eval": "h.jsonl"},
}


def program_of(page: Path) -> str:
    """Return the page's blocks of Python that belong to no file."""
    parts = [block for block in blocks(page) if block.language == "python" and not block.title]
    return "".join(block.text for block in parts)


PROGRAMS = {page: program_of(page) for page in PAGES}


@pytest.mark.parametrize(
    ("page", "program"),
    [(p, text) for p, text in PROGRAMS.items() if text],
    ids=lambda v: getattr(v, "stem", ""),
)
def test_its_programs_run_through(page: Path, program: str, tmp_path: Path):
    write_files(page, tmp_path)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_its_configuration_has_keys_that_exist(page: Path):
    for block in blocks(page):
        if block.language == "yaml" and not block.title:
            build_tree(Config, REQUIRED | yaml.safe_load(block.text))


async def test_the_agent_looks_twice_and_only_what_it_sampled_is_trained_on(tmp_path: Path):
    write_files(DOCS / "write" / "agent.md", tmp_path)
    load_agents(str(tmp_path / "agent.py"))
    stage = AgentHarness(get_agent("second_look"), ["It is 4.", "It is 3."])
    trajectory = await stage.run()
    assert_token_exact(trajectory, stage.backend.requests)
    assert trajectory.finish_reason is FinishReason.ANSWER
    assert len(trajectory.turns) == 2
    sampled = [
        token
        for token, is_sampled in zip(trajectory.response_ids, trajectory.response_mask, strict=True)
        if is_sampled
    ]
    assert stage.codec.decode(sampled) == "It is 4.It is 3."
    assert "Check that" in stage.text(trajectory)


async def test_the_client_is_handed_an_endpoint_that_records_its_ids(tmp_path: Path):
    pytest.importorskip("uvicorn")
    pytest.importorskip("openai")
    write_files(DOCS / "write" / "agent.md", tmp_path)
    load_agents(str(tmp_path / "client.py"))
    row = {"prompt": [{"role": "user", "content": "what is one plus two"}], "data_source": "sums"}
    async with tiny_context() as context:
        loop = get_agent("client")(context)
        sampling = SamplingParams(max_tokens=12, seed=1)
        trajectory = await loop.play(episode_request(row, sampling))
        await loop.close()
        assert_exact(trajectory, context.client.pool.servers[0].backend)
    assert trajectory.num_turns == 1


async def test_the_environment_plays_until_the_number_is_found(tmp_path: Path):
    write_files(DOCS / "write" / "environment.md", tmp_path)
    load_environments(str(tmp_path / "guess.py"))
    page_blocks = blocks(DOCS / "write" / "environment.md")
    (json_block,) = [block for block in page_blocks if block.language == "json"]
    row = yaml.safe_load(json_block.text)
    stage = AgentHarness(
        EnvironmentAgent, ["50", "hm", "42"], shared={"environments": EnvironmentPools()}
    )
    trajectory = await stage.run(row)
    assert trajectory.finish_reason is FinishReason.ENVIRONMENT_DONE
    assert trajectory.turn_scores == (0.0, 0.0, 1.0)
    text = stage.text(trajectory)
    assert "smaller" in text
    assert "That was no number." in text
    await stage.agent.close()


def row_of_server(name: str, url: str) -> dict[str, Any]:
    """Return a row of the page on servers, whose server listens elsewhere."""
    for block in blocks(DOCS / "write" / "servers.md"):
        if block.title == f"{name}.json":
            row = yaml.safe_load(block.text)
            require_environment(row)
            row["extra_info"]["environment_kwargs"]["url"] = url
            return row
    raise AssertionError(f"the page has no {name}.json")


async def test_the_row_of_an_openenv_server_is_played_token_exactly():
    exchanges = [
        openenv.observed(openenv.reset(seed=7), None, False, text="A fruit of 4 letters?"),
        openenv.tools_list(error=openenv.NO_MCP),
        openenv.observed(openenv.step(word="plum"), -0.25, False, text="No."),
        openenv.observed(openenv.step(word="pear"), 1.0, True, text="Right."),
        openenv.RECORDED["write"][-1],
    ]
    async with serve(openenv.recorded_app(exchanges, openenv.ACTIONS["write"])) as url:
        shared = {"environments": EnvironmentPools()}
        stage = AgentHarness(EnvironmentAgent, ["plum", "pear"], shared=shared)
        trajectory = await stage.run(row_of_server("openenv", url))
    assert_token_exact(trajectory, stage.backend.requests)
    assert trajectory.turn_scores == (-0.25, 1.0)
    assert "No." in stage.text(trajectory)


async def test_the_row_of_a_nemo_gym_server_is_played_and_verified():
    call = '<call> increment_counter {"count": 3} </call>'
    async with serve(nemo_gym.CounterServer().app) as url:
        shared = {"environments": EnvironmentPools()}
        stage = AgentHarness(EnvironmentAgent, [call, "It is 6."], shared=shared)
        trajectory = await stage.run(row_of_server("nemo_gym", url))
    assert_token_exact(trajectory, stage.backend.requests)
    assert trajectory.turn_scores == (0.0, 1.0)
    assert [record.name for record in trajectory.tool_calls] == ["increment_counter"]


async def test_the_environment_that_starts_slowly_is_prepared_once_per_catalogue(tmp_path: Path):
    write_files(DOCS / "write" / "environment.md", tmp_path)
    load_environments(str(tmp_path / "shop.py"))
    (tmp_path / "goods.txt").write_text("lamp chair")
    kwargs = {"name": "shop", "catalogue": str(tmp_path / "goods.txt"), "wish": "lamp"}
    row = {"prompt": [], "extra_info": {"environment_kwargs": kwargs}}
    pools = EnvironmentPools(warm_instances=1)
    stage = AgentHarness(EnvironmentAgent, ["lamp"], shared={"environments": pools})
    trajectory = await stage.run(row)
    assert trajectory.turn_scores == (1.0,)
    assert "2 goods." in trajectory.messages[0]["content"]
    await pools.close()


@needs_bwrap
async def test_the_row_of_a_shell_is_solved_by_a_command(tmp_path: Path):
    write_files(DOCS / "write" / "environment.md", tmp_path)
    row = yaml.safe_load((tmp_path / "row.yaml").read_text())
    row |= {"prompt": [{"role": "user", "content": "Correct sums.py."}]}
    require_environment(row)
    pools = EnvironmentPools(timeout=60.0)
    replies = ["```bash\nsed -i s/-/+/ sums.py; cat sums.py\n```", "Now it adds."]
    stage = AgentHarness(EnvironmentAgent, replies, shared={"environments": pools})
    trajectory = await stage.run(row)
    assert "return a + b" in trajectory.messages[2]["content"]
    assert trajectory.turn_scores == (0.0, 1.0)
    await pools.close()


async def test_the_tools_load_by_the_keys_the_page_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_files(DOCS / "write" / "tool.md", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = ToolsConfig(
        function_tool_path=str(tmp_path / "tools.py"), tool_config_path=str(tmp_path / "tools.yaml")
    )
    async with open_tools(config) as tools:
        assert set(tools) == {"population", "write_note"}


async def test_the_tool_adds_its_span_to_a_trace_and_does_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_files(DOCS / "traces.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    with sqlite3.connect("shop.db") as database:
        database.execute("create table orders (customer text, item text)")
        database.execute(
            "insert into orders values ('Ann', 'lamp'), ('Ann', 'chair'), ('Bo', 'desk')"
        )
    traces = []
    tracer = Tracer(traces.append, max_per_step=1)
    async with open_tools(ToolsConfig(function_tool_path="orders.py")) as tools:
        call = functools.partial(
            tools.select()["orders"].execute, "a trajectory", {"customer": "Ann"}
        )
        assert await call() == "lamp, chair"
        with tracer.trajectory(
            trajectory_id="t",
            group_id="g",
            group_size=1,
            step=1,
            sample=0,
            rollout=0,
            validate=False,
        ):
            await call()
    _, added = traces[0].spans
    assert (added.name, added.about, added.error) == ("tool", "database", None)
    assert added.attributes["arguments"]["customer"] == "Ann"
    assert "chair" in added.attributes["observation"]
