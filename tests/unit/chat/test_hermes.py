"""The Hermes format: what is a call, what is not, and that nothing makes the parser raise."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.chat.formats import ToolCall, get_format
from jax_agent_rl.chat.formats.json_calls import HERMES
from jax_agent_rl.errors import ConfigError
from tests.messages import raises

parse = HERMES.parse

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def call(name: str, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@given(st.text(min_size=1), st.dictionaries(st.text(), json_values, max_size=4))
def test_any_call_written_as_json_is_read_back(name: str, arguments: dict):
    assert parse("text " + call(name, arguments)).tool_calls == (
        ToolCall(name=name, arguments=arguments),
    )


@given(
    st.text()
    | st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                "<think>",
                "</think>",
                '{"name":"f"',
                "}",
                '"',
                "[",
                " ",
            ]
        )
    ).map("".join)
)
def test_no_text_makes_it_raise(text: str):
    reply = parse(text)
    assert isinstance(reply.content, str)


def test_several_calls_and_the_text_around_them_keep_their_order():
    reply = parse(f"first {call('f', {'a': 1})} then {call('g', {})} done")
    assert [c.name for c in reply.tool_calls] == ["f", "g"]
    assert reply.content == "first  then  done"


def test_a_closing_tag_inside_a_string_does_not_end_the_call():
    assert parse(call("f", {"x": "</tool_call> <tool_call>"})).tool_calls[0].arguments == {
        "x": "</tool_call> <tool_call>"
    }


@pytest.mark.parametrize("tag", ["<think>", "</think>", "<think> and </think>"])
def test_a_thinking_tag_inside_a_string_of_a_call_is_no_reasoning(tag: str):
    reply = parse(f"<think>hm</think>so {call(tag, {'x': tag})}")
    assert reply.tool_calls == (ToolCall(name=tag, arguments={"x": tag}),)
    assert (reply.reasoning, reply.content) == ("hm", "so")


@pytest.mark.parametrize(
    "text",
    [
        f"<think>{call('f', {})}</think>answer",
        f"<think>{call('f', {})}",
        f"{call('f', {})}</think>answer",
    ],
)
def test_calls_inside_reasoning_are_not_calls(text: str):
    reply = parse(text)
    assert reply.tool_calls == ()
    assert reply.reasoning
    assert "f" in reply.reasoning


def test_arguments_written_as_a_string_of_json_are_accepted():
    assert parse(call("f", '{"a": 1}')).tool_calls[0].arguments == {"a": 1}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("<tool_call>{'name': 'f'}</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "f", "arguments": {}}', "without"),
        ("<tool_call>[1, 2]</tool_call>", "expected an object"),
        ('<tool_call>{"arguments": {}}</tool_call>', "expected an object"),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "must be an object"),
        ('<tool_call>{"name": "f"} x</tool_call>', "unexpected text"),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "not valid JSON"),
        ('<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>', "a lone surrogate"),
        ('<tool_call>{"name": "\\uD83D", "arguments": {}}</tool_call>', "a lone surrogate"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
        ("<tool_call>" + "9" * 5000 + "</tool_call>", "not valid JSON"),
    ],
)
def test_a_malformed_call_is_reported_with_its_reason(text: str, why: str):
    reply = parse(text)
    assert reply.tool_calls == ()
    assert len(reply.malformed) == 1
    assert why in reply.malformed[0]


def test_a_good_call_after_a_malformed_one_still_counts():
    reply = parse("<tool_call>oops</tool_call>" + call("f", {}))
    assert [c.name for c in reply.tool_calls] == ["f"]
    assert len(reply.malformed) == 1


def test_an_unknown_format_names_those_there_are():
    with raises(ConfigError, value="hermes"):
        get_format("xml")
