"""Every setting of the server_tool agent does what it says, over a real HTTP tool server."""

import asyncio

import pytest

from jax_agent_rl.agents import ServerToolAgent
from jax_agent_rl.config import build
from jax_agent_rl.errors import ConfigError, PromptTooLongError, ToolServerError
from jax_agent_rl.tools.base import MARKER
from jax_agent_rl.types import DropReason, FinishReason
from tests.agent_testbed import ACT, ACTION, STOP, AgentHarness, assert_token_exact
from tests.agent_testbed import server_tool_stage as stage
from tests.fakes import EOS, FakeCodec
from tests.http_service import ToolServer
from tests.messages import raises


@pytest.fixture
async def server():
    async with ToolServer() as running:
        yield running


async def test_enable_agent_off_generates_once_without_a_server():
    it = AgentHarness(ServerToolAgent, [ACT], enable_agent=False, **STOP)
    await it.agent.preflight()
    trajectory = await it.run()
    assert trajectory.num_turns == 1
    assert trajectory.finish_reason is FinishReason.ANSWER
    assert it.text(trajectory) == ACT + "<eos>", "nothing stops at an action"


async def test_max_turns_is_the_number_of_tool_calls_and_the_last_step_makes_none(server):
    for max_turns in (0, 1, 2):
        server.requests.clear()
        trajectory = await stage(server, [ACT], max_turns=max_turns).run()
        assert len(server.requests) == len(trajectory.tool_calls) == max_turns
        assert trajectory.num_turns == max_turns + 1
        assert trajectory.finish_reason is FinishReason.MAX_USER_TURNS
        assert trajectory.turns[-1].appended_ids == ()


async def test_min_turns_sends_turns_that_hold_no_action(server):
    trajectory = await stage(server, ["just words"], min_turns=2).run()
    assert server.actions == ["just words</py>"] * 2, (
        "the stop token the server looks for is added to what is sent"
    )
    assert trajectory.num_turns == 3
    assert trajectory.finish_reason is FinishReason.ANSWER


async def test_what_stands_in_a_think_block_is_no_action_and_is_not_sent(server):
    """The server looks for calls in all it is sent."""
    thought = "<think> try <py> 0 </py> no, or <py> 9 </think> well: "
    it = stage(server, [f"{thought}{ACT}", "<think> <py> 4 </py> </think> so 3"])
    trajectory = await it.run()
    assert server.actions == [f"well: {ACTION}"]
    assert it.codec.decode(trajectory.turns[0].output.token_ids) == f"{thought}{ACTION}", (
        "one turn, all of it"
    )
    assert (trajectory.num_turns, trajectory.finish_reason) == (2, FinishReason.ANSWER)
    assert_token_exact(trajectory, it.backend.requests)


@pytest.mark.parametrize(
    "limits", [{"min_turns": 1}, {"enable_mtrl": True, "action_stop_tokens": ()}]
)
async def test_a_turn_that_is_sent_anyway_is_sent_without_its_thoughts(server, limits):
    await stage(
        server, ["<think> <py> 0 </py> </think> just words", "done"], max_turns=1, **limits
    ).run()
    assert [action.removesuffix("</py>") for action in server.actions] == ["just words"]


async def test_the_budget_of_a_turn_holds_across_a_stop_in_its_thoughts(server):
    trajectory = await stage(server, ["<think> <py> 0 </py> a b c d"], max_action_length=6).run()
    assert trajectory.finish_reason is FinishReason.ACTION_LENGTH
    assert len(trajectory.response_ids) == 6
    assert not server.requests


async def test_a_turn_end_token_ends_a_turn_in_the_middle_of_a_thought(server):
    trajectory = await stage(server, ["<think> a <end> b"], turn_end_token="<end>").run()
    assert (len(trajectory.response_ids), trajectory.finish_reason) == (3, FinishReason.ANSWER)


async def test_max_prompt_length_drops_a_longer_prompt(server):
    with raises(PromptTooLongError, key="agent.max_prompt_length", value=3):
        await stage(server, [ACT], max_prompt_length=3).run()


async def test_max_response_length_ends_it_before_an_overflowing_observation(server):
    """5 ids of action and the 6 of its observation; one more can be sampled from 12 on."""
    server_says = len(
        AgentHarness(ServerToolAgent, [], enable_agent=False).codec.encode_text(f" ran {ACTION!r}")
    )
    need = 5 + server_says + 1
    enough = await stage(server, [ACT, "so 3"], max_response_length=need).run()
    assert enough.num_turns == 2
    assert len(enough.response_ids) == need
    short = await stage(server, [ACT, "so 3"], max_response_length=need - 1).run()
    assert short.num_turns == 1
    assert short.finish_reason is FinishReason.RESPONSE_LENGTH


async def test_truncate_response_side_left_cuts_the_observation_and_goes_on():
    async with ToolServer(lambda action: " a b c d e f g h i j") as server:
        it = stage(server, [ACT, "so 3"], max_response_length=13, truncate_response_side="left")
        trajectory = await it.run()
    assert it.codec.decode(trajectory.turns[0].appended_ids) == f"{MARKER} h i j", (
        "half of 8 ids, from the end"
    )
    assert trajectory.finish_reason is FinishReason.ANSWER
    assert_token_exact(trajectory, it.backend.requests)


async def test_max_model_len_bounds_the_whole_context(server):
    prompt = len((await stage(server, ["3"]).run()).prompt_ids)
    trajectory = await stage(server, ["a b c d e"], max_model_len=prompt + 3).run()
    assert len(trajectory.response_ids) == 3
    assert trajectory.finish_reason is FinishReason.RESPONSE_LENGTH
    with raises(PromptTooLongError, key="agent.max_model_len", value=5):
        await stage(server, ["3"], max_model_len=5).run()


@pytest.mark.parametrize(
    ("side", "expected"),
    [("left", f"{MARKER} y z"), ("right", f"a b{MARKER}"), ("middle", f"a{MARKER} z")],
)
async def test_max_obs_length_cuts_the_side_that_is_named(side, expected):
    async with ToolServer(lambda action: "a b c d e f g h w x y z") as server:
        it = stage(server, [ACT, "so 3"], max_obs_length=3, truncate_obs_side=side)
        trajectory = await it.run()
    assert len(trajectory.turns[0].appended_ids) <= 3
    assert trajectory.tool_calls[0].observation == expected


async def test_max_action_length_cuts_a_turn_and_says_so(server):
    trajectory = await stage(server, ["a b c d e"], max_action_length=3).run()
    assert len(trajectory.response_ids) == 3
    assert trajectory.finish_reason is FinishReason.ACTION_LENGTH
    budget = await stage(server, ["a b c d e"], max_action_length=3, max_response_length=3).run()
    assert budget.finish_reason is FinishReason.RESPONSE_LENGTH, (
        "the budget is used up as well: that is the reason"
    )


async def test_action_stop_tokens_end_a_turn_at_whichever_comes_first(server):
    it = stage(server, ["<q> x </q> y </py>", "so 3"], action_stop_tokens=("</py>", "</q>"))
    await it.run()
    assert server.actions == ["<q> x </q>"]
    assert it.backend.requests[0].sampling.stop == ("</py>", "</q>")


async def test_mask_observations_off_trains_on_them_and_keeps_the_sampled_ones_apart(server):
    masked = await stage(server, [ACT, "so 3"]).run()
    assert masked.loss_mask == masked.response_mask
    trained = await stage(server, [ACT, "so 3"], mask_observations=False).run()
    assert trained.response_mask == masked.response_mask
    assert set(trained.loss_mask) == {1}


async def test_enable_mtrl_puts_the_observation_into_a_turn_of_mtrl_role(server):
    it = stage(server, [ACT, "so 3"], enable_mtrl=True, mtrl_role="tool")
    trajectory = await it.run()
    assert it.codec.decode(trajectory.turns[0].appended_ids, skip_special_tokens=False) == (
        f"<eos>tool:  ran {ACTION!r}<eos>assistant:"
    )
    assert trajectory.messages[2]["role"] == "tool"
    default = await stage(server, [ACT, "so 3"], enable_mtrl=True).run()
    assert default.messages[2]["role"] == "user"


async def test_enable_mtrl_without_stop_tokens_sends_every_turn():
    async with ToolServer(lambda action: ("go on", "done" in action, True)) as server:
        it = AgentHarness(
            ServerToolAgent, ["one", "two", "done"], tool_server_url=server.url, enable_mtrl=True
        )
        trajectory = await it.run()
    assert server.actions == ["one", "two", "done"]
    assert trajectory.finish_reason is FinishReason.TOOL_DONE
    assert_token_exact(trajectory, it.backend.requests)


async def test_mtrl_sep_and_turn_end_token_write_the_turn_by_hand():
    async with ToolServer(lambda action: "OBS") as server:
        it = stage(
            server,
            [ACT, "words <end> never", "no"],
            enable_mtrl=True,
            mtrl_sep=" <sys> {obs} <go>",
            turn_end_token="<end>",
            min_turns=2,
        )
        trajectory = await it.run()
    first, second, _ = trajectory.turns
    assert it.codec.decode(first.appended_ids) == "<end> <sys> OBS <go>", "a cut turn is ended"
    assert it.codec.decode(second.output.token_ids) == "words <end>", "the token ends a turn"
    assert it.codec.decode(second.appended_ids) == " <sys> OBS <go>", "and is not written twice"
    assert server.actions == [ACTION, "words </py>"]
    assert_token_exact(trajectory, it.backend.requests)


async def test_turn_end_token_ends_an_answer(server):
    trajectory = await stage(server, ["so 3 <end> junk"], turn_end_token="<end>").run()
    assert trajectory.finish_reason is FinishReason.ANSWER
    assert trajectory.num_sampled == 3


async def test_additional_eos_token_ids_end_a_turn(server):
    codec = FakeCodec()
    (bar,) = codec.encode_text(" |")
    trajectory = await stage(
        server, ["so 3 | junk"], codec=codec, additional_eos_token_ids=(bar,)
    ).run()
    assert trajectory.finish_reason is FinishReason.ANSWER
    assert trajectory.response_ids[-1] == bar
    assert trajectory.num_sampled == 3


async def test_call_tool_first_puts_an_observation_into_the_prompt():
    async with ToolServer(lambda action: " start" if not action else " next") as server:
        it = stage(server, ["so 3"], call_tool_first=True)
        trajectory = await it.run()
        assert it.codec.decode(trajectory.prompt_ids).endswith("assistant: start")
        assert set(trajectory.response_mask) == {1}
        assert_token_exact(trajectory, it.backend.requests)
        chat = stage(server, ["so 3"], call_tool_first=True, enable_mtrl=True)
        assert chat.codec.decode((await chat.run()).prompt_ids).endswith("user:  startassistant:")
    assert server.actions == ["", ""]
    assert server.closed == {"t": 2}


async def test_a_first_observation_that_fills_the_prompt_drops_the_trajectory():
    async with ToolServer(lambda action: " w" * 40) as server:
        with raises(PromptTooLongError, key="agent.max_prompt_length", value=20):
            await stage(server, ["so 3"], call_tool_first=True, max_prompt_length=20).run()
    async with ToolServer(lambda action: ("", True, True)) as server:
        with raises(ToolServerError, value="first turn"):
            await stage(server, ["so 3"], call_tool_first=True).run()
    assert server.closed == {"t": 1}


async def test_force_finish_for_last_turn_lets_the_last_turn_run_past_an_action(server):
    trajectory = await stage(server, [ACT], max_turns=1, force_finish_for_last_turn=True).run()
    assert trajectory.finish_reason is FinishReason.ANSWER
    assert trajectory.turns[-1].output.token_ids[-1] == EOS
    assert len(server.requests) == 1


async def test_mask_overlong_loss_names_the_reason_and_keeps_the_trajectory(server):
    trajectory = await stage(
        server, ["a b c"], max_response_length=2, mask_overlong_loss=True
    ).run()
    assert trajectory.no_loss is DropReason.OVERLONG
    assert (await stage(server, ["a b c"], max_response_length=2).run()).no_loss is None
    assert (await stage(server, ["a"], mask_overlong_loss=True).run()).no_loss is None
    assert (
        await stage(server, [ACT], max_turns=1, mask_overlong_loss=True).run()
    ).no_loss is DropReason.OVERLONG


@pytest.mark.parametrize(
    ("script", "valid", "limits", "void"),
    [
        (["a b c"], True, {"max_response_length": 2}, True),
        ([""], True, {}, True),
        (["3"], True, {}, False),
        ([ACT], True, {"max_turns": 1}, False),
        ([ACT], False, {"max_turns": 1}, True),
        ([ACT, "3"], False, {}, False),
    ],
)
async def test_mask_void_traj_is_about_neither_a_valid_action_nor_an_answer(
    script, valid, limits, void
):
    async with ToolServer(lambda action: ("x", False, valid)) as server:
        trajectory = await stage(server, script, mask_void_traj=True, **limits).run()
    assert (trajectory.no_loss is DropReason.VOID_TRAJECTORY) is void


async def test_max_concurrent_trajectories_holds_the_others_back(server):
    it = stage(server, ["a b c"], max_concurrent_trajectories=2)
    await asyncio.gather(*(it.run(trajectory_id=str(i)) for i in range(7)))
    assert it.backend.max_running == 2
    free = stage(server, ["a b c"])
    await asyncio.gather(*(free.run(trajectory_id=str(i)) for i in range(7)))
    assert free.backend.max_running == 7


MINIMAL = {"run_dir": "runs/x", "model": {"path": "m"}, "data": {"train": "t.jsonl"}}


def test_n_is_another_name_of_the_group_size():
    assert build(MINIMAL, ["agent.n=4"]).rollout.group_size == 4
    assert build(MINIMAL, ["agent.n=4", "rollout.group_size=4"]).rollout.group_size == 4
    with raises(ConfigError, key=("agent.n", "rollout.group_size"), value=(4, 2)):
        build(MINIMAL, ["agent.n=4", "rollout.group_size=2"])


def test_val_settings_hold_in_evaluations_only():
    agent = build(
        MINIMAL, ["agent.max_turns=5", "agent.min_turns=3", "agent.val_max_turns=2"]
    ).agent
    assert (
        agent.max_turns,
        agent.for_validation().max_turns,
        agent.for_validation().min_turns,
    ) == (5, 2, 2)
    agent = build(MINIMAL, ["agent.val_max_response_length=100"]).agent
    assert (agent.max_response_length, agent.for_validation().max_response_length) == (512, 100)
    with raises(ConfigError, key=("val_max_response_length", "max_model_len")):
        build(MINIMAL, ["agent.val_max_response_length=4000"])


def test_max_model_len_of_agents_is_at_most_the_engines():
    with raises(
        ConfigError, key=("agent.max_model_len", "rollout.max_model_len"), value=(2000, 1024)
    ):
        build(MINIMAL, ["agent.max_model_len=2000"])


def test_action_stop_tokens_are_a_list_a_text_or_a_file(tmp_path):
    file = tmp_path / "stops.txt"
    file.write_text("</a>, </b>\n")
    for value in ("[</a>, </b>]", "'</a>,</b>'", str(file)):
        assert build(MINIMAL, [f"agent.action_stop_tokens={value}"]).agent.action_stop_tokens == (
            "</a>",
            "</b>",
        )


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["agent.min_turns=9"], {"key": ("min_turns", "max_turns"), "value": (9, 5)}),
        (["agent.enable_mtrl=true", "agent.mtrl_sep=x"], {"fix": "{obs} exactly once"}),
        (
            ["agent.mtrl_sep='{obs}'"],
            {"key": "mtrl_sep", "value": "{obs}", "fix": "agent.enable_mtrl"},
        ),
        (["agent.rollout_mode=fast"], {"key": "agent.rollout_mode"}),
    ],
)
def test_contradictory_settings_are_refused(overrides, named):
    with raises(ConfigError, **named):
        build(MINIMAL, overrides)


def test_an_agent_without_a_server_or_without_a_way_to_act_is_refused():
    with raises(ConfigError, fix="set agent.tool_server_url"):
        AgentHarness(ServerToolAgent, [ACT], **STOP)
    with raises(ConfigError, value="never call"):
        AgentHarness(ServerToolAgent, [ACT], tool_server_url="http://localhost:1")
