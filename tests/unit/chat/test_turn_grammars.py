"""Grammars of turns: whatever they allow is read as the calls or the answer that was demanded."""

from __future__ import annotations

import contextlib
import functools
import json
import random
from collections.abc import Sequence

import jsonschema
import numpy as np
import pytest

from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.chat.formats import FORMATS
from jax_agent_rl.chat.grammar import MAX_COMPILED, GrammarCompiler, GrammarError
from jax_agent_rl.chat.grammar_limits import check_grammar
from jax_agent_rl.chat.thinking import ALL_THINK_TAGS, ends_thinking
from tests.messages import raises
from tests.unit.chat.test_formats_vs_templates import FORMAT_OF, written
from tests.unit.chat.test_template_families import FAMILIES, tokenizer_with
from tests.unit.chat.test_template_families import codec_of as any_codec

FORCED = [name for name in FAMILIES if FORMATS[FORMAT_OF.get(name, "hermes")].syntaxes]
ARGUMENTS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 4},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "exact": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": ARGUMENTS}},
    {
        "type": "function",
        "function": {"name": "stop-1.b", "parameters": {"type": "object", "properties": {}}},
    },
]
TOOLS[1]["function"]["parameters"]["additionalProperties"] = False


@functools.cache
def codec_of(name: str) -> ChatCodec:
    codec = any_codec(name)
    return ChatCodec(
        codec.tokenizer,
        tool_format=FORMAT_OF.get(name, "hermes"),
        tool_prompt="none",
        eos_token_ids=codec.eos_token_ids,
    )


def walk(
    codec: ChatCodec, grammar: str, rng: random.Random, prefix: Sequence[int] = ()
) -> list[int]:
    """Take allowed ids at random after ``prefix`` until the turn ends; reasoning, if it begins with
    any, ends soon.
    """
    size = len(codec.tokenizer)
    state = codec.grammars.start(grammar, prefix)
    bits = np.zeros(-(-size // 32), np.uint32)
    ids = [*prefix]
    closing = None
    while not ids or ids[-1] not in codec.eos_token_ids:
        state.fill_allowed(bits)
        allowed = np.flatnonzero(
            np.unpackbits(bits.view(np.uint8), bitorder="little")[:size]
        ).tolist()
        if closing is None and len(ids) == 12:
            end = end_of_thinking(codec, ids)
            if end is not None:
                closing = codec.encode_markup(end)
        ids.append(closing.pop(0) if closing and closing[0] in allowed else rng.choice(allowed))
        assert len(ids) < 900
        state.consume(ids[-1:])
    return ids


def end_of_thinking(codec: ChatCodec, ids: list[int]) -> str | None:
    """What ends the reasoning that a turn has begun with; None if it has not."""
    text = codec.decode(ids, skip_special_tokens=False)
    if text.startswith("<|channel|>analysis<|message|>"):
        return "<|end|><|start|>assistant"
    template = str(codec.tokenizer.chat_template)
    thinking = ends_thinking(text, thinking=bool(codec.boundary.think_tag))
    return next(tags[1] for tags in ALL_THINK_TAGS if tags[0] in template) if thinking else None


@pytest.mark.parametrize("name", FORCED)
def test_forced_turns_are_read_as_valid_calls_of_the_named_tools(name):
    codec = codec_of(name)
    counts = set()
    for seed in range(6):
        tools = TOOLS[: 1 + seed % 2]
        grammar = codec.turn_grammar(tools=tools, several=seed % 3 > 0)
        reply = codec.parse_reply(walk(codec, grammar, random.Random(seed)), tools=tools)
        assert reply.malformed == ()
        assert reply.content == ""
        assert reply.tool_calls
        assert len(reply.tool_calls) == 1 or seed % 3 > 0
        counts.add(len(reply.tool_calls))
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
        for call in reply.tool_calls:
            jsonschema.validate(dict(call.arguments), schemas[call.name])
    one_call = FORMATS[FORMAT_OF.get(name, "hermes")].syntaxes[0].between is None
    assert (max(counts) > 1) is not one_call


@pytest.mark.parametrize("name", FAMILIES)
def test_a_forced_answer_is_json_of_its_schema(name):
    codec = codec_of(name)
    for seed in range(3):
        grammar = codec.turn_grammar(answer=ARGUMENTS)
        reply = codec.parse_reply(walk(codec, grammar, random.Random(seed)))
        jsonschema.validate(json.loads(reply.content), ARGUMENTS)
        assert "\n" not in reply.content


def after_thoughts(codec: ChatCodec) -> str:
    """What a turn's text begins with where the prompt has opened a block of thoughts."""
    if codec.boundary.think_tag:
        return "</think>"
    return ""


@pytest.mark.parametrize(
    "name", ["qwen2.5", "qwen3", "qwen3-vl", "llama3.1", "llama3.2", "deepseek"]
)
def test_calls_are_allowed_as_the_familys_own_template_writes_them(name):
    codec = codec_of(name)
    grammar = codec.turn_grammar(tools=TOOLS)
    text = written(name, [("get_weather", {"city": "Rome", "days": 3, "exact": True})])
    text = after_thoughts(codec) + text.strip().removeprefix("<｜Assistant｜>")
    ids = [*codec.encode_markup(text), codec.eos_token_ids[0]]
    codec.grammars.start(grammar, ids)  # raises if it is not


@pytest.mark.parametrize(
    ("opened", "turn", "reasoning"),
    [
        (False, '<think>a < b</think>\n\n{"exact": true}', "a < b"),
        (False, '{"exact": true}', None),
        (True, 'a < b</think>\n{"exact": true}', "a < b"),
    ],
)
def test_a_turn_may_think_first_if_its_template_knows_how(opened, turn, reasoning):
    prompt = "<think>" if opened else ""
    codec = thinking_codec(prompt)
    schema = {"type": "object", "properties": {"exact": {"type": "boolean"}}, "required": ["exact"]}
    grammar = codec.turn_grammar(answer=schema)
    ids = [*codec.encode_markup(turn), codec.eos_token_ids[0]]
    codec.grammars.start(grammar, ids)
    reply = codec.parse_reply(ids)
    assert (reply.content, reply.reasoning) == ('{"exact": true}', reasoning)
    if opened:
        with pytest.raises(GrammarError):  # its reasoning has to end
            codec.grammars.start(
                grammar, [*codec.encode_markup('{"exact": true}'), codec.eos_token_ids[0]]
            )


def test_with_tools_and_a_schema_a_turn_may_be_either():
    codec = codec_of("qwen2.5")
    grammar = codec.turn_grammar(tools=TOOLS, answer=ARGUMENTS)
    for turn in (
        '<tool_call>\n{"name": "stop-1.b", "arguments": {}}\n</tool_call>',
        '{"city": "Rome", "days": 3}',
    ):
        codec.grammars.start(grammar, [*codec.encode_markup(turn), codec.eos_token_ids[0]])
    with pytest.raises(GrammarError):
        codec.grammars.start(grammar, codec.encode_markup("It is"))


def thinking_codec(prompt: str) -> ChatCodec:
    wrapped = tokenizer_with(("<|im_start|>", "<|im_end|>"), "<|im_end|>", ("<think>", "</think>"))
    wrapped.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content.split('</think>')[-1] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        + prompt
        + "{% endif %}{# <think> #}"
    )
    return ChatCodec(wrapped, tool_prompt="none")


def test_a_format_without_a_grammar_is_refused_by_name():
    with raises(GrammarError, value="qwen3_coder", fix="agent.tool_format=hermes"):
        codec_of("qwen3.5").turn_grammar(tools=TOOLS)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "objekt"}, {"value": "objekt"}),
        (
            {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}},
            {"value": "does not exist"},
        ),
        (
            {"type": "object", "properties": {"a": False}, "required": ["a"]},
            {"value": "unsatisfiable"},
        ),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_with_the_reason(schema, named):
    codec = codec_of("qwen2.5")
    with raises(GrammarError, **named):
        codec.turn_grammar(answer=schema)
    with raises(GrammarError, **named):
        codec.turn_grammar(
            tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}]
        )


@pytest.mark.parametrize("name", ['f"', "a b", "<|im_end|>", "f\n", ""])
def test_a_tools_name_cannot_break_out_of_its_call(name):
    with raises(GrammarError, value="tool name"):
        codec_of("qwen2.5").turn_grammar(tools=[{"type": "function", "function": {"name": name}}])


def test_compiled_grammars_are_reused_and_states_are_independent(monkeypatch):
    compiled = []

    def check(text: str) -> int:
        compiled.append(text)
        return check_grammar(text)

    monkeypatch.setattr("jax_agent_rl.chat.grammar.check_grammar", check)
    codec = codec_of("qwen2.5")
    compiler = GrammarCompiler(codec.tokenizer, eos_ids=codec.eos_token_ids)
    first = compiler.start('start: "ab"')
    second = compiler.start('start: "ab"')
    assert len(compiled) == 1
    first.consume(codec.encode_text("ab"))
    bits = np.zeros((2, 40), np.uint32)
    first.fill_allowed(bits[0])
    second.fill_allowed(bits[1])
    assert (bits[0] != bits[1]).any()

    grammars = [f'start: "{number}"' for number in range(MAX_COMPILED + 5)]
    for grammar in grammars:
        compiler.start(grammar)
    compiled.clear()
    for grammar in grammars[-MAX_COMPILED:]:
        compiler.start(grammar)
    assert compiled == []
    compiler.start(grammars[4])
    assert compiled == [grammars[4]]


FREE = [name for name in FORCED if FORMAT_OF.get(name, "hermes") not in ("llama3_json", "harmony")]


def opening_of(name: str) -> str:
    syntax = codec_of(name).call_syntax
    assert syntax is not None
    return (syntax.begin + syntax.before).partition("NAME")[0]


@pytest.mark.parametrize("name", FREE)
def test_what_begins_as_a_call_in_a_free_turn_is_read_as_valid_calls(name):
    codec = codec_of(name)
    grammar = codec.free_turn_grammar(tools=TOOLS)
    prefix = codec.encode_markup(after_thoughts(codec) + "Let me see. " + opening_of(name))
    for seed in range(4):
        ids = walk(codec, grammar, random.Random(seed), prefix)
        reply = codec.parse_reply(ids, tools=TOOLS)
        assert reply.malformed == ()
        assert reply.tool_calls
        assert reply.content.startswith("Let me see.")
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
        for call in reply.tool_calls:
            jsonschema.validate(dict(call.arguments), schemas[call.name])


@pytest.mark.parametrize("name", FREE)
def test_a_free_turn_may_be_any_text_without_a_call_or_nothing(name):
    codec = codec_of(name)
    grammar = codec.free_turn_grammar(tools=TOOLS)
    for text in ("", "It is 5 < 7 / 1, [1] {} \n\n or \\ so: ü"):
        ids = codec.encode_markup(after_thoughts(codec) + text)
        codec.grammars.start(grammar, [*ids, codec.eos_token_ids[0]])  # raises if it is not


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
@pytest.mark.parametrize(
    "call",
    [
        '{"name": "no_such_tool", "arguments": {}}',
        '{"name": "get_weather", "arguments": {"city": "Rome"}}',
        '{"name": "get_weather", "arguments": {"city": "Rome", "days": 30}}',
        '{"name": "stop-1.b", "arguments": {"a": 1}}',
        "get_weather(Rome)",
    ],
)
def test_a_free_turn_has_no_call_of_another_tool_or_with_other_arguments(name, call):
    codec = codec_of(name)
    ids = codec.encode_markup(after_thoughts(codec) + f"Yes. <tool_call>\n{call}\n</tool_call>")
    with pytest.raises(GrammarError):
        codec.grammars.start(codec.free_turn_grammar(tools=TOOLS), ids)


def test_arguments_unknown_to_a_schema_are_refused_unless_it_allows_them():
    codec = codec_of("qwen2.5")
    ids = codec.encode_markup(
        '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    )
    for schema, fits in (({}, False), ({"additionalProperties": True}, True)):
        function = {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}, **schema}}
        grammar = codec.free_turn_grammar(tools=[{"type": "function", "function": function}])
        with contextlib.nullcontext() if fits else pytest.raises(GrammarError):
            codec.grammars.start(grammar, ids)


@pytest.mark.parametrize("name", ["llama3.1", "gpt-oss"])
def test_free_turns_are_refused_where_nothing_tells_a_call_from_text(name):
    with raises(GrammarError, value="opening"):
        codec_of(name).free_turn_grammar(tools=TOOLS)
