"""The agents' side of a run: evaluation settings reach evaluations, and what is missing is found
out before it.
"""

import functools

import pytest
from starlette.responses import JSONResponse

from jax_agent_rl.config import build
from jax_agent_rl.data.reader import LocatedRow
from jax_agent_rl.environments import Environment, Observation, base
from jax_agent_rl.errors import ConfigError, DataError
from jax_agent_rl.rewards import register_reward, score
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.runtime.rollouts import make_agents
from jax_agent_rl.tools import ToolRegistry
from jax_agent_rl.types import SamplingParams
from tests.fakes import FakeCodec, ScriptedBackend
from tests.http_service import ToolServer
from tests.messages import raises
from tests.ports import free_port
from tests.trajectories import trajectories_of

MINIMAL = {"run_dir": "runs/x", "model": {"path": "m"}, "data": {"train": "t.jsonl"}}
ROW = {"prompt": [{"role": "user", "content": "go"}], "data_source": "runtime_agents_test"}


@register_reward("runtime_agents_test")
def one_point(data_source, solution_str, ground_truth, extra_info):
    return 1.0


async def agents(rows, *overrides):
    codec = FakeCodec()
    client = LLMServerClient()
    config = build(MINIMAL, overrides)
    scorer = functools.partial(score, timeout=config.reward.timeout)
    run_agents = make_agents(config, client=client, codec=codec, tools=ToolRegistry(), score=scorer)
    await run_agents.preflight(
        LocatedRow(f"rows.jsonl, line {number}", row) for number, row in enumerate(rows, 1)
    )
    client.pool.add_server(AsyncServer(ScriptedBackend(codec, ["act </py>"])))
    return run_agents


class Saved(Environment):
    """Ends with the second reply; counts its snapshots."""

    takes_snapshots = True
    count = 0

    async def reset(self):
        self.replies = 0
        return Observation.say("begin")

    async def step(self, reply):
        self.replies += 1
        return Observation.say("go on", done=self.replies == 2)

    async def snapshot(self):
        type(self).count += 1
        return b"x"


@pytest.mark.parametrize(("mode", "expected"), [("sync", 0), ("fully_async", 1)])
async def test_snapshots_are_taken_where_checkpoints_hold_running_trajectories(
    monkeypatch: pytest.MonkeyPatch, mode: str, expected: int
):
    saved = type("Saved", (Saved,), {})
    monkeypatch.setattr(base, "ENVIRONMENTS", {**base.ENVIRONMENTS, "saved": saved})
    row = {
        **ROW,
        "agent_name": "environment_agent",
        "extra_info": {"environment_kwargs": {"name": "saved"}},
    }
    run_agents = await agents([row], f"trainer.mode={mode}")
    counts = []
    for collector in (run_agents.collector, run_agents.evaluator):
        await collector.collect([row], group_size=1, sampling=SamplingParams(max_tokens=50), step=0)
        counts.append(saved.count)
    assert counts == [expected, expected], "evaluations are not continued"


async def test_evaluations_run_with_the_val_settings():
    async with ToolServer() as server:
        run_agents = await agents(
            [ROW],
            "agent.action_stop_tokens=</py>",
            f"agent.tool_server_url={server.url}",
            "agent.max_turns=3",
            "agent.val_max_turns=1",
        )
        turns = []
        for collector in (run_agents.collector, run_agents.evaluator):
            groups = await collector.collect(
                [ROW], group_size=1, sampling=SamplingParams(max_tokens=50), step=0
            )
            turns += [t.num_turns for t in trajectories_of(groups)]
        await run_agents.close()
    assert turns == [4, 2]


async def test_a_lost_tool_server_costs_trajectories_and_not_the_run():
    async with ToolServer() as server:
        run_agents = await agents(
            [ROW],
            "agent.action_stop_tokens=</py>",
            f"agent.tool_server_url={server.url}",
            "agent.tool_call_max_retries=0",
        )

        async def broken(payload):
            return JSONResponse({}, status_code=500)

        server.respond = broken
        groups = await run_agents.collector.collect(
            [ROW], group_size=3, sampling=SamplingParams(max_tokens=50), step=0
        )
        await run_agents.close()
    assert [group.dropped for group in groups] == [{"tool_server_error": 3}]
    run_agents.collector.accounting.check()


async def test_a_server_that_is_not_there_is_found_out_before_the_run():
    url = f"http://127.0.0.1:{free_port()}"
    with raises(ConfigError, key=("not ready", f"{url}/health")):
        await agents(
            [ROW],
            "tool_config.enabled=true",
            f"tool_config.server_url={url}",
            "tool_config.max_retries=0",
        )
    await agents(
        [{**ROW, "agent_name": "single_turn_agent"}],
        "tool_config.enabled=true",
        f"tool_config.server_url={url}",
    )


async def test_a_row_that_names_an_unknown_interaction_is_found_out_before_the_run():
    row = {
        **ROW,
        "agent_name": "interaction_agent",
        "extra_info": {"interaction_kwargs": {"name": "gsm9k"}},
    }
    with raises(DataError, key="rows.jsonl, line 2", value="'gsm9k'"):
        await agents([ROW, row])
