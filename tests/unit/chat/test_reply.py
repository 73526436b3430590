"""A sampled turn is read once: reasoning, text and calls in the order in which the model wrote
them.
"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.chat.formats import FORMATS, get_format
from jax_agent_rl.chat.reply import Reply, ToolCall
from jax_agent_rl.chat.thinking import ALL_THINK_TAGS, answer_of, began_inside, with_closed_thinking
from jax_agent_rl.errors import ToolArgumentError
from jax_agent_rl.tools.schema import check_arguments
from jax_agent_rl.utils.files import cache_root
from tests.examples import examples
from tests.unit.chat.test_formats import BARE_TEXT, THINK, WRITERS
from tests.unit.chat.test_template_families import FAMILIES, codec_of

SMOLLM2 = cache_root() / "models" / "smollm2-135m-instruct"
TOOL = {
    "type": "function",
    "function": {
        "name": "set",
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}, "n": {"type": "integer"}},
        },
    },
}
BROKEN = {
    "hermes": "<tool_call>{broken}</tool_call>",
    "qwen3_coder": "<tool_call><function=f><parameter=x>1</function></tool_call>",
    "seed": "<seed:tool_call><function=f><parameter=x>1</function></seed:tool_call>",
    "minimax": '<minimax:tool_call><invoke name="f">broken</invoke></minimax:tool_call>',
    "glm": "<tool_call>f<arg_key>x</arg_key></tool_call>",
    "kimi": "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{broken<|tool_call_end|>",
    "deepseek_v3": (
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{broken\n```<｜tool▁call▁end｜>"
    ),
    "deepseek_v31": "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{broken<｜tool▁call▁end｜>",
    "mistral": "[TOOL_CALLS]f[ARGS]{broken",
    "pythonic": "<|tool_call_start|>[f(x=broken)]<|tool_call_end|>",
    "olmo3": "<function_calls>f(x=broken)</function_calls>",
    "gemma": "<start_function_call>broken<end_function_call>",
    "gemma4": "<|tool_call>broken<tool_call|>",
    "harmony": "<|start|>assistant<|channel|>commentary to=functions.f<|message|>{broken<|call|>",
    "llama3_json": '<|python_tag|>{"name": broken',
    "text_tag": "<tool>{broken</tool>",
}
names = pytest.mark.parametrize("name", sorted(FORMATS))
names_with_think_tags = pytest.mark.parametrize("name", sorted(set(FORMATS) - {"harmony"}))
"""In Harmony reasoning is a message of its own, which no prompt opens."""


def parse(name, text, **options):
    return get_format(name).parse(text, (), **options)


def kinds(reply):
    return [
        part.kind
        for part in reply.parts
        if part.text.strip() or part.kind not in ("text", "reasoning")
    ]


@names
def test_valid_and_malformed_calls_keep_the_order_in_which_they_were_written(name):
    first, last = (WRITERS[name]("f", {"x": number}) for number in ("1", "2"))
    reply = parse(name, f"{BROKEN[name]}{last}{BROKEN[name]}")
    if name == "llama3_json":  # what follows a broken one is read from its next tag on
        assert [part.kind for part in reply.calls] == ["malformed", "call", "malformed"]
        return
    assert [part.kind for part in reply.calls] == ["malformed", "call", "malformed"]
    reply = parse(name, first + BROKEN[name] + last)
    assert [part.kind for part in reply.calls] == ["call", "malformed", "call"]
    assert [call.arguments["x"] for call in reply.tool_calls] == ["1", "2"]
    assert len(reply.malformed) == 1


@names
def test_parts_stand_in_order_and_a_malformed_call_keeps_its_text(name):
    if name == "harmony":
        thought = "<|channel|>analysis<|message|>hm<|end|>"
        said = "<|start|>assistant<|channel|>final<|message|>so<|end|>"
    else:
        begin, end = THINK.get(name, ("<think>", "</think>"))
        thought = f"{begin}hm{end}"
        said = "so "
    reply = parse(name, f"{thought}{said}{BROKEN[name]}")
    assert kinds(reply) == ["reasoning", "text", "malformed"]
    assert reply.reasoning == "hm"
    assert reply.content == "so"
    assert "broken" in reply.text_of("malformed") or "x" in reply.text_of("malformed")


@names_with_think_tags
def test_a_later_closing_tag_takes_nothing_back(name):
    begin, end = THINK.get(name, ("<think>", "</think>"))
    call = WRITERS[name]("f", {"x": "1"})
    if name == "llama3_json":
        call = f"{call} "
    reply = parse(name, f"{begin}hm{end}said {call} and {end} more")
    assert [c.name for c in reply.tool_calls] == ["f"]
    assert reply.reasoning == "hm"
    assert reply.content.startswith("said")
    assert reply.content.endswith(f"{end} more")


@names_with_think_tags
def test_where_the_prompt_opened_no_block_a_call_is_not_taken_back(name):
    _, end = THINK.get(name, ("<think>", "</think>"))
    reply = parse(name, f"{WRITERS[name]('f', {'x': '1'})} the tag {end} ends", thinking=False)
    assert [c.name for c in reply.tool_calls] == ["f"]
    assert end in reply.content


@names_with_think_tags
def test_a_turn_that_begins_in_a_block_is_reasoning_until_its_end(name):
    _, end = THINK.get(name, ("<think>", "</think>"))
    draft = WRITERS[name]("draft", {"x": "0"})
    reply = parse(name, f"maybe {draft}", thinking=True)
    assert reply.tool_calls == ()
    assert reply.content == ""
    assert reply.ends_thinking
    reply = parse(name, f"maybe {draft}{end}{WRITERS[name]('f', {'x': '1'})}", thinking=True)
    assert [c.name for c in reply.tool_calls] == ["f"]
    assert not reply.ends_thinking


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity", "1e400"])
@names
def test_nothing_that_is_not_finite_leaves_a_parser(name, number):
    written = WRITERS[name]("f", {"x": 12345.5}).replace("12345.5", number)
    reply = parse(name, written)
    json.dumps([dict(call.arguments) for call in reply.tool_calls], allow_nan=False)
    if name not in BARE_TEXT:
        assert reply.tool_calls == ()
        assert len(reply.malformed) == 1


@pytest.mark.parametrize("written", ["null", '""', "{}"])
@pytest.mark.parametrize(
    "name", ["hermes", "llama3_json", "mistral", "text_tag", "harmony", "kimi", "deepseek_v31"]
)
def test_no_arguments_may_be_written_as_nothing(name, written):
    if name == "mistral":
        text = f'[TOOL_CALLS][{{"name": "f", "arguments": {written}}}]'
    else:
        text = WRITERS[name]("f", {"x": 1}).replace('{"x": 1}', written)
    assert [(call.name, call.arguments) for call in parse(name, text).tool_calls] == [("f", {})]


def test_a_section_with_nothing_in_it_is_a_call_without_arguments():
    for name in ("harmony", "kimi", "deepseek_v31", "deepseek_v3"):
        text = WRITERS[name]("f", {"x": 1}).replace('{"x": 1}', "")
        assert [(call.name, call.arguments) for call in parse(name, text).tool_calls] == [
            ("f", {})
        ], name


# --- arguments by the tool's schema ---------------------------------------------------------------


def written_by_the_model(name):
    """A call whose values need the schema in formats of bare text, and lose quotes in others."""
    return WRITERS[name]("set", {"on": "false", "n": "3"})


@names
def test_the_codec_gives_arguments_as_the_schema_has_them(name):
    codec = ChatCodec(AutoTokenizer.from_pretrained(SMOLLM2), tool_format=name)
    (call,) = codec.parse_reply(codec.encode_text(written_by_the_model(name)), [TOOL]).tool_calls
    assert dict(call.arguments) == {"on": False, "n": 3}
    assert check_arguments(TOOL["function"]["parameters"], call.arguments) == {"on": False, "n": 3}


def test_arguments_of_an_unknown_tool_stay_as_they_are():
    codec = ChatCodec(AutoTokenizer.from_pretrained(SMOLLM2), tool_format="qwen3_coder")
    ids = codec.encode_text(WRITERS["qwen3_coder"]("other", {"on": "false"}))
    assert dict(codec.parse_reply(ids, [TOOL]).tool_calls[0].arguments) == {"on": "false"}
    with pytest.raises(ToolArgumentError):
        check_arguments(TOOL["function"]["parameters"], {"on": "no"})


# --- the context decides whether a turn begins in a block -----------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_the_context_tells_whether_a_turn_begins_in_a_block(name):
    codec = codec_of(name)
    asked = codec.encode_prompt([{"role": "user", "content": "look at <think> here"}])
    prompt = codec.decode(asked, skip_special_tokens=False)
    opens = any(prompt.rstrip().endswith(begin) for begin, _ in ALL_THINK_TAGS)
    assert bool(codec.thinking_after(asked)) is opens


def test_after_a_tool_result_a_template_may_open_no_block():
    codec = codec_of("deepseek")  # it opens one after a question alone
    asked = [{"role": "user", "content": "q"}]
    prompt = codec.encode_prompt(asked)
    assert codec.thinking_after(prompt) == "<think>"
    call = codec.encode_markup("hm</think>" + WRITERS["deepseek_v3"]("f", {}))
    sampled = [*call, codec.eos_token_ids[0]]
    appended = codec.encode_append(sampled, [{"role": "tool", "content": "3", "name": "f"}])
    context = [*prompt, *sampled, *appended]
    assert codec.thinking_after(context) == ""
    assert codec.parse_reply(codec.encode_text("it is 3"), context_ids=context).content == "it is 3"


def test_reasoning_stands_between_tags_however_the_model_marks_it():
    cases = {
        "gpt-oss": (
            "<|channel|>analysis<|message|>plan<|end|>"
            "<|start|>assistant<|channel|>final<|message|>so"
        ),
        "qwen3": "<think>plan</think>so",
    }
    for name, written in cases.items():
        codec = codec_of(name)
        text = codec.turn_text(
            codec.encode_markup(written), codec.encode_prompt([{"role": "user", "content": "q"}])
        )
        assert answer_of(text).strip() == "so" and "plan" in text, name


def test_a_block_that_the_prompt_opened_begins_with_its_tag():
    codec = codec_of("nemotron3")
    prompt = codec.encode_prompt([{"role": "user", "content": "q"}])
    assert codec.thinking_after(prompt) == "<think>"
    cut = codec.turn_text(codec.encode_text("maybe #### 18"), prompt)
    assert cut == "<think>maybe #### 18"
    assert answer_of(cut) == ""


# --- text -----------------------------------------------------------------------------------------

pieces = st.lists(
    st.sampled_from(["<think>", "</think>", "[THINK]", "[/THINK]", "a", " ", "####"]), max_size=8
)


@given(pieces.map("".join))
def test_an_answer_holds_nothing_that_was_thought(text):
    answer = answer_of(text)
    reply = get_format("hermes").parse(text, ())
    assert answer.strip() == reply.content, "the text of a turn is read as its ids are"


@given(pieces.map("".join), st.sampled_from(["so", "<think>hm</think>so"]))
def test_a_turn_that_was_cut_while_thinking_does_not_hide_the_next_one(text, following):
    assert answer_of(with_closed_thinking(f"<think>{text}") + following).endswith("so")


def test_the_first_tag_tells_where_a_turn_began():
    assert began_inside("2+2</think> 4")
    assert not began_inside("<think>2+2</think> 4")
    assert not began_inside("4")


@settings(max_examples=examples(50))
@given(st.lists(st.sampled_from(["text", "call", "broken", "thought"]), max_size=6))
def test_nothing_of_a_turn_is_lost_or_read_twice(plan):
    written = {
        "text": "said {} ",
        "call": '<tool_call>{{"name": "f", "arguments": {{"x": {}}}}}</tool_call>',
        "broken": "<tool_call>bad {}</tool_call>",
        "thought": "<think>thought {} </think>",
    }
    reply = get_format("hermes").parse(
        "".join(written[kind].format(n) for n, kind in enumerate(plan)), ()
    )
    said = [f"said {n}" for n, kind in enumerate(plan) if kind == "text"]
    assert reply.content.split(" ") == " ".join(said).split(" ")
    assert [call.arguments["x"] for call in reply.tool_calls] == [
        n for n, k in enumerate(plan) if k == "call"
    ]
    assert [part.kind for part in reply.calls] == [
        {"call": "call", "broken": "malformed"}[kind] for kind in plan if kind in ("call", "broken")
    ]
    thoughts = [f"thought {n} " for n, kind in enumerate(plan) if kind == "thought"]
    assert (reply.reasoning or "") == "".join(thoughts)


def test_a_reply_is_made_of_parts_or_of_what_it_says_and_not_of_both():
    reply = Reply(
        "so", tool_calls=[ToolCall(name="f", arguments={})], malformed=["no JSON"], reasoning="hm"
    )
    assert kinds(reply) == ["reasoning", "text", "call", "malformed"]
    assert (reply.content, reply.reasoning, reply.malformed) == ("so", "hm", ("no JSON",))
    with pytest.raises(TypeError):
        Reply("so", parts=reply.parts)
