"""The server_tool agent over a real HTTP tool server: the loop, both modes, the environment closed
exactly once.
"""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_agent_rl.agents import ServerToolAgent
from jax_agent_rl.errors import AbortedError, PromptTooLongError, ToolServerError
from jax_agent_rl.tools.client import ToolServerClient
from jax_agent_rl.types import DropReason, FinishReason
from tests.agent_testbed import ACT, ACTION, ROW, STOP, AgentHarness, assert_token_exact
from tests.agent_testbed import server_tool_stage as stage
from tests.examples import examples
from tests.fakes import ScriptedBackend
from tests.http_service import ToolServer
from tests.messages import raises


@pytest.fixture
async def server():
    async with ToolServer() as running:
        yield running


async def test_an_action_is_sent_its_observation_read_and_the_environment_closed(server):
    it = stage(server, [ACT, "so 3"])
    trajectory = await it.run()
    assert server.actions == [ACTION]
    assert trajectory.finish_reason is FinishReason.ANSWER
    assert_token_exact(trajectory, it.backend.requests)
    first, second = trajectory.turns
    assert it.codec.decode(first.output.token_ids) == ACTION, (
        "the turn ends with its action stop token"
    )
    assert it.codec.decode(first.appended_ids) == f" ran {ACTION!r}"
    assert trajectory.response_mask == (1,) * 5 + (0,) * len(first.appended_ids) + (1,) * 3
    assert [(c.name, c.arguments, c.error) for c in trajectory.tool_calls] == [
        ("tool_server", {"action": ACTION}, None)
    ]
    assert [m["role"] for m in trajectory.messages] == ["user", "assistant", "tool", "assistant"]
    assert server.closed == {"t": 1}


async def test_the_request_says_whose_action_it_is_and_what_the_row_adds(server):
    it = stage(server, [ACT, "so 3"], max_turns=4)
    await it.run({**ROW, "extra_info": {"stdin": "7"}}, trajectory_id="step-1-0")
    (payload,) = server.requests
    assert payload == {
        "trajectory_ids": ["step-1-0"],
        "actions": [ACTION],
        "extra_fields": [{"stdin": "7", "current_step": 0, "max_turns": 4, "turns_left": 4}],
        "finish": [False],
        "is_last_step": [False],
    }


async def test_nothing_was_opened_so_nothing_is_closed(server):
    trajectory = await stage(server, ["3"]).run()
    assert trajectory.finish_reason is FinishReason.ANSWER
    assert not server.requests
    assert not server.closed


async def test_the_server_may_end_it():
    async with ToolServer(
        lambda action: ({"obs": "right", "reward": 0.5, "metrics": {"rows": 2}}, True, True)
    ) as server:
        trajectory = await stage(server, [ACT]).run()
    assert trajectory.finish_reason is FinishReason.TOOL_DONE
    assert [(c.observation, c.reward) for c in trajectory.tool_calls] == [("right", 0.5)]
    assert trajectory.turns[-1].appended_ids == (), (
        "nothing is sampled after it, so it is not inserted"
    )
    assert trajectory.metrics["tool_server/rows"] == 2
    assert server.closed == {"t": 1}


async def test_an_action_no_tool_takes_is_told_to_the_model_and_counted():
    async with ToolServer(lambda action: ("", False, False)) as server:
        trajectory = await stage(server, [ACT, "so 3"]).run()
    (call,) = trajectory.tool_calls
    assert call.error == "invalid_action"
    assert "no tool accepted" in call.observation
    assert trajectory.metrics["tool_errors"] == 1


async def test_an_empty_observation_leaves_the_context_as_it_is():
    async with ToolServer(lambda action: "") as server:
        it = stage(server, [ACT, "so 3"])
        trajectory = await it.run()
    assert trajectory.num_turns == 2
    assert set(trajectory.response_mask) == {1}
    assert_token_exact(trajectory, it.backend.requests)


async def test_special_tokens_in_an_observation_end_nothing():
    """The real codec's rule, seen from here: observations go through ``encode_text``, never
    ``encode_markup``.
    """
    async with ToolServer(lambda action: " x") as server:
        it = stage(server, [ACT, "so 3"])
        seen = []
        it.codec.encode_markup = lambda text: seen.append(text) or it.codec.encode_text(text)
        await it.run()
    assert not seen


async def test_the_environment_is_closed_once_when_the_trajectory_is_aborted(server):
    it = AgentHarness(ServerToolAgent, [ACT], tool_server_url=server.url, **STOP)

    async def abort_the_second(request_id):
        if request_id.endswith("/1"):
            await it.client.abort(request_id)

    it.backend.wait_for_turn = abort_the_second
    with pytest.raises(AbortedError):
        await it.run()
    assert server.closed == {"t": 1}


async def test_a_task_cancelled_while_a_tool_runs_closes_its_environment_once(server):
    called = asyncio.Event()
    never = asyncio.Event()

    async def hang(payload):
        called.set()
        await never.wait()

    server.respond = hang
    task = asyncio.create_task(stage(server, [ACT]).run())
    await called.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.closed == {"t": 1}
    never.set()


async def test_the_environment_is_closed_when_the_observation_cannot_be_used():
    async with ToolServer(lambda action: 42) as server:
        with raises(ToolServerError, value="wrong observation"):
            await stage(server, [ACT]).run()
        assert server.closed == {"t": 1}


class HeldBackend(ScriptedBackend):
    """Holds the requests of the session ``slow`` until it is released."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.released = asyncio.Event()

    async def wait_for_turn(self, request_id):
        await super().wait_for_turn(request_id)
        if request_id.startswith("slow"):
            await self.released.wait()


async def test_async_mode_calls_a_tool_while_others_still_generate(server):
    it = stage(server, [ACT, "so 3"], backend=HeldBackend, rollout_mode="async")
    quick, slow = (asyncio.create_task(it.run(trajectory_id=name)) for name in ("quick", "slow"))
    assert (await quick).num_turns == 2
    assert not slow.done()
    it.backend.released.set()
    assert (await slow).num_turns == 2
    assert [payload["trajectory_ids"] for payload in server.requests] == [["quick"], ["slow"]]


async def test_sync_mode_calls_tools_together_when_the_slowest_turn_has_ended(server):
    it = stage(server, [ACT, ACT, "so 3"], backend=HeldBackend, rollout_mode="sync")
    tasks = [asyncio.create_task(it.run(trajectory_id=name)) for name in ("quick", "slow")]
    while len(it.backend.requests) < 2 or it.backend.running != {"slow/0"}:
        await asyncio.sleep(0)
    it.backend.released.set()
    quick, slow = await asyncio.gather(*tasks)
    assert [sorted(payload["trajectory_ids"]) for payload in server.requests] == [
        ["quick", "slow"]
    ] * 2
    assert quick.num_turns == slow.num_turns == 3
    assert server.closed == {"quick": 1, "slow": 1}


async def test_sync_mode_waits_for_nobody_who_has_answered_or_failed(server):
    scripts = {"acts": [ACT, "so 3"], "answers": ["3"], "fails": ["x " * 600]}

    def script(request):
        turn = len([r for r in it.backend.requests if r.session_id == request.session_id]) - 1
        return it.codec.reply_ids(scripts[request.session_id][turn])

    it = stage(server, script, rollout_mode="sync", max_prompt_length=20)
    long_row = {"prompt": [{"role": "user", "content": "w " * 30}]}
    results = await asyncio.gather(
        it.run(trajectory_id="acts"),
        it.run(trajectory_id="answers"),
        it.run(long_row, trajectory_id="fails"),
        return_exceptions=True,
    )
    assert results[0].num_turns == 2
    assert results[1].num_turns == 1
    assert isinstance(results[2], PromptTooLongError)


async def test_sync_mode_survives_a_member_that_is_cancelled_while_it_waits(server, monkeypatch):
    action_sent = asyncio.Event()
    execute = ToolServerClient.execute

    async def noted_execute(client, action):
        action_sent.set()
        return await execute(client, action)

    monkeypatch.setattr(ToolServerClient, "execute", noted_execute)
    it = stage(server, [ACT, "so 3"], backend=HeldBackend, rollout_mode="sync")
    quick, slow = (asyncio.create_task(it.run(trajectory_id=name)) for name in ("quick", "slow"))
    while it.backend.running != {"slow/0"}:
        await asyncio.sleep(0)
    await action_sent.wait()  # it waits for the slow one's
    assert not server.requests
    quick.cancel()
    it.backend.released.set()
    assert (await slow).num_turns == 2
    with pytest.raises(asyncio.CancelledError):
        await quick
    assert server.closed == {"quick": 1, "slow": 1}


async def test_one_bad_observation_of_a_batch_is_its_own_trajectorys_affair():
    async with ToolServer(lambda action: 42 if "bad" in action else "fine") as server:
        scripts = {"good": "go </py>", "bad": "bad </py>"}

        def script(request):
            turn = sum(r.session_id == request.session_id for r in it.backend.requests)
            return it.codec.reply_ids(scripts[request.session_id] if turn == 1 else "so 3")

        it = stage(server, script, rollout_mode="sync")
        good, bad = await asyncio.gather(
            it.run(trajectory_id="good"), it.run(trajectory_id="bad"), return_exceptions=True
        )
    assert good.num_turns == 2
    assert isinstance(bad, ToolServerError)
    assert bad.drop_reason is DropReason.TOOL_SERVER_ERROR


replies = st.sampled_from([ACT, ACT, "words", "a b c d e f g", "", "</py> x", "a <end> b"])
observations = st.sampled_from(
    [" ok", "", " w" * 40, (" no", False, False), ("end", True, True), "<eos> <eos>"]
)


@settings(max_examples=examples(40))
@given(
    st.lists(replies, min_size=1, max_size=5),
    st.lists(observations, min_size=1, max_size=4),
    st.fixed_dictionaries(
        {
            "max_response_length": st.integers(1, 40),
            "max_obs_length": st.integers(1, 12),
            "max_action_length": st.none() | st.integers(1, 8),
            "max_turns": st.integers(2, 4),
            "min_turns": st.integers(0, 2),
            "enable_mtrl": st.booleans(),
            "turn_end_token": st.none() | st.just("<end>"),
            "truncate_response_side": st.sampled_from(["left", "right"]),
            "mask_observations": st.booleans(),
            "rollout_mode": st.sampled_from(["sync", "async"]),
        }
    ),
)
async def test_whatever_is_sampled_and_observed_budgets_hold_and_ids_are_exact(
    script, seen, limits
):
    rounds = iter(seen * 10)
    async with ToolServer(lambda action: next(rounds)) as server:
        it = stage(server, script, **limits)
        trajectory = await it.run()
        await it.agent.close()
    assert_token_exact(trajectory, it.backend.requests)
    assert len(trajectory.response_ids) <= limits["max_response_length"]
    assert len(server.requests) == len(trajectory.tool_calls) <= limits["max_turns"]
    assert trajectory.num_turns <= limits["max_turns"] + 1
    assert trajectory.turns[-1].appended_ids == ()
    assert server.closed == ({"t": 1} if server.requests else {})
    inserted = [i for i, sampled in enumerate(trajectory.response_mask) if not sampled]
    assert all(bool(trajectory.loss_mask[i]) is not limits["mask_observations"] for i in inserted)
