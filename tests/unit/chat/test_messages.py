"""Messages in one form: however somebody writes a conversation, the policy reads the same ids."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_agent_rl.agents.conversation import plain_messages
from jax_agent_rl.agents.endpoint.answers import ApiCall
from jax_agent_rl.agents.endpoint.messages import MessagesRequest
from jax_agent_rl.agents.endpoint.responses import ResponsesAnswer
from jax_agent_rl.agents.prompt import encode_prompt
from jax_agent_rl.chat.messages import (
    REASONING_FIELDS,
    alternating,
    normalize_messages,
    openai_message,
)
from jax_agent_rl.errors import TemplateError
from tests.examples import examples
from tests.messages import assert_message, raises
from tests.unit.chat.test_template_families import FAMILIES, codec_of

CALL_ID = "abcdefghi"  # what Mistral's templates accept
SHOW_REASONING = ("qwen3", "qwen3.5", "glm4", "nemotron3", "gpt-oss", "gemma4")
"""Families whose template shows the reasoning of a turn that called a tool, until the next
question."""


def conversation(arguments, *, said="", thought="look it up", result="3"):
    call = {"id": CALL_ID, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": said, "reasoning_content": thought, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": CALL_ID, "content": result},
    ]


def text(codec, messages):
    return codec.decode(codec.encode_prompt(messages), skip_special_tokens=False)


# --- ways to write the same conversation ----------------------------------------------------------


def as_openai(messages):
    return [openai_message(message) for message in messages]


def with_nulls(messages):
    """Dump like an OpenAI client's model: every field that it knows, null if it is not set."""
    fields = (
        "content",
        "refusal",
        "audio",
        "function_call",
        "name",
        "tool_calls",
        "tool_call_id",
        "reasoning",
    )
    return [
        {**dict.fromkeys(fields), **message, "content": message["content"] or None}
        for message in messages
    ]


def with_parts(messages):
    changed = []
    for message in messages:
        parts = [{"type": "text", "text": part} for part in message["content"]]
        changed.append({**message, "content": parts})
    return changed


def flat_calls(messages):
    """Write calls as some data sets do: without the object around name and arguments."""
    flat = []
    for message in messages:
        if message.get("tool_calls"):
            calls = [{"id": call["id"], **call["function"]} for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls}
        flat.append(message)
    return flat


def under_another_name(field):
    def write(messages):
        renamed = []
        for message in messages:
            message = dict(message)
            thought = message.pop("reasoning_content", None)
            renamed.append(message if thought is None else {**message, field: thought})
        return renamed

    return write


def as_thinking_part(messages):
    """Write thinking as Anthropic's blocks inside a chat message."""
    parts = []
    for message in messages:
        message = dict(message)
        thought = message.pop("reasoning_content", None)
        if thought is not None:
            said = [{"type": "text", "text": message["content"]}] if message["content"] else []
            message["content"] = [
                {"type": "thinking", "thinking": thought, "signature": "s"},
                *said,
            ]
        parts.append(message)
    return parts


def through_messages_api(messages):
    """Send messages as Anthropic's client does; the endpoint translates them."""
    sent = []
    for message in messages:
        if message["role"] == "assistant":
            blocks = [
                {"type": "thinking", "thinking": message["reasoning_content"], "signature": ""}
            ]
            if message["content"]:
                blocks.append({"type": "text", "text": message["content"]})
            for call in message["tool_calls"]:
                function = call["function"]
                use = {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": function["name"],
                    "input": function["arguments"],
                }
                blocks.append(use)
            sent.append({"role": "assistant", "content": blocks})
        elif message["role"] == "tool":
            result = {
                "type": "tool_result",
                "tool_use_id": message["tool_call_id"],
                "content": message["content"],
            }
            sent.append({"role": "user", "content": [result]})
        else:
            sent.append(message)
    request = MessagesRequest.model_validate({"model": "m", "max_tokens": 5, "messages": sent})
    return request.chat_fields()["messages"]


def through_responses_api(messages):
    """Send input items as OpenAI's client does; the endpoint translates them."""
    items = []
    for message in messages:
        if message["role"] == "assistant":
            thought = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
            items.append({"type": "reasoning", "id": "r", "summary": [], "content": thought})
            if message["content"]:
                items.append(
                    {"type": "message", "role": "assistant", "content": message["content"]}
                )
            for call in message["tool_calls"]:
                arguments = json.dumps(call["function"]["arguments"])
                request_item = {
                    "type": "function_call",
                    "call_id": call["id"],
                    "name": call["function"]["name"],
                }
                items.append({**request_item, "arguments": arguments})
        elif message["role"] == "tool":
            output = {"type": "function_call_output", "call_id": message["tool_call_id"]}
            items.append({**output, "output": message["content"]})
        else:
            items.append({"type": "message", **message})
    return ResponsesAnswer(ApiCall(body={"model": "m", "input": items})).model_request.messages


WAYS = {
    "openai": as_openai,
    "with nulls": with_nulls,
    "parts": with_parts,
    "flat calls": flat_calls,
    "thinking part": as_thinking_part,
    "messages api": through_messages_api,
    "responses api": through_responses_api,
    **{field: under_another_name(field) for field in REASONING_FIELDS},
}

words = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "Zs")), max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | words,
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    ),
    max_leaves=4,
)
arguments = st.dictionaries(st.sampled_from(["x", "y"]), values, max_size=2)


@settings(max_examples=examples(40))
@given(arguments=arguments, said=words, result=words.filter(bool), data=st.data())
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_write_a_conversation_is_the_same_to_the_policy(
    way, arguments, said, result, data
):
    messages = conversation(arguments, said=said.strip(), result=result.strip() or "r")
    written = WAYS[way](messages)
    assert normalize_messages(written) == normalize_messages(messages)
    assert plain_messages(written) == normalize_messages(messages), (
        "the endpoint reads it as a dataset's row is read"
    )
    codec = codec_of(data.draw(st.sampled_from(["qwen3", "smollm2", "deepseek", "gemma4"])))
    assert (
        codec.encode_prompt(written)
        == codec.encode_prompt(messages)
        == list(encode_prompt(codec, messages, ())[0])
    )


@given(arguments=arguments, said=words)
def test_normal_messages_come_back_unchanged(arguments, said):
    normal = normalize_messages(conversation(arguments, said=said))
    assert normalize_messages(normal) == normal


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", [{"city": "Rome", "days": 3}, '{"city": "Rome", "days": 3}'])
@pytest.mark.parametrize("name", FAMILIES)
def test_arguments_of_a_history_are_written_once_whatever_form_they_come_in(name, written):
    codec = codec_of(name)
    rendered = text(codec, conversation(written, thought=None))
    assert "Rome" in rendered and '\\"' not in rendered, "JSON text inside of JSON"
    assert "'city'" not in rendered, "Python's notation of an object"


def test_a_template_that_concatenates_arguments_gets_them_as_text():
    rendered = text(codec_of("deepseek"), conversation({"x": 1}))
    assert '```json\n{"x": 1}\n```' in rendered


@pytest.mark.parametrize("nothing", [None, "", "{}", {}, " "])
def test_nothing_is_no_arguments(nothing):
    messages = conversation(nothing)
    assert normalize_messages(messages)[1]["tool_calls"][0]["function"]["arguments"] == {}
    del messages[1]["tool_calls"][0]["function"]["arguments"]
    assert normalize_messages(messages)[1]["tool_calls"][0]["function"]["arguments"] == {}


def test_the_older_form_of_a_call_and_its_result_is_read():
    messages = [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "f", "arguments": '{"x": 1}'},
        },
        {"role": "function", "name": "f", "content": "3"},
    ]
    _, call, result = normalize_messages(messages)
    assert call["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert result == {"role": "tool", "name": "f", "content": "3"}


# --- reasoning ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHOW_REASONING)
def test_reasoning_of_a_history_is_shown_where_the_template_shows_it(name):
    assert text(codec_of(name), conversation({"x": 1})).count("look it up") == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_reasoning_and_text_beside_a_call_are_never_refused(name):
    rendered = text(codec_of(name), conversation({"x": 1}, said="one moment"))
    assert rendered.count("look it up") <= 1
    assert "question" in rendered


def test_where_a_template_refuses_both_nothing_is_lost():
    rendered = text(codec_of("gpt-oss"), conversation({"x": 1}, said="one moment"))
    assert "look it up" in rendered
    assert "one moment" in rendered


# --- what is no message ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("text", {"value": "str", "fix": "an object"}),
        ({"content": "x"}, {"key": "'role'", "value": "missing"}),
        ({"role": 3, "content": "x"}, {"key": "role"}),
        (
            {"role": "user", "content": 3},
            {"key": "content", "value": "int", "fix": "text or a list of parts"},
        ),
        ({"role": "user", "content": [{"type": "audio"}]}, {"value": "'audio'"}),
        ({"role": "user", "content": "one \ud83d two"}, {"value": "lone surrogate"}),
        ({"role": "user", "content": "x", "name": "a\udc00"}, {"value": "lone surrogate"}),
        (
            {"role": "assistant", "content": "", "tool_calls": [3]},
            {"key": "tool call", "value": 3, "fix": "an object"},
        ),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"function": {}}]},
            {"key": "tool call", "fix": "name"},
        ),
        (conversation("[1]")[1], {"value": "list", "fix": "an object"}),
        (conversation('{"x": 1e999}')[1], {"fix": "an object"}),
        (conversation({"x": float("inf")})[1], {"fix": "finite number"}),
    ],
)
def test_what_is_no_message_is_named_with_its_place(message, named):
    messages = [{"role": "user", "content": "q"}, message]
    for read in (normalize_messages, plain_messages, codec_of("smollm2").encode_prompt):
        with raises(TemplateError, **named) as caught:
            read(messages)
        assert_message(caught.value, key="messages[1]")


# --- strict templates -----------------------------------------------------------------------------

turns = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant"]), words.filter(str.strip)), min_size=1
)


@given(turns)
def test_alternating_roles_alternate_and_keep_every_word_in_order(turns):
    messages = [{"role": role, "content": said} for role, said in turns]
    strict = alternating(messages, opening="OPENING")
    roles = [message["role"] for message in strict if message["role"] != "system"]
    assert all(role == ("user", "assistant")[number % 2] for number, role in enumerate(roles))
    assert [number for number, message in enumerate(strict) if message["role"] == "system"] in (
        [],
        [0],
    )
    for role in ("system", "user", "assistant"):
        content = "\n\n".join(
            m["content"] for m in strict if m["role"] == role and m["content"] != "OPENING"
        )
        assert (
            content == "\n\n".join(said for author, said in turns if author == role)
            or "OPENING" in content
        )


# --- a turn that is begun -------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"gpt-oss"}))
def test_a_begun_turn_is_open_where_its_text_ends(name):
    codec = codec_of(name)
    asked = [{"role": "user", "content": "question"}]
    prompt_ids = codec.encode_prompt(
        [*asked, {"role": "assistant", "content": "The answer is "}], continue_last=True
    )
    rendered = codec.decode(prompt_ids, skip_special_tokens=False)
    assert rendered.endswith("The answer is"), "neither an end of turn nor white space follows"
    plain = codec.encode_prompt(asked)
    assert prompt_ids[: len(plain)] == plain or codec.thinking_after(plain), (
        "a block that the prompt opens is closed first"
    )
    assert codec.thinking_after(prompt_ids) == ""


def test_a_rows_last_message_is_continued_where_it_asks_for_that():
    codec = codec_of("qwen2.5")
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Well,"}]
    ids, _ = encode_prompt(codec, messages, (), continue_last=True)
    assert codec.decode(ids, skip_special_tokens=False).endswith("<|im_start|>assistant\nWell,")


def test_a_turn_with_calls_cannot_be_begun():
    with pytest.raises(TemplateError):
        codec_of("qwen2.5").encode_prompt(conversation({})[:2], continue_last=True)


@pytest.mark.parametrize(
    "message",
    [
        {"content": [{"type": "refusal", "refusal": "I cannot."}]},
        {"content": None, "refusal": "I cannot."},
        {"content": "I cannot.", "refusal": None},
    ],
)
def test_what_an_assistant_declined_is_its_text(message):
    (normal,) = normalize_messages([{"role": "assistant", **message}])
    assert normal == {"role": "assistant", "content": "I cannot."}


def test_an_empty_name_of_reasoning_hides_no_other():
    parts = [{"type": "thinking", "thinking": "plan"}, {"type": "text", "text": "so"}]
    for message in ({"reasoning": "plan", "content": "so"}, {"content": parts}):
        (normal,) = normalize_messages([{"role": "assistant", "reasoning_content": "", **message}])
        assert normal["reasoning_content"] == "plan"


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "nemotron3", "deepseek", "qwen2.5"])
def test_a_begun_turn_may_hold_its_reasoning_in_its_text(name):
    codec = codec_of(name)
    prefilled = {"role": "assistant", "content": "<think>plan</think>The answer is"}
    ids = codec.encode_prompt([{"role": "user", "content": "q"}, prefilled], continue_last=True)
    text = codec.decode(ids, skip_special_tokens=False)
    assert text.count("plan") == 1
    assert text.endswith("The answer is")
    assert codec.thinking_after(ids) == ""
