"""What counts as the same conversation, and text that is never taken back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.agents.context import AgentContext
from jax_agent_rl.agents.conversation import (
    ChatReply,
    Fingerprints,
    TurnStream,
    assistant_message,
    cut_at_stop,
    first_difference,
    plain_messages,
    raw_parts,
)
from jax_agent_rl.agents.recorder import ChatRecorder
from jax_agent_rl.chat.reply import ReplyPart, ToolCall
from jax_agent_rl.config import AgentConfig
from jax_agent_rl.errors import TemplateError
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.types import SamplingParams
from tests.fakes import FakeCodec, ScriptedBackend
from tests.messages import assert_message, raises


def fingerprint(messages, tools) -> str:
    return Fingerprints(messages, tools).first(len(messages))


ARGUMENTS = st.dictionaries(
    st.text(max_size=4), st.integers() | st.text(max_size=6) | st.none(), max_size=3
)


@given(st.text(max_size=12), ARGUMENTS, st.sampled_from([None, 1]), st.booleans(), st.booleans())
def test_a_reply_is_recognized_however_a_framework_writes_it_back(
    content, arguments, indent, ascii_only, as_parts
):
    reply = assistant_message(content, [ToolCall(id="call_1", name="add", arguments=arguments)])
    written = {
        "role": "assistant",
        "content": [{"type": "text", "text": content}] if as_parts else content or None,
        "refusal": None,
        "annotations": [],
        "tool_calls": [
            {
                "id": "renamed",
                "type": "function",
                "function": {
                    "name": "add",
                    "arguments": json.dumps(arguments, indent=indent, ensure_ascii=ascii_only),
                },
            }
        ],
    }
    assert fingerprint(plain_messages([written]), []) == fingerprint([reply], [])


@pytest.mark.parametrize(
    "change",
    [
        {"content": "other"},
        {"role": "user", "tool_calls": None},
        {"tool_calls": None},
        {"tool_calls": [{"id": "1", "function": {"name": "add", "arguments": '{"a": 2}'}}]},
        {"tool_calls": [{"id": "1", "function": {"name": "sub", "arguments": '{"a": 1}'}}]},
    ],
)
def test_a_message_that_says_something_else_is_another(change):
    message = {
        "role": "assistant",
        "content": "text",
        "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    }
    original = plain_messages([message])
    edited = plain_messages([{**message, **change}])
    assert fingerprint(original, []) != fingerprint(edited, [])
    assert fingerprint(original, []) != fingerprint(original, [{"type": "function"}])


SAID = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant"]), "content": st.sampled_from(["", "a", "]["])}
)


@given(st.lists(SAID, max_size=4), st.lists(SAID, max_size=4))
def test_beginnings_are_told_apart_as_conversations_are(first, second):
    fingerprints = Fingerprints(first, [])
    for message in second:
        fingerprints.add(message)
    whole = [*first, *second]
    for count in range(len(whole) + 1):
        assert fingerprints.first(count) == fingerprint(whole[:count], [])
    assert (fingerprint(first, []) == fingerprint(second, [])) == (first == second)
    assert fingerprint([], [{"messages": whole}]) != fingerprint(whole, [])


@pytest.mark.parametrize(
    ("arguments", "same"),
    [
        ({"path": "a", "every": False}, True),
        ({"path": "a", "every": True}, False),
        ({"path": "a", "every": 0}, False),
        ({"path": "b", "every": False}, False),
        ({"path": "a", "other": False}, False),
    ],
)
def test_an_argument_that_is_written_out_as_its_default_changes_nothing(arguments, same):
    schema = {"properties": {"path": {"type": "string"}, "every": {"default": False}}}
    tools = [{"type": "function", "function": {"name": "edit", "parameters": schema}}]

    def calling(arguments):
        call = {"id": "1", "function": {"name": "edit", "arguments": json.dumps(arguments)}}
        return plain_messages([{"role": "assistant", "content": "", "tool_calls": [call]}])

    sampled = calling({"path": "a"})
    completed = calling(arguments)
    assert (fingerprint(sampled, tools) == fingerprint(completed, tools)) is same
    assert fingerprint(sampled, []) != fingerprint(completed, [])


@pytest.mark.parametrize("parameters", [None, [], {"properties": []}, {"properties": {"a": 3}}])
def test_schemas_without_defaults_may_be_anything(parameters):
    tools = [{"type": "function", "function": {"name": "edit", "parameters": parameters}}]
    assert fingerprint([], tools) != fingerprint([], [])


def test_results_are_named_after_their_calls():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    told = plain_messages(
        [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
        ]
    )
    assert told[1]["name"] == "add"


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("hello", {"fix": "an object"}),
        ({"role": "robot", "content": "x"}, {"value": "role 'robot'"}),
        ({"role": "user", "content": 3}, {"key": "content", "fix": "text"}),
        ({"role": "user", "content": [{"type": "image_url"}]}, {"value": "'image_url'"}),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            {},
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
            {"fix": "an object"},
        ),
    ],
)
def test_a_message_that_is_none_is_named_with_its_place(message, named):
    with raises(TemplateError, **named) as caught:
        plain_messages([{"role": "user", "content": "x"}, message])
    assert_message(caught.value, key="messages[1]")


def streamed(read, stop=()):
    """A stream whose ids are characters, and what it sends."""
    heard: list[tuple[str, str | None]] = []
    letters: list[str] = []

    def so_far(ids):
        letters.extend(map(chr, ids))
        return read("".join(letters))

    return TurnStream(
        so_far, stop=stop, on_text=lambda text, reasoning: heard.append((text, reasoning))
    ), heard


def chat_reply(content, reasoning=None):
    parts = [] if reasoning is None else [ReplyPart(kind="reasoning", text=reasoning)]
    return ChatReply(parts=(*parts, *raw_parts(content, ())))


@given(
    st.text(alphabet="ab <>/é\ufffd\n", max_size=40),
    st.lists(st.sampled_from(["ab", "<b>", " a"]), max_size=2),
)
def test_pieces_of_a_stream_add_up_to_the_whole_text(text, stop):
    stream, heard = streamed(lambda so_far: raw_parts(so_far, stop), stop)
    for letter in text:
        stream.on_ids([ord(letter)])
    full_text = cut_at_stop(text, stop)
    assert full_text.startswith("".join(said for said, _ in heard))
    reply = stream.finish(chat_reply(full_text))
    assert "".join(said for said, _ in heard) == reply.content == full_text


def test_text_that_reads_otherwise_in_the_end_is_sent_once():
    stream, heard = streamed(lambda so_far: raw_parts(so_far, ()))
    stream.on_ids(map(ord, "so be it"))
    reply = stream.finish(chat_reply("so is it"))
    assert "".join(said for said, _ in heard) == reply.content == "so be itis it"


def test_of_conversations_that_are_followed_equally_far_the_last_one_is_named():
    asked = {"role": "user", "content": "q"}
    recorded = [[asked, {"role": "assistant", "content": said}] for said in ("first", "second")]
    text = first_difference([asked, {"role": "assistant", "content": "other"}], recorded)
    assert "'second'" in text
    assert "'first'" not in text


async def test_a_request_is_compared_with_the_conversation_that_it_continues():
    codec = FakeCodec()
    says = iter(["one", "two", "three", "four"])
    backend = ScriptedBackend(codec, lambda request: codec.reply_ids(next(says)))
    context = AgentContext(
        client=LLMServerClient([AsyncServer(backend)]),
        codec=codec,
        limits=AgentConfig(),
        max_model_len=1000,
    )
    recorder = ChatRecorder(context, session_id="s")
    sampling = SamplingParams(max_tokens=9, seed=0)

    def said(text):
        return {"role": "assistant", "content": text}

    asked = [{"role": "user", "content": "q"}]
    follow_up = {"role": "user", "content": "more"}
    await recorder.chat(asked, sampling=sampling)
    await recorder.chat([*asked, said("one"), follow_up], sampling=sampling)
    await recorder.chat([{"role": "user", "content": "another"}], sampling=sampling)
    edited = await recorder.chat(
        [*asked, said("one"), follow_up, said("2"), follow_up], sampling=sampling
    )
    assert edited.parent is recorder.turns[0]
    assert "has '2' where the recorded one (assistant) has 'two'" in edited.note
