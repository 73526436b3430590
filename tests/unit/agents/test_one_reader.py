"""Whoever reads a sampled turn reads the same: agents, the endpoint and its streams, LangGraph,
judges, users, rewards.

The engine is scripted; the tokenizer and the chat template are those of SmolLM2, the calls are
written as Hermes does.
"""

from __future__ import annotations

import asyncio
import functools
import json
import operator
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import examples

pytest.importorskip("langgraph")

from langchain_core.messages import HumanMessage

from jax_agent_rl.agents import (
    AgentContext,
    EnvironmentAgent,
    InteractionAgent,
    ReactAgentLoop,
    ToolAgent,
)
from jax_agent_rl.agents.conversation import TurnStream, read_reply
from jax_agent_rl.agents.endpoint.answers import ApiCall
from jax_agent_rl.agents.endpoint.messages import MessagesAnswer
from jax_agent_rl.agents.endpoint.sessions import Piece
from jax_agent_rl.agents.langgraph import ChatModel
from jax_agent_rl.agents.recorder import ChatRecorder
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.chat.formats import FORMATS, get_format
from jax_agent_rl.chat.formats.base import Scanner
from jax_agent_rl.config import AgentConfig
from jax_agent_rl.environments import (
    Environment,
    EnvironmentPools,
    Observation,
    register_environment,
)
from jax_agent_rl.environments.users import BaseInteraction, InteractionRegistry
from jax_agent_rl.environments.users.builtin import EngineChat, ModelUserInteraction
from jax_agent_rl.errors import InteractionError, RewardError
from jax_agent_rl.rewards import ModelJudge, solution_text
from jax_agent_rl.rewards.code import extract_program
from jax_agent_rl.rewards.rules import (
    boxed,
    gsm8k,
    has_format,
    last_number,
    marked_number,
    qa_f1,
    tagged,
)
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.tools import ToolRegistry, function_tool
from jax_agent_rl.types import SamplingParams, StopReason
from jax_agent_rl.utils.files import cache_root
from tests.agent_testbed import episode_request
from tests.fakes import ScriptedBackend
from tests.messages import raises
from tests.unit.chat.test_formats import THINK, WRITERS
from tests.unit.chat.test_template_families import codec_of

SAMPLING = SamplingParams(max_tokens=1000, seed=0)
ASK = [{"role": "user", "content": "q"}]
SEEN: list = []
"""What the environment and the user of these tests were told."""


@function_tool(name="set")
def set_it(on: bool, n: int = 0) -> str:
    """Set something."""
    return f"{on} {n}"


@register_environment("listener")
class Listener(Environment):
    """Keeps what it was told."""

    async def reset(self) -> Observation:
        return Observation.say("go")

    async def step(self, reply) -> Observation:
        SEEN.append(reply)
        return Observation(done=True)


class Hearer(BaseInteraction):
    """Keeps what it was told."""

    async def generate_response(self, instance_id, messages, **kwargs):
        SEEN.append([dict(message) for message in messages])
        return True, "", 0.0, {}


@functools.cache
def codec() -> ChatCodec:
    return ChatCodec.from_pretrained(
        cache_root() / "models" / "smollm2-135m-instruct", tool_format="hermes"
    )


def ids_of(text: str) -> tuple[int, ...]:
    return (*codec().encode_text(text), codec().eos_token_ids[0])


def context(text: str, **fields) -> AgentContext:
    """An engine that says this in every turn."""
    backend = ScriptedBackend(codec(), lambda request: ids_of(text))
    return AgentContext(
        client=LLMServerClient([AsyncServer(backend)]),
        codec=codec(),
        limits=AgentConfig(max_assistant_turns=1, max_parallel_calls=4, default_agent="tool_agent"),
        max_model_len=4000,
        **fields,
    )


def output_of(text: str, stop_reason=StopReason.EOS):
    return SimpleNamespace(
        token_ids=ids_of(text), stop_reason=stop_reason, stop_match=None, context_digest="d"
    )


PIECES = {
    "text": "said {} ",
    "call": '<tool_call>\n{{"name": "set", "arguments": {{"on": "false", "n": {}}}}}\n</tool_call>',
    "broken": "<tool_call>bad {}</tool_call>",
}
plans = st.lists(st.sampled_from(sorted(PIECES)), max_size=4)
thoughts = st.sampled_from(
    [None, "plan", 'I could <tool_call>{"name": "set", "arguments": {}}</tool_call>']
)


def written(plan: list[str], thought: str | None) -> str:
    body = "".join(PIECES[kind].format(number) for number, kind in enumerate(plan))
    return body if thought is None else f"<think>{thought}</think>{body}"


def said(plan: list[str], *kinds: str) -> str:
    text = ""
    for number, kind in enumerate(plan):
        if kind in kinds:
            text += PIECES[kind].format(number)
    return text.strip()


def called(plan: list[str]) -> list[int]:
    return [number for number, kind in enumerate(plan) if kind == "call"]


every_turn = given(plan=plans, thought=thoughts)
few_examples = settings(max_examples=examples(15), suppress_health_check=[HealthCheck.too_slow])


@few_examples
@every_turn
async def test_the_endpoint_and_its_streams_give_text_once_and_without_thoughts(plan, thought):
    text = written(plan, thought)
    for tools in ((), (set_it.schema,)):
        heard: list[str] = []
        recorder = ChatRecorder(context(text), session_id="s")
        listen = None if tools else lambda new, reasoning, heard=heard: heard.append(new)
        turn = await recorder.chat(ASK, tools=tools, sampling=SAMPLING, on_text=listen)
        visible_kinds = ("text", "broken") if tools else ("text", "call", "broken")
        assert turn.reply.content == said(plan, *visible_kinds)
        assert turn.reply.reasoning == thought
        if not tools:
            assert "".join(heard) == turn.reply.content
        assert [call.arguments["n"] for call in turn.reply.tool_calls] == (
            called(plan) if tools else []
        )
        assert all(call.arguments["on"] is False for call in turn.reply.tool_calls), (
            "typed by the tool's schema"
        )


STREAMED = ("qwen3", "llama3.1", "deepseek", "gpt-oss", "glm4", "lfm2", "gemma4", "nemotron3")
"""Families whose turns differ: in the tags of thinking, whether the prompt opens a block, and how
calls are written."""


def pieces_of(codec) -> list[str]:
    if codec.tool_format == "harmony":
        return [
            "<|channel|>analysis<|message|>plan<|end|>",
            "<|start|>assistant<|channel|>final<|message|>said ",
            "<|start|>assistant<|channel|>commentary<|message|>so\n<|end|>",
            "plain",
            WRITERS["harmony"]("f", {"x": "1"}),
        ]
    begin, end = THINK.get(codec.tool_format, ("<think>", "</think>"))
    special = codec.decode([codec.eos_token_ids[0]], skip_special_tokens=False)
    return [
        f"{begin}plan{end}",
        begin,
        end,
        "said ",
        "\n",
        "STOP",
        "<x",
        "€",
        special,
        WRITERS[codec.tool_format]("f", {}),
    ]


@pytest.mark.parametrize("family", STREAMED)
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_stream_says_what_the_whole_reply_says_in_the_same_order(family, data):
    codec = codec_of(family)
    asked = codec.encode_prompt(ASK)
    text = "".join(data.draw(st.lists(st.sampled_from(pieces_of(codec)), max_size=6)))
    stop = data.draw(st.sampled_from([(), ("STOP",)]))
    output = SimpleNamespace(
        token_ids=[*codec.encode_markup(text), codec.eos_token_ids[0]],
        stop_reason=StopReason.EOS,
        stop_match=None,
        context_digest="d",
    )
    full_reply = read_reply(codec, output, tools=(), stop=stop, context_ids=asked)
    heard: list[tuple[str, str | None]] = []
    stream = TurnStream.of_chat(
        codec, asked, stop=stop, on_text=lambda new, reasoning: heard.append((new, reasoning))
    )
    for token in output.token_ids:
        stream.on_ids([token])
    sent = stream.finish(full_reply)
    assert (sent.content, sent.reasoning) == (full_reply.content, full_reply.reasoning)
    assert "".join(new for new, _ in heard) == full_reply.content
    thoughts = [reasoning for _, reasoning in heard if reasoning is not None]
    assert ("".join(thoughts) if thoughts else None) == full_reply.reasoning


@pytest.mark.parametrize("name", sorted(FORMATS))
@settings(max_examples=examples(30))
@given(data=st.data())
def test_a_turn_that_grows_reads_at_its_end_as_it_does_at_once(name, data):
    form = get_format(name)
    begin, end = THINK.get(name, ("<think>", "</think>"))
    pieces = [
        begin,
        end,
        "said ",
        "x" * 70,
        " " * 70,
        "{",
        "[",
        WRITERS[name]("f", {"x": "1"}),
        *filter(None, [form.call_end]),
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=6)))
    thinking = data.draw(st.sampled_from([True, False]))
    if form.scanner is None:
        return
    scan = form.scanner.start(thinking=thinking)
    for length in range(0, len(text) + 1, 7):
        assert scan.read_so_far(text[:length]) == Scanner.parse(
            form.scanner, text[:length], thinking=thinking
        )
    assert scan.read_to_end(text) == form.scanner.parse(text, thinking=thinking)


def test_special_tokens_are_no_text_with_or_without_a_call_beside_them():
    codec = codec_of("qwen3")
    asked = codec.encode_prompt(ASK)
    call = WRITERS["hermes"]("f", {})
    for text in ("a<|im_start|>b", f"a<|im_start|>b{call}"):
        reply = codec.parse_reply(codec.encode_markup(text), context_ids=asked)
        assert reply.content == "ab"
    spelled = codec.parse_reply(codec.encode_text("a<|im_start|>b"), context_ids=asked)
    assert spelled.content == "a<|im_start|>b", "text that only looks like a special token is text"


def test_a_closing_tag_is_text_where_the_prompt_opened_no_block():
    codec = codec_of("qwen3")
    asked = codec.encode_prompt(ASK)
    reply = codec.parse_reply(codec.encode_markup("Write </think> to stop."), context_ids=asked)
    assert (reply.content, reply.reasoning) == ("Write </think> to stop.", None)


def test_a_message_that_the_prompt_began_keeps_its_text_before_a_call():
    codec = codec_of("gpt-oss")
    asked = codec.encode_prompt(
        [*ASK, {"role": "assistant", "content": "Let me"}], continue_last=True
    )
    ids = codec.encode_markup(" look.<|end|>" + WRITERS["harmony"]("f", {"x": "1"}))
    reply = codec.parse_reply(ids, context_ids=asked)
    assert reply.content == "look."
    assert [call.name for call in reply.tool_calls] == ["f"]


def test_blocks_of_a_stream_do_not_overlap_where_thinking_follows_text():
    body = {
        "model": "m",
        "max_tokens": 9,
        "messages": ASK,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    answer = MessagesAnswer(ApiCall(body=body))
    said = [
        Piece(index=0, text="a"),
        Piece(index=0, text="", reasoning="hm"),
        Piece(index=0, text="b"),
    ]
    events = [event for piece in said for event in answer.chunks(codec(), piece)]
    open_block = None
    kinds = []
    for event in events:
        if event["type"] == "content_block_start":
            assert open_block is None
            assert event["index"] == len(kinds)
            open_block = event["index"]
            kinds.append(event["content_block"]["type"])
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_block
        elif event["type"] == "content_block_stop":
            open_block = None
    assert kinds == ["text", "thinking", "text"]


@few_examples
@every_turn
async def test_langgraph_gives_what_the_endpoint_gives(plan, thought):
    text = written(plan, thought)
    for tools in ((), (set_it.schema,)):
        recorders = [ChatRecorder(context(text), session_id=name) for name in ("whole", "streamed")]
        models = [ChatModel(recorder=recorder, sampling=SAMPLING) for recorder in recorders]
        full_message = await models[0].ainvoke([HumanMessage("q")], tools=tools)
        chunks = [chunk async for chunk in models[1].astream([HumanMessage("q")], tools=tools)]
        reply = recorders[0].turns[0].reply
        assert (
            full_message.content == "".join(str(chunk.content) for chunk in chunks) == reply.content
        )
        assert [call["args"] for call in full_message.tool_calls] == [
            dict(call.arguments) for call in reply.tool_calls
        ]
        assert full_message.additional_kwargs.get("reasoning_content") == thought
        broken = []
        if tools:
            numbers = [number for number, kind in enumerate(plan) if kind == "broken"]
            broken = [PIECES["broken"].format(number) for number in numbers]
        added = functools.reduce(operator.add, chunks)
        for message in (full_message, added):
            assert [call["args"] for call in message.invalid_tool_calls] == broken
            assert [call["args"] for call in message.tool_calls] == [
                dict(call.arguments) for call in reply.tool_calls
            ]
        assert all(call["error"] for call in full_message.invalid_tool_calls)


@pytest.mark.parametrize("text", ['{"name": "set", "parameters": 3}', '{"name": "set", "param'])
async def test_a_malformed_call_that_is_json_does_not_become_a_call_of_langchain(text):
    codec = ChatCodec.from_pretrained(
        cache_root() / "models" / "smollm2-135m-instruct", tool_format="llama3_json"
    )
    chat = context("")
    backend = ScriptedBackend(
        codec, lambda request: (*codec.encode_text(text), codec.eos_token_ids[0])
    )
    chat = replace(chat, codec=codec, client=LLMServerClient([AsyncServer(backend)]))
    models = [
        ChatModel(recorder=ChatRecorder(chat, session_id=name), sampling=SAMPLING) for name in "ab"
    ]
    full_message = await models[0].ainvoke([HumanMessage("q")], tools=(set_it.schema,))
    chunks = [
        chunk async for chunk in models[1].astream([HumanMessage("q")], tools=(set_it.schema,))
    ]
    for message in (
        full_message,
        functools.reduce(operator.add, chunks),
    ):
        assert message.content == text
        assert message.tool_calls == []
        assert [json.loads(call["args"]) for call in message.invalid_tool_calls] == [text]


@few_examples
@every_turn
async def test_an_agent_answers_calls_in_the_order_in_which_they_were_written(plan, thought):
    limits = AgentConfig(max_assistant_turns=2, max_parallel_calls=4)
    wanted = [
        f"False {n}" if kind == "call" else "Error" for n, kind in enumerate(plan) if kind != "text"
    ]
    for loop in (ToolAgent, ReactAgentLoop):
        shared = context(written(plan, thought), tools=ToolRegistry([set_it]))
        agent = loop(replace(shared, limits=limits))
        trajectory = await agent.play(episode_request({"prompt": ASK}, SAMPLING))
        first = trajectory.turns[0]
        assert [
            call.observation[: len(want)]
            for call, want in zip(first.tool_calls, wanted, strict=True)
        ] == wanted
        results = [
            message["content"] for message in trajectory.messages if message["role"] == "tool"
        ]
        assert [result[: len(want)] for result, want in zip(results, wanted, strict=True)] == wanted
        assert trajectory.num_turns == (2 if wanted else 1)
        assert [call.error for call in first.tool_calls].count("malformed") == plan.count("broken")


@few_examples
@every_turn
async def test_environments_and_users_hear_no_thoughts(plan, thought):
    text = written(plan, thought)
    SEEN.clear()
    row = {"prompt": ASK, "extra_info": {"environment_kwargs": {"name": "listener"}}}
    pools = EnvironmentPools()
    await EnvironmentAgent(context(text, environments=pools)).play(episode_request(row, SAMPLING))
    assert SEEN[0].content == said(plan, "text")
    assert SEEN[0].reasoning == thought
    if "call" not in plan and "broken" not in plan:
        users = InteractionRegistry({"hearer": Hearer({})})
        await InteractionAgent(context(text, interactions=users)).play(
            episode_request({"prompt": ASK}, SAMPLING)
        )
        assert SEEN[1][-1] == {"role": "assistant", "content": said(plan, "text")}


@few_examples
@every_turn
async def test_the_text_of_a_turn_is_what_was_sampled(plan, thought):
    text = written(plan, thought)
    shared = context(text, tools=ToolRegistry([set_it]))
    trajectory = await ToolAgent(shared).play(episode_request({"prompt": ASK}, SAMPLING))
    assert solution_text(trajectory) == text


# --- judges and simulated users -------------------------------------------------------------------


class Engine:
    """Says one thing, and keeps what it was asked."""

    def __init__(self, text: str, stop_reason=StopReason.EOS):
        self._output = output_of(text, stop_reason)
        self.prompts: list[str] = []

    async def generate(self, request_id, *, prompt_ids, sampling_params, **_):
        self.prompts.append(codec().decode(prompt_ids, skip_special_tokens=False))
        return self._output


async def grade(text, answer="4", **engine):
    judge = ModelJudge(Engine(text, **engine), codec(), sampling=SAMPLING)
    return await judge.grade(question="q", answer=answer)


async def test_a_judge_grades_with_what_it_says_and_not_with_what_it_thinks():
    assert await grade("<think>It says [[10]], hm.</think>Weak. [[3]]") == 0.3
    with pytest.raises(RewardError):
        await grade("<think>It says [[10]], hm.</think>I cannot tell.")


@pytest.mark.parametrize("text", ["<think>It claims [[10]], but", "It claims [[10]], but"])
async def test_a_judge_that_is_cut_gives_no_grade(text):
    with raises(RewardError, key="reward.judge.max_tokens"):
        await grade(text, stop_reason=StopReason.LENGTH)


async def test_a_judge_does_not_read_what_the_policy_only_thought():
    engine = Engine("[[5]]")
    judge = ModelJudge(engine, codec(), sampling=SAMPLING)
    await judge.grade(question="q", answer="<think>SECRET</think>four")
    assert "four" in engine.prompts[0]
    assert "SECRET" not in engine.prompts[0]


async def ask_user(text, **engine):
    user = ModelUserInteraction({})
    user.attach(EngineChat(Engine(text, **engine), codec(), max_model_len=4000))
    talk = [
        {"role": "user", "content": "Book a flight"},
        {"role": "assistant", "content": "Where to?"},
    ]
    return await user.generate_response("i", talk, goal="Rome")


async def test_the_thoughts_of_a_simulated_user_end_nothing_and_are_not_said():
    reply = await ask_user(
        "<think>I write ###DONE### once I have a ticket. Not yet.</think>To Rome, please."
    )
    assert (reply.terminate, reply.text, reply.score) == (False, "To Rome, please.", 0.0)
    reply = await ask_user("<think>Now.</think>###DONE###")
    assert (reply.terminate, reply.score) == (True, 1.0)


async def test_a_simulated_user_that_only_thinks_is_named():
    with raises(InteractionError, key="max_tokens"):
        await ask_user("<think>hm ###DONE###", stop_reason=StopReason.LENGTH)


# --- rewards --------------------------------------------------------------------------------------

EXTRACT = {
    "tagged": (tagged, "<answer>18</answer>"),
    "boxed": (boxed, r"\boxed{18}"),
    "last_number": (last_number, "18"),
    "marked_number": (marked_number, "#### 18"),
    "extract_program": (extract_program, "```python\n18\n```\n"),
}


@pytest.mark.parametrize("name", EXTRACT)
def test_an_answer_that_was_only_thought_of_is_none(name):
    extract, answer = EXTRACT[name]
    assert extract(answer) is not None
    for text in (
        f"<think>maybe {answer}</think>I cannot tell.",
        f"<think>{answer}",
        f"maybe {answer}</think>no idea",
    ):
        assert extract(text) is None, text
    assert str(extract(f"<think>maybe not</think>{answer}")).strip() == "18"


def test_an_answer_that_was_only_thought_of_is_not_paid():
    thought = "<think>maybe #### 18 <answer>18</answer></think>I cannot tell."
    assert gsm8k("gsm8k", thought, "18", {}) == 0.0
    assert gsm8k("gsm8k", "<think>x</think>#### 18", "18", {}) == 1.0
    assert qa_f1("nq", thought, "18")["score"] == 0.0


def test_a_block_that_the_prompt_opened_passes_the_format():
    assert has_format("2+2</think> <answer>4</answer>")
    assert not has_format("2+2 <answer>4</answer>")
    assert not has_format("<answer>4</answer>")


def test_calls_are_json_that_a_client_can_read():
    reply = read_reply(codec(), output_of(written(["call"], None)), tools=[set_it.schema], stop=())
    json.dumps([dict(call.arguments) for call in reply.tool_calls], allow_nan=False)
    broken = '<tool_call>{"name": "set", "arguments": {"n": 1e999}}</tool_call>'
    assert (
        len(read_reply(codec(), output_of(broken), tools=[set_it.schema], stop=()).malformed) == 1
    )


# --- the order of results -------------------------------------------------------------------------


class FirstEndsLast:
    """Calls of one turn, of which a later one ends first."""

    def __init__(self) -> None:
        self.second_ended = asyncio.Event()

    @property
    def tool(self):
        @function_tool
        async def step(n: int) -> str:
            """Take a step."""
            if n == 1:
                await self.second_ended.wait()
            else:
                self.second_ended.set()
            return f"step {n}"

        return step


TWO_CALLS = "".join(
    f'<tool_call>{{"name": "step", "arguments": {{"n": {n}}}}}</tool_call>' for n in (1, 2)
)
ONE_BROKEN = TWO_CALLS.replace(
    "</tool_call><tool_call>", "</tool_call><tool_call>broken</tool_call><tool_call>"
)


@pytest.mark.parametrize("loop", [ToolAgent, ReactAgentLoop])
async def test_results_come_back_in_the_order_of_the_calls(loop):
    says = iter([TWO_CALLS, "done"])
    backend = ScriptedBackend(codec(), lambda request: ids_of(next(says)))
    shared = AgentContext(
        client=LLMServerClient([AsyncServer(backend)]),
        codec=codec(),
        limits=AgentConfig(max_parallel_calls=4, max_response_length=1000),
        max_model_len=4000,
        tools=ToolRegistry([FirstEndsLast().tool]),
    )
    trajectory = await loop(shared).play(episode_request({"prompt": ASK}, SAMPLING))
    assert [call.observation for call in trajectory.turns[0].tool_calls] == ["step 1", "step 2"]
    results = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    assert results == ["step 1", "step 2"]


@pytest.mark.parametrize("loop", [ToolAgent, ReactAgentLoop])
async def test_a_broken_call_between_two_is_answered_between_them(loop):
    shared = context(ONE_BROKEN, tools=ToolRegistry([FirstEndsLast().tool]))
    limits = AgentConfig(max_assistant_turns=2, max_parallel_calls=4, max_response_length=1000)
    agent = loop(replace(shared, limits=limits))
    trajectory = await agent.play(episode_request({"prompt": ASK}, SAMPLING))
    calls = trajectory.turns[0].tool_calls
    assert [call.error for call in calls] == [None, "malformed", None]
    assert [call.observation for call in (calls[0], calls[2])] == ["step 1", "step 2"]
