"""Every tool-call format: what is a call, what is none, and that no text makes a parser raise, run
or hang.
"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_agent_rl.chat.formats import FORMATS, ToolCall, get_format
from jax_agent_rl.chat.formats.base import MAX_CALLS
from jax_agent_rl.config import ToolFormatName
from tests.examples import examples

SEARCH = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string"}},
            "required": ["x"],
        },
    },
}


def hermes(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def spelled(value):
    return value if isinstance(value, str) else json.dumps(value)


def qwen3_coder(name, arguments):
    body = "".join(
        f"<parameter={key}>\n{spelled(value)}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def seed(name, arguments):
    body = "".join(
        f"<parameter={key}>{spelled(value)}</parameter>\n" for key, value in arguments.items()
    )
    return f"<seed:tool_call>\n<function={name}>\n{body}</function>\n</seed:tool_call>"


def minimax(name, arguments):
    body = "".join(
        f'<parameter name="{key}">{spelled(value)}</parameter>\n'
        for key, value in arguments.items()
    )
    return f'<minimax:tool_call>\n<invoke name="{name}">\n{body}</invoke>\n</minimax:tool_call>'


def glm(name, arguments):
    body = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{spelled(value)}</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{body}</tool_call>"


def kimi(name, arguments):
    return (
        "<|tool_calls_section_begin|><|tool_call_begin|>"
        f"functions.{name}:0<|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    )


def deepseek_v3(name, arguments):
    return (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n"
        f"```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )


def deepseek_v31(name, arguments):
    return (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>"
        f"{json.dumps(arguments)}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )


def mistral(name, arguments):
    return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}"


def pythonic(name, arguments):
    body = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"<|tool_call_start|>[{name}({body})]<|tool_call_end|>"


def olmo3(name, arguments):
    body = ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items())
    return f"<function_calls>{name}({body})</function_calls>"


def gemma_value(value, quote):
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        pairs = (f"{quote}{key}{quote}:{gemma_value(item, quote)}" for key, item in value.items())
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(gemma_value(item, quote) for item in value) + "]"
    return json.dumps(value)


def gemma(name, arguments):
    body = ",".join(f"{key}:{gemma_value(value, '<escape>')}" for key, value in arguments.items())
    return f"<start_function_call>call:{name}{{{body}}}<end_function_call>"


def gemma4(name, arguments):
    quote = '<|"|>'
    body = ",".join(f"{key}:{gemma_value(value, quote)}" for key, value in arguments.items())
    return f"<|tool_call>call:{name}{{{body}}}<tool_call|>"


def harmony(name, arguments):
    return (
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{json.dumps(arguments)}<|call|>"
    )


def llama3_json(name, arguments):
    return "<|python_tag|>" + json.dumps({"name": name, "parameters": arguments})


def text_tag(name, arguments):
    return f"<tool>{json.dumps({'name': name, 'arguments': arguments})}</tool>"


WRITERS = {
    write.__name__: write
    for write in (
        hermes,
        qwen3_coder,
        seed,
        minimax,
        glm,
        kimi,
        deepseek_v3,
        deepseek_v31,
        mistral,
        pythonic,
        olmo3,
        gemma,
        gemma4,
        harmony,
        llama3_json,
        text_tag,
    )
}
BARE_TEXT = {"qwen3_coder", "seed", "minimax", "glm"}
"""Formats whose values are text without quotes."""
THINK = {
    "seed": ("<seed:think>", "</seed:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "gemma4": ("<|channel>", "<channel|>"),
    "harmony": ("<|channel|>analysis<|message|>", "<|end|>"),
}
CLOSING = {
    "hermes": "</tool_call>",
    "qwen3_coder": "</parameter></tool_call>",
    "seed": "</parameter></seed:tool_call>",
    "minimax": "</parameter></minimax:tool_call>",
    "glm": "</arg_value></arg_key>",
    "kimi": "<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek_v3": "```<｜tool▁call▁end｜>",
    "deepseek_v31": "<｜tool▁call▁end｜>",
    "mistral": "[TOOL_CALLS]",
    "pythonic": ")]<|tool_call_end|>",
    "olmo3": ")</function_calls>",
    "gemma": "}<end_function_call>",
    "gemma4": "}<tool_call|>",
    "harmony": "<|call|><|end|>",
    "llama3_json": "}<|eom_id|>",
    "text_tag": "</tool>",
}
names = pytest.mark.parametrize("name", sorted(FORMATS))


def parse(name, text, tools=()):
    return get_format(name).parse(text, tools)


def called(reply):
    return [(call.name, dict(call.arguments)) for call in reply.tool_calls]


def test_every_format_can_be_configured_and_is_tested():
    assert set(FORMATS) | {"auto"} == set(ToolFormatName.__args__)
    assert set(FORMATS) == set(WRITERS) == set(CLOSING)


@names
def test_a_call_is_read(name):
    arguments = {"x": "Paris, été 🙂", "y": "a\nb"}
    reply = parse(name, WRITERS[name]("get_weather", arguments))
    assert called(reply) == [("get_weather", arguments)]
    assert reply.malformed == ()
    assert reply.content == ""


@names
def test_a_call_without_arguments_is_read(name):
    assert called(parse(name, WRITERS[name]("f", {}))) == [("f", {})]


@names
def test_parallel_calls_keep_their_order(name):
    text = "".join(WRITERS[name](tool, {"x": str(number)}) for number, tool in enumerate("fgf"))
    if name == "llama3_json":
        text = text.replace("<|python_tag|>", "; ").removeprefix("; ")
    assert called(parse(name, text)) == [("f", {"x": "0"}), ("g", {"x": "1"}), ("f", {"x": "2"})]


@names
def test_nested_arguments_come_back_whole(name):
    value = {"list": [1, 2.5, True, None, {"deep": ["]", "}"]}], "text": 'quote " and \\ slash'}
    (call,) = parse(name, WRITERS[name]("f", {"x": value})).tool_calls
    got = call.arguments["x"]
    assert (json.loads(got) if name in BARE_TEXT else got) == value


@names
def test_a_closing_tag_inside_a_string_does_not_end_the_call(name):
    arguments = {"x": f"before {CLOSING[name]} after", "y": "1"}
    reply = parse(name, WRITERS[name]("f", arguments))
    assert called(reply) == [("f", arguments)]
    assert reply.malformed == ()


@names
def test_a_whole_call_inside_a_string_is_no_call(name):
    inner = WRITERS[name]("evil", {"x": "1"})
    if (
        name in BARE_TEXT
    ):  # exactly what may follow a value ends it, so the quoted call must not be whole
        inner = inner.replace("</parameter>", "</ parameter>").replace(
            "</arg_value>", "</ arg_value>"
        )
    elif name in ("gemma", "gemma4"):  # their strings cannot hold their own quote
        inner = inner.replace("<escape>", "'").replace('<|"|>', "'")
    reply = parse(name, WRITERS[name]("f", {"x": inner}))
    assert [call.name for call in reply.tool_calls] == ["f"]
    assert reply.tool_calls[0].arguments["x"] == inner


@names
def test_calls_inside_reasoning_are_not_run(name):
    begin, end = THINK.get(name, ("<think>", "</think>"))
    call = WRITERS[name]("f", {"x": "1"})
    if name == "harmony":  # inside a message only the text of a header can stand, never a header
        call = "to=functions.f<|message|>{}"
    reply = parse(name, f"{begin}I could write {call} here{end}")
    assert reply.tool_calls == ()
    assert "I could write" in (reply.reasoning or "")


@names
def test_a_call_after_reasoning_is_run(name):
    begin, end = THINK.get(name, ("<think>", "</think>"))
    reply = parse(name, f"{begin}hm{end}{WRITERS[name]('f', {'x': '1'})}")
    assert called(reply) == [("f", {"x": "1"})]
    assert "hm" in (reply.reasoning or "")


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"harmony"}))
def test_reasoning_that_the_prompt_opened_hides_its_drafts(name):
    _, end = THINK.get(name, ("<think>", "</think>"))
    draft = WRITERS[name]("draft", {"x": "0"})
    real = WRITERS[name]("f", {"x": "1"})
    for cut in (len(draft), len(draft) // 2):
        reply = parse(name, f"maybe {draft[:cut]} or not{end}{real}")
        assert called(reply) == [("f", {"x": "1"})], cut
        assert reply.malformed == ()


@names
def test_a_call_that_was_cut_is_never_run(name):
    full_call = WRITERS[name]("f", {"x": "some text", "y": "more"})
    complete = {
        "kimi": "<|tool_call_end|>",
        "deepseek_v3": "<｜tool▁call▁end｜>",
        "deepseek_v31": "<｜tool▁call▁end｜>",
    }
    body = (
        full_call.split(complete[name])[0]
        if name in complete
        else full_call.removesuffix("<|call|>")
    )
    for cut in range(len(body)):
        reply = parse(name, full_call[:cut])
        assert reply.tool_calls == (), full_call[:cut]


@names
def test_a_cut_call_is_reported_once_it_has_begun(name):
    full_call = WRITERS[name]("f", {"x": "some text"})
    reply = parse(name, full_call[: full_call.index("some text") + 4])
    assert len(reply.malformed) == 1


@names
def test_text_alone_is_an_answer(name):
    reply = parse(name, "The answer is {42}, [see (this)].")
    assert reply.content == "The answer is {42}, [see (this)]."
    assert not reply.tool_calls
    assert not reply.malformed


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"llama3_json", "mistral"}))
def test_a_good_call_after_a_malformed_one_still_counts(name):
    good = WRITERS[name]("f", {"x": "1"})
    opening = (
        good[: good.index("f")]
        if name not in ("pythonic", "olmo3", "gemma")
        else good[: good.index(">") + 1]
    )
    bad = {
        "harmony": "<|start|>assistant to=functions.g<|message|>oops<|call|>",
        "kimi": "<|tool_call_begin|>?<|tool_call_end|>",
        "deepseek_v3": "<｜tool▁call▁begin｜>?<｜tool▁call▁end｜>",
        "deepseek_v31": "<｜tool▁call▁begin｜>?<｜tool▁call▁end｜>",
        "text_tag": "<tool>oops</tool>",
        "hermes": "<tool_call>oops</tool_call>",
        "minimax": "<minimax:tool_call>oops</minimax:tool_call>",
    }.get(name, opening)
    reply = parse(name, bad + good)
    assert called(reply) == [("f", {"x": "1"})]
    assert len(reply.malformed) == 1


@names
def test_a_turn_of_very_many_calls_is_bounded(name):
    text = WRITERS[name]("f", {"x": "1"}) * 500
    reply = parse(name, text)
    assert len(reply.tool_calls) <= MAX_CALLS + 1


@names
@pytest.mark.parametrize("repeats", [examples(20_000)])
def test_hostile_repetition_is_read_without_raising(name, repeats):
    """Quadratic work on these would take hours and run into the test's time limit."""
    writer = WRITERS[name]("f", {"x": "1"})
    begin, end = THINK.get(name, ("<think>", "</think>"))
    for unit in (
        writer[: len(writer) // 2],
        writer[:-1],
        begin,
        end,
        "[",
        "{",
        '{"a":',
        "((",
        " ",
        "\n",
        "'",
        '"',
        "\\",
    ):
        parse(name, writer[: len(writer) // 2] + unit * repeats)
        parse(name, unit * repeats + writer)


PIECES = sorted(
    {piece for name, write in WRITERS.items() for piece in (write("f", {"x": "1"}), CLOSING[name])}
    | {tag for pair in THINK.values() for tag in pair}
    | set(
        "<think> </think> <tool_call> <function=f> <parameter=x> </parameter> { } [ ] ( ) \" ' ,"
        " : = \\ ```json".split()
    )
    | {
        "<｜tool▁call▁begin｜>",
        "<|tool_call_begin|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|message|>",
        "<|start|>assistant",
    }
    | {
        "__import__('os').system('touch /tmp/pwned')",
        "f(x=__import__)",
        "\x00",
        "\ud800",
        "9" * 5000,
        "NaN",
        "1e999",
    }
)


@settings(max_examples=examples(150))
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=12).map("".join))
@names
def test_no_text_makes_a_parser_raise_or_run_anything(name, text):
    for tools in ((), (SEARCH,)):
        reply = parse(name, text, tools)
        assert all(isinstance(call, ToolCall) and call.name for call in reply.tool_calls)
        assert all(isinstance(reason, str) and reason for reason in reply.malformed)
        for call in reply.tool_calls:
            assert_plain(dict(call.arguments))


def assert_plain(value):
    """Arguments are data: JSON's types and nothing else."""
    if isinstance(value, dict):
        assert all(isinstance(key, str) for key in value)
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            assert_plain(item)
    else:
        assert value is None or type(value) in (str, int, float, bool)


keys = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)
texts = st.text(st.characters(blacklist_categories=("Cs",)), max_size=12)
plain_texts = st.text(
    st.characters(whitelist_categories=("L", "N", "P", "Zs"), blacklist_characters="<>|"),
    max_size=12,
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e6, 1e6) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=examples(100))
@given(data=st.data())
@names
def test_what_is_written_is_read_back(name, data):
    allowed = plain_texts if name in BARE_TEXT | {"gemma", "gemma4"} else values
    arguments = data.draw(st.dictionaries(keys, allowed, max_size=3))
    assert called(parse(name, WRITERS[name]("a_tool", arguments))) == [("a_tool", arguments)]
