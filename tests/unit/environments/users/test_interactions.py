"""Simulated users: conversations, finalize always called, the YAML registry, GSM8K's user, a model
as the user.
"""

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from jax_agent_rl.agents import InteractionAgent
from jax_agent_rl.environments.users import (
    BaseInteraction,
    EngineChat,
    Gsm8kInteraction,
    InteractionRegistry,
    ModelUserInteraction,
)
from jax_agent_rl.environments.users.builtin import GREETING
from jax_agent_rl.errors import ConfigError, InteractionError
from jax_agent_rl.tools import ToolRegistry, function_tool
from jax_agent_rl.tracing import Tracer
from jax_agent_rl.types import DropReason, FinishReason
from tests.agent_testbed import ROW, AgentHarness, assert_token_exact
from tests.http_service import serve
from tests.messages import raises

GSM8K = {**ROW, "extra_info": {"interaction_kwargs": {"name": "gsm8k", "ground_truth": "18"}}}


@function_tool
def add(a: int, b: int) -> str:
    """Adds."""
    return str(a + b)


class Recorded(BaseInteraction):
    """Answers what it is told to, the last answer for ever; keeps what was called."""

    def __init__(self, *answers):
        super().__init__({})
        self.answers = list(answers)
        self.calls = []

    async def start_interaction(self, instance_id, **kwargs):
        self.calls.append(("start", instance_id, kwargs))

    async def generate_response(self, instance_id, messages, **kwargs):
        self.calls.append(("reply", messages[-1]["content"], kwargs))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return await answer() if callable(answer) else answer

    async def finalize_interaction(self, instance_id):
        self.calls.append(("finalize", instance_id))

    @property
    def finalized(self):
        return sum(call[0] == "finalize" for call in self.calls)


def stage(script, user, *, tools=(), timeout=10.0, **limits):
    users = user if isinstance(user, dict) else {"user": user}
    shared = {
        "interactions": InteractionRegistry(users, timeout=timeout),
        "tools": ToolRegistry(tools),
    }
    return AgentHarness(InteractionAgent, script, shared=shared, **limits)


MORE = (False, "and now ?", 0.25, {"patience": 2})
DONE = (True, "thanks", 1.0, {})


async def test_the_user_replies_until_satisfied_and_scores_every_turn():
    user = Recorded(MORE, DONE)
    it = stage(["first", "second"], user)
    row = {**ROW, "extra_info": {"interaction_kwargs": {"name": "user", "mood": "good"}}}
    trajectory = await it.run(row)
    assert trajectory.finish_reason is FinishReason.USER_DONE
    assert trajectory.turn_scores == (0.25, 1.0)
    assert [m["content"] for m in trajectory.messages[1:]] == ["first", "and now ?", "second"]
    assert it.codec.decode(trajectory.turns[0].appended_ids) == "user: and now ?assistant:"
    assert trajectory.turns[-1].appended_ids == (), "what ends the conversation is not inserted"
    assert trajectory.metrics["interaction/patience"] == 2
    assert trajectory.metrics["interaction_turns"] == 2
    assert_token_exact(trajectory, it.backend.requests)
    assert user.calls == [
        ("start", "t", {"mood": "good"}),
        ("reply", "first", {"mood": "good"}),
        ("reply", "second", {"mood": "good"}),
        ("finalize", "t"),
    ]


async def test_what_the_user_was_told_and_said_is_traced():
    traces = []
    tracer = Tracer(traces.append, max_per_step=1)
    with tracer.trajectory(
        trajectory_id="t", group_id="g", group_size=1, step=1, sample=0, rollout=0, validate=False
    ):
        await stage(["first", "second"], Recorded(MORE, DONE)).run()
    assert [span.attributes for span in traces[0].spans if span.about == "user"] == [
        {"arguments": {"reply": "first"}, "observation": "and now ?"},
        {"arguments": {"reply": "second"}, "observation": "thanks"},
    ]


@pytest.mark.parametrize(
    ("limits", "turns", "reason"),
    [
        ({"max_user_turns": 2}, 3, FinishReason.MAX_USER_TURNS),
        ({"max_user_turns": 0}, 1, FinishReason.MAX_USER_TURNS),
        ({"max_assistant_turns": 2}, 2, FinishReason.MAX_ASSISTANT_TURNS),
        ({"max_response_length": 6}, 1, FinishReason.RESPONSE_LENGTH),
    ],
)
async def test_turns_and_budgets_bound_the_conversation_and_the_last_turn_is_scored(
    limits, turns, reason
):
    user = Recorded(MORE)
    it = stage(["word"], user, **limits)
    trajectory = await it.run()
    assert (trajectory.num_turns, trajectory.finish_reason) == (turns, reason)
    assert len(trajectory.turn_scores) == turns
    assert user.finalized == 1
    assert trajectory.turns[-1].appended_ids == ()
    assert_token_exact(trajectory, it.backend.requests)


async def test_tools_may_be_called_in_between_and_count_as_user_turns():
    user = Recorded(MORE, DONE)
    script = ['<call>add {"a": 1, "b": 2}</call>', "3", "yes"]
    it = stage(script, user, tools=[add])
    trajectory = await it.run()
    assert [m["role"] for m in trajectory.messages[1:]] == [
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
    ]
    assert trajectory.turn_scores == (0.25, 1.0)
    assert trajectory.finish_reason is FinishReason.USER_DONE
    assert_token_exact(trajectory, it.backend.requests)
    short = await stage(script, Recorded(MORE), tools=[add], max_user_turns=1).run()
    assert short.num_turns == 2
    assert short.finish_reason is FinishReason.MAX_USER_TURNS


async def never():
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (ValueError("ouch"), {"key": "reply", "value": "ValueError: ouch"}),
        (asyncio.CancelledError(), {"value": "cancelled itself"}),
        (never, {"key": "interactions.timeout", "value": 0.2}),
        ("text", {"value": "must answer"}),
        ((1, "x", 0.0, {}), {"value": "must answer"}),
        ((False, None, 0.0, {}), {"value": "must answer"}),
        ((False, "x", float("nan"), {}), {"value": "must answer"}),
        ((False, "x", 0.0), {"value": "must answer"}),
    ],
)
async def test_a_user_that_fails_loses_the_trajectory_and_is_finalized(answer, named):
    user = Recorded(answer)
    with raises(InteractionError, **named) as raised:
        await stage(["word"], user, timeout=0.2).run()
    assert raised.value.drop_reason is DropReason.INTERACTION_ERROR
    assert user.finalized == 1


async def test_a_user_is_finalized_when_the_trajectory_is_cancelled():
    asked = asyncio.Event()

    async def ask():
        asked.set()
        await never()

    user = Recorded(ask)
    task = asyncio.create_task(stage(["word"], user).run())
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert user.finalized == 1


async def test_a_user_that_cannot_begin_is_finalized_too():
    class Shy(Recorded):
        async def start_interaction(self, instance_id, **kwargs):
            raise KeyError("no")

    user = Shy(DONE)
    with raises(InteractionError, key="start", value="KeyError"):
        await stage(["word"], user).run()
    assert user.finalized == 1


async def test_a_user_that_cannot_be_finalized_costs_nothing(caplog):
    class Clingy(Recorded):
        async def finalize_interaction(self, instance_id):
            raise OSError("stays")

    trajectory = await stage(["word"], Clingy(DONE)).run()
    assert trajectory.finish_reason is FinishReason.USER_DONE
    assert "finalize raised OSError" in caplog.text


async def test_a_row_that_names_nobody_known_says_who_there_is():
    users = {"a": Recorded(DONE), "b": Recorded(DONE)}
    for kwargs in ({"name": "c"}, {}):
        row = {**ROW, "extra_info": {"interaction_kwargs": kwargs}}
        with raises(InteractionError, value="['a', 'b']", fix="interaction_config_path"):
            await stage(["word"], users).run(row)


# --- GSM8K ----------------------------------------------------------------------------------------


async def test_the_gsm8k_user_asks_again_until_the_answer_is_right():
    user = Gsm8kInteraction({})
    initial_state = dict(vars(user))
    trajectory = await stage(["#### 17", "#### 18"], {"gsm8k": user}).run(GSM8K)
    assert trajectory.turn_scores == (0.0, 1.0)
    assert trajectory.finish_reason is FinishReason.USER_DONE
    assert "incorrect" in trajectory.messages[2]["content"]
    assert vars(user) == initial_state, "nothing is kept of a finished conversation"


@pytest.mark.parametrize(("style", "score"), [("strict", 0.0), ("flexible", 1.0)])
async def test_the_gsm8k_user_may_be_flexible(style, score):
    user = Gsm8kInteraction({"answer_format": style})
    trajectory = await stage(["it is 18 ."], {"gsm8k": user}, max_user_turns=0).run(GSM8K)
    assert trajectory.turn_scores == (score,)


async def test_the_gsm8k_user_wants_a_truth():
    row = {**ROW, "extra_info": {"interaction_kwargs": {"name": "gsm8k"}}}
    with raises(InteractionError, key="ground_truth", value=None):
        await stage(["#### 18"], {"gsm8k": Gsm8kInteraction({})}).run(row)


# --- a model as the user --------------------------------------------------------------------------


def endpoint(*replies, asked):
    queue = list(replies)

    async def complete(request):
        asked.append((dict(request.headers), await request.json()))
        reply = queue.pop(0) if len(queue) > 1 else queue[0]
        return JSONResponse(
            reply if not isinstance(reply, str) else {"choices": [{"message": {"content": reply}}]}
        )

    return Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])


async def converse(*replies, script, **config):
    asked = []
    row = {**ROW, "extra_info": {"interaction_kwargs": {"goal": "learn the sum"}}}
    async with serve(endpoint(*replies, asked=asked)) as url:
        user = ModelUserInteraction(
            {"base_url": f"{url}/v1", "model": "m", "retry_delay": 0, **config}
        )
        try:
            return await stage(script, user).run(row), asked
        finally:
            await user.close()


async def test_a_model_behind_an_endpoint_plays_the_user(monkeypatch):
    monkeypatch.setenv("USER_KEY", "k")
    trajectory, asked = await converse(
        "sure ?",
        "###DONE###",
        script=["3", "yes 3"],
        api_key_env="USER_KEY",
        persona="be brief, end with {done}",
    )
    assert trajectory.finish_reason is FinishReason.USER_DONE
    assert trajectory.turn_scores == (
        0.0,
        1.0,
    )
    headers, body = asked[1]
    assert headers["authorization"] == "Bearer k"
    assert body["messages"] == [
        {
            "role": "system",
            "content": "be brief, end with ###DONE###\n\nThe user's goal: learn the sum",
        },
        {"role": "user", "content": GREETING},
        {"role": "assistant", "content": "what is 1 + 2 ?"},
        {"role": "user", "content": "3"},
        {"role": "assistant", "content": "sure ?"},
        {"role": "user", "content": "yes 3"},
    ]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 256, 0.7)


@pytest.mark.parametrize(
    "answer", [{}, {"choices": []}, {"choices": [{"message": {"content": None}}]}, [1]]
)
async def test_an_endpoint_without_text_loses_the_trajectory(answer):
    with raises(InteractionError, key="/v1/chat/completions", value="without"):
        await converse(answer, script=["3"])


async def test_the_runs_own_engine_may_play_the_user():
    user = ModelUserInteraction({"max_tokens": 20})

    def script(request):
        return it.codec.reply_ids("###DONE###" if "/user/" in request.request_id else "3")

    it = stage(script, user)
    it.context.interactions.attach(EngineChat(it.client, it.codec, max_model_len=1000))
    trajectory = await it.run()
    assert trajectory.finish_reason is FinishReason.USER_DONE
    assert [r.request_id for r in it.backend.requests] == ["t/0", "t/user/0"]
    assert it.backend.requests[1].sampling.max_tokens == 20
    assert trajectory.num_turns == 1, "the user's ids are none of the trajectory's"


async def test_a_conversation_too_long_for_the_engine_names_the_key():
    it = stage(["3"], ModelUserInteraction({}))
    it.context.interactions.attach(EngineChat(it.client, it.codec, max_model_len=10))
    with raises(InteractionError, key="rollout.max_model_len", value=10):
        await it.run()


# --- the registry ---------------------------------------------------------------------------------


def registry(tmp_path, text):
    path = tmp_path / "users.yaml"
    path.write_text(text)
    return InteractionRegistry.from_path(str(path), timeout=3.0)


def test_users_come_from_yaml_also_from_a_file_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from jax_agent_rl.environments.users import BaseInteraction\n"
        "class Mine(BaseInteraction):\n"
        "    async def generate_response(self, instance_id, messages, **kwargs): ...\n"
    )
    users = registry(
        tmp_path,
        "interaction:\n"
        "  - {class_name: jax_agent_rl.environments.users.Gsm8kInteraction,"
        " config: {answer_format: flexible}}\n"
        f"  - {{name: own, class_name: '{tmp_path}/mine.py:Mine', config: {{a: 1}}}}\n",
    )
    assert list(users) == ["gsm8k", "own"]
    assert users["own"].config == {"a": 1}
    assert users.timeout == 3.0
    assert len(InteractionRegistry.from_path(None)) == 0


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[", {"value": "not valid YAML"}),
        ("users: []", {"value": "must hold `interaction:`"}),
        ("interaction: [3]", {"key": "interaction[0]", "fix": "{name"}),
        ("interaction: [{class_name: a.B, konfig: {}}]", {"value": "unknown fields ['konfig']"}),
        ("interaction: [{class_name: B}]", {"value": "package.module.Class"}),
        (
            "interaction: [{class_name: no.such.B}]",
            {"key": "class_name", "value": ("'no.such'", "no such module")},
        ),
        (
            "interaction: [{class_name: jax_agent_rl.types.Turn}]",
            {"fix": "BaseInteraction"},
        ),
        (
            (
                "interaction: [{class_name: jax_agent_rl.environments.users.Gsm8kInteraction,"
                " config: {b: 1}}]"
            ),
            {"value": "config.b:"},
        ),
        (
            (
                "interaction: [{class_name: jax_agent_rl.environments.users.ModelUserInteraction,"
                " config: {t: 1}}]"
            ),
            {"value": "config.t:"},
        ),
        (
            (
                "interaction: [{class_name: jax_agent_rl.environments.users.Gsm8kInteraction},"
                " {name: gsm8k, class_name: jax_agent_rl.environments.users.Gsm8kInteraction}]"
            ),
            {"key": "two interactions", "value": "'gsm8k'"},
        ),
    ],
)
def test_a_wrong_file_says_what_and_where(tmp_path, text, named):
    with raises(ConfigError, **named):
        registry(tmp_path, text)


def test_a_missing_file_is_named():
    with raises(ConfigError, key="interaction_config_path", value="'/no/such'"):
        InteractionRegistry.from_path("/no/such")
