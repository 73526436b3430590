"""Arguments of the chat template: per run, per row, per request; and turns that a request has
begun.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from jax_agent_rl.agents import AgentContext, ToolAgent
from jax_agent_rl.agents.recorder import ChatRecorder
from jax_agent_rl.chat.codec import MAX_VARIANTS, ChatCodec
from jax_agent_rl.chat.template import MAX_KWARGS_CHARS, RESERVED_KWARGS
from jax_agent_rl.config import AgentConfig, build
from jax_agent_rl.config.commands import SftDataConfig
from jax_agent_rl.errors import ConfigError, DataError, TemplateError
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.runtime.scoring import open_scorer
from jax_agent_rl.supervised.conversations import Encoder
from jax_agent_rl.types import SamplingParams
from jax_agent_rl.utils.files import cache_root
from tests.agent_testbed import episode_request
from tests.endpoint_testbed import serving
from tests.fakes import ScriptedBackend
from tests.messages import raises
from tests.trajectories import trajectory

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

SMOLLM2 = cache_root() / "models" / "smollm2-135m-instruct"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n"
    "{% elif enable_thinking is defined %}<think>\n\n"
    "</think>\n\n"
    "{% endif %}{% endif %}"
)
"""Without the argument, a turn begins without a block."""
ASK = [{"role": "user", "content": "q"}]
OPEN = "<think>\n"
CLOSED = "<think>\n\n</think>\n\n"
SAMPLING = SamplingParams(max_tokens=100, seed=0)


@functools.cache
def codec(**kwargs) -> ChatCodec:
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    tokenizer.chat_template = TEMPLATE
    return ChatCodec(tokenizer, template_kwargs=kwargs)


def prompt(chat: ChatCodec) -> str:
    return chat.decode(chat.encode_prompt(ASK), skip_special_tokens=False).rpartition(
        "assistant\n"
    )[2]


def context(text: str, chat: ChatCodec | None = None):
    chat = chat or codec()
    ids = (*chat.encode_text(text), chat.eos_token_ids[0])
    backend = ScriptedBackend(chat, lambda request: ids)
    agent_context = AgentContext(
        client=LLMServerClient([AsyncServer(backend)]),
        codec=chat,
        limits=AgentConfig(),
        max_model_len=2000,
    )
    return agent_context, backend


def sampled_after(backend: ScriptedBackend) -> list[str]:
    texts = [
        codec().decode(request.prompt_ids, skip_special_tokens=False)
        for request in backend.requests
    ]
    return [text.rpartition("assistant\n")[2] for text in texts]


def test_arguments_reach_the_template_and_add_up():
    assert prompt(codec()) == ""
    assert prompt(codec(enable_thinking=True)) == OPEN
    run = codec(enable_thinking=True)
    assert prompt(run.with_template_kwargs({"other": 1})) == OPEN
    assert prompt(run.with_template_kwargs({"enable_thinking": False})) == CLOSED
    assert prompt(run) == OPEN
    assert run.with_template_kwargs({}) is run


@pytest.mark.parametrize("kwargs", [{"enable_thinking": True}, {"enable_thinking": False}, {}])
def test_the_end_of_a_turn_asks_for_the_next_one_in_the_same_way(kwargs):
    chat = codec().with_template_kwargs(kwargs)
    ids = chat.encode_append([*chat.encode_text("so"), chat.eos_token_ids[0]], ASK)
    assert chat.decode(ids, skip_special_tokens=False).endswith("assistant\n" + prompt(chat))


async def test_a_rows_arguments_hold_for_its_trajectory():
    shared, backend = context("a plan</think>so")
    agent = ToolAgent(shared)
    for number, kwargs in enumerate([{"enable_thinking": True}, None]):
        row = {"prompt": ASK, "chat_template_kwargs": kwargs}
        result = await agent.play(episode_request(row, SAMPLING, trajectory_id=str(number)))
        assert (
            result.messages[-1]["content"]
            == ("" if kwargs is None else "<think>") + "a plan</think>so"
        )
    assert sampled_after(backend) == [OPEN, ""]
    with raises(DataError, key="chat_template_kwargs"):
        await agent.play(episode_request({"prompt": ASK, "chat_template_kwargs": 3}, SAMPLING))


async def test_a_requests_arguments_hold_for_that_request():
    shared, backend = context("so")
    async with serving(context=shared) as stage, stage.client("/sessions/s/v1") as client:
        for kwargs in ({"enable_thinking": False}, {"enable_thinking": True}, None):
            extra = {"chat_template_kwargs": kwargs}
            await client.chat.completions.create(model="m", messages=ASK, extra_body=extra)
        with raises(openai.BadRequestError, key="chat_template"):
            await client.chat.completions.create(
                model="m", messages=ASK, extra_body={"chat_template_kwargs": {"chat_template": "x"}}
            )
        await client.responses.create(
            model="m", input="q", extra_body={"chat_template_kwargs": {"enable_thinking": 1}}
        )
        async with anthropic.AsyncAnthropic(
            base_url=f"{stage.server.url}/sessions/s", api_key="any"
        ) as claude:
            extra = {"chat_template_kwargs": {"enable_thinking": False}}
            await claude.messages.create(model="m", max_tokens=9, messages=ASK, extra_body=extra)
    assert sampled_after(backend) == [CLOSED, OPEN, "", OPEN, CLOSED]


async def test_reasoning_is_told_from_text_by_the_requests_own_prompt():
    shared, _ = context("a plan")
    recorder = ChatRecorder(shared, session_id="s")
    opened = await recorder.chat(ASK, sampling=SAMPLING, template_kwargs={"enable_thinking": True})
    closed = await recorder.chat(ASK, sampling=SAMPLING, template_kwargs={"enable_thinking": False})
    assert (opened.reply.reasoning, opened.reply.content) == ("a plan", "")
    assert (closed.reply.reasoning, closed.reply.content) == (None, "a plan")


def test_fine_tuning_reads_a_rows_arguments_too(tmp_path):
    row = {"messages": [*ASK, {"role": "assistant", "content": "so"}]}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({**row, "chat_template_kwargs": {"enable_thinking": False}}))
    encoder = Encoder(codec=codec(), config=SftDataConfig(train=[str(file)]), pack_length=100)
    ((sequence,),) = encoder.examples(encoder.config.train)
    assert CLOSED in codec().decode(list(sequence.token_ids), skip_special_tokens=False)


@pytest.mark.parametrize("name", sorted(RESERVED_KWARGS))
def test_what_the_conversation_decides_cannot_be_set(name):
    with raises(ValueError, key=name):
        codec().with_template_kwargs({name: True})
    with raises(ConfigError, key="agent.chat_template_kwargs"):
        ChatCodec(AutoTokenizer.from_pretrained(SMOLLM2), template_kwargs={name: True})


@pytest.mark.parametrize(
    "kwargs", ["x", {1: 2}, {"x": object()}, {"x": float("nan")}, {"x": "y" * MAX_KWARGS_CHARS}]
)
def test_arguments_are_json_and_short(kwargs):
    with pytest.raises(ValueError):
        codec().with_template_kwargs(kwargs)


def test_no_more_variants_are_kept_than_allowed():
    chat = ChatCodec(AutoTokenizer.from_pretrained(SMOLLM2))
    first = chat.with_template_kwargs({"x": 0})
    assert chat.with_template_kwargs({"x": 0}) is first
    for number in range(1, MAX_VARIANTS + 1):
        chat.with_template_kwargs({"x": number})
    assert chat.with_template_kwargs({"x": 0}) is not first


async def test_a_judge_has_arguments_of_its_own():
    shared, backend = context("[[9]]")
    judge = {"model": "policy", "chat_template_kwargs": {"enable_thinking": False}}
    tree = {
        "run_dir": "r",
        "model": {"path": "m"},
        "data": {"train": "t"},
        "reward": {"judge": judge},
    }
    said = replace(
        trajectory([1], [2]),
        row={"data_source": "model_judge"},
        messages=(*ASK, {"role": "assistant", "content": "an answer"}),
    )
    async with open_scorer(
        build(tree), {"judge"}, client=shared.client, codec=shared.codec
    ) as score:
        assert (await score(said)).reward == 0.9
    assert sampled_after(backend) == [CLOSED]


# --- a turn that a request has begun --------------------------------------------------------------


async def test_anthropics_prefill_is_continued_and_comes_back_as_one_turn():
    shared, backend = context(" answer is 3.")
    prefilled = [*ASK, {"role": "assistant", "content": "The"}]
    async with serving(context=shared) as stage:
        async with anthropic.AsyncAnthropic(
            base_url=f"{stage.server.url}/sessions/s", api_key="any"
        ) as client:
            first = await client.messages.create(model="m", max_tokens=9, messages=prefilled)
            assert first.content[0].text == " answer is 3."
            full_message = {"role": "assistant", "content": "The" + first.content[0].text}
            await client.messages.create(
                model="m", max_tokens=9, messages=[*ASK, full_message, *ASK]
            )
            count = await client.messages.count_tokens(model="m", messages=prefilled)
        first_turn, second_turn = stage.store.known("s", "any").recorder.turns
    assert sampled_after(backend)[0] == "The"
    assert second_turn.parent is first_turn
    assert second_turn.context_ids[: len(first_turn.context_ids)] == first_turn.context_ids
    assert count.input_tokens == len(backend.requests[0].prompt_ids)


async def test_a_chat_request_may_continue_its_last_message():
    shared, backend = context(" answer")
    prefilled = [*ASK, {"role": "assistant", "content": "The"}]
    async with serving(context=shared) as stage, stage.client("/sessions/s/v1") as client:
        extra = {"continue_final_message": True, "add_generation_prompt": False}
        answer = await client.chat.completions.create(
            model="m", messages=prefilled, extra_body=extra
        )
        await client.chat.completions.create(model="m", messages=prefilled)
        with raises(openai.BadRequestError, key="continue_final_message"):
            await client.chat.completions.create(
                model="m",
                messages=prefilled,
                extra_body={"continue_final_message": True, "add_generation_prompt": True},
            )
        with raises(openai.BadRequestError, value="an assistant's"):
            await client.chat.completions.create(
                model="m", messages=ASK, extra_body={"continue_final_message": True}
            )
    assert answer.choices[0].message.content == " answer"
    assert sampled_after(backend) == ["The", ""]


async def test_a_row_may_have_its_last_message_continued():
    shared, backend = context(" answer")
    row = {
        "prompt": [*ASK, {"role": "assistant", "content": "The"}],
        "continue_final_message": True,
    }
    result = await ToolAgent(shared).play(episode_request(row, SAMPLING))
    assert sampled_after(backend) == ["The"]
    assert [message["content"] for message in result.messages] == ["q", "The", " answer"]
    assert sum(result.response_mask) == len(result.response_ids), "what was given is prompt"


async def test_a_prefill_that_opens_a_block_is_read_as_thinking():
    shared, _ = context(" hm</think>so")
    recorder = ChatRecorder(shared, session_id="s")
    prefilled = [*ASK, {"role": "assistant", "content": "<think>Let me see"}]
    turn = await recorder.chat(prefilled, sampling=SAMPLING, continue_last=True)
    assert (turn.reply.reasoning, turn.reply.content.strip()) == (" hm", "so")


async def test_calls_cannot_be_continued():
    shared, _ = context("so")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    prefilled = [*ASK, {"role": "assistant", "content": "", "tool_calls": [call]}]
    with raises(TemplateError, value="an assistant's"):
        await ChatRecorder(shared, session_id="s").chat(
            prefilled, sampling=SAMPLING, continue_last=True
        )
