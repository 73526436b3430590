"""Each family's own chat template writes calls; the format found from that template reads the same
calls back.

The templates are those of test_template_families.py; see also
tests/parity/test_formats_vs_renderers.py.
"""

import functools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.chat.formats import detect_format, get_format
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.tools.schema import check_arguments
from tests.examples import examples
from tests.messages import raises
from tests.unit.chat.test_template_families import FAMILIES, codec_of, template_of, tokenizer_with

FORMAT_OF = {
    "qwen2.5": "hermes",
    "qwen3": "hermes",
    "qwen3-vl": "hermes",
    "qwen3.5": "qwen3_coder",
    "qwen3.5 thinking": "qwen3_coder",
    "nemotron3": "qwen3_coder",
    "glm4": "glm",
    "llama3.1": "llama3_json",
    "llama3.2": "llama3_json",
    "deepseek": "deepseek_v3",
    "gemma4": "gemma4",
    "gpt-oss": "harmony",
    "mistral": "mistral",
    "lfm2": "pythonic",
    "kimi-k2": "kimi",
    "minimax-m2": "minimax",
    "olmo3": "olmo3",
    "deepseek-v3.1": "deepseek_v31",
}
QUESTION = "QUESTION5d2e81"
ONE_CALL = {"llama3.1", "llama3.2", "gpt-oss"}
"""Templates that write one call a turn."""
PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "options": {"type": "object", "additionalProperties": {"type": "integer"}},
    },
}
# Characters that no template escapes differently, and that no unquoted format reads as a tag.
words = st.text(
    st.characters(
        whitelist_categories=("L", "N", "Zs"), whitelist_characters="\n.,;:!?()[]{}'\"/\\"
    ),
    max_size=20,
)
to_arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": words,
        "count": st.integers(-1000, 1000),
        "exact": st.booleans(),
        "tags": st.lists(st.text("abc é", max_size=5), max_size=3),
        "options": st.dictionaries(st.sampled_from("abc"), st.integers(0, 9), max_size=2),
    },
)


@functools.cache
def turn_around(name: str) -> str:
    """What the family's template puts before an assistant turn that calls."""
    return codec_of(name).template.render(
        [{"role": "user", "content": QUESTION}], (), generation_prompt=True
    )


def written(name: str, calls: list[tuple[str, dict]]) -> str:
    """The assistant turn as the template writes it, without its end."""
    codec = codec_of(name)
    quoted = name == "deepseek"  # its template wants the arguments as text
    tool_calls = [
        {
            "id": f"functions.{tool}:{number}" if name == "kimi-k2" else f"{number:09d}",
            "type": "function",
            "function": {"name": tool, "arguments": json.dumps(arguments) if quoted else arguments},
        }
        for number, (tool, arguments) in enumerate(calls)
    ]
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "", "tool_calls": tool_calls},
    ]
    text = codec.template.render(messages, (), generation_prompt=False)
    text_before = turn_around(name)
    text = (
        text[len(text_before) :]
        if text.startswith(text_before)
        else text[text.rindex(QUESTION) + len(QUESTION) :]
    )
    ends = tuple(end for end in codec.control.ids if not is_format_token(name, end))
    while text.rstrip().endswith(ends):
        for end in ends:
            if text.rstrip().endswith(end):
                text = text.rstrip().removesuffix(end)
    return text


def unescaped(value):
    return re.sub(r"['\\\n]", "", value) if isinstance(value, str) else value


def is_format_token(name: str, token: str) -> bool:
    return (
        token in get_format(FORMAT_OF[name]).example
        or token == get_format(FORMAT_OF[name]).call_end
    )


@settings(max_examples=examples(60))
@given(
    calls=st.lists(
        st.tuples(st.sampled_from(["search", "get_weather"]), to_arguments), min_size=1, max_size=3
    )
)
@pytest.mark.parametrize("name", FORMAT_OF)
def test_calls_written_by_the_familys_template_are_read_back(name, calls):
    if name in ONE_CALL:
        calls = calls[:1]
    if (
        name == "lfm2"
    ):  # its template puts text in quotes as it is, so what would need an escape cannot be told
        calls = [
            (tool, {k: unescaped(v) for k, v in arguments.items()}) for tool, arguments in calls
        ]
    reply = get_format(FORMAT_OF[name]).parse(written(name, calls), ())
    assert reply.malformed == ()
    assert [
        (call.name, check_arguments(PARAMETERS, call.arguments)) for call in reply.tool_calls
    ] == calls


@pytest.mark.parametrize("name", FAMILIES)
def test_the_format_is_found_from_the_template(name):
    if name == "smollm2":
        template = str(codec_of(name).tokenizer.chat_template)
    else:
        template = template_of(FAMILIES[name])
    assert detect_format(template).name == FORMAT_OF.get(name, "hermes")


def test_a_template_of_an_unknown_format_is_refused_with_the_key_to_set():
    with raises(ConfigError, fix="set agent.tool_format"):
        detect_format("{% for tool in tools %}{{ tool }}{% endfor %}{{ '<CALL>' }}")


def test_a_model_written_id_is_the_one_its_result_is_answered_under():
    codec = codec_of("mistral")
    text = written("mistral", [("search", {"text": "x"})])
    (call,) = get_format("mistral").parse(text, ()).tool_calls
    assert call.id == "000000000"
    result = {"role": "tool", "content": "found", "tool_call_id": call.id}
    ids = codec.encode_append([*codec.encode_text(text), codec.eos_token_ids[0]], [result])
    assert '"call_id": "000000000"' in codec.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("text", "call_id"),
    [
        ('[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abcDEF123"}]', "abcDEF123"),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "too short"}]', None),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}, "id": 7}]', None),
        ("[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{}", "abcDEF123"),
        ("[TOOL_CALLS]f[ARGS]{}", None),
    ],
)
def test_mistral_ids_are_kept_only_where_its_template_accepts_them(text, call_id):
    (call,) = get_format("mistral").parse(text, ()).tool_calls
    assert (call.name, call.id) == ("f", call_id)


@pytest.mark.parametrize(
    ("call_id", "name"),
    [
        ("functions.get_weather:3", "get_weather"),
        ("get_weather:3", "get_weather"),
        ("get_weather", "get_weather"),
        ("call-get_weather-0", "get_weather"),
        ("call-get-weather-12", "get-weather"),
        ("call-back", "call-back"),
        ("functions.call-back-0:1", "call-back-0"),
    ],
)
def test_kimi_ids_are_kept_and_name_the_tool(call_id, name):
    text = f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    (call,) = get_format("kimi").parse(text, ()).tool_calls
    assert (call.name, call.id) == (name, call_id)


def test_a_model_of_an_unknown_format_runs_agents_without_tools_alone():
    tokenizer = tokenizer_with(("<s>", "</s>"), "</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}"
        "{% for tool in tools or [] %}{{ tool }}{% endfor %}{{ '<CALL>' }}"
    )
    codec = ChatCodec(tokenizer, tool_format="auto")
    question = [{"role": "user", "content": "q"}]
    assert "user:q" in codec.decode(codec.encode_prompt(question))
    assert codec.tool_format == "unknown"
    assert codec.parse_reply(codec.encode_text("an answer")).content == "an answer"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for use in (lambda: codec.encode_prompt(question, tools), lambda: codec.parse_reply([], tools)):
        with raises(ConfigError, fix="set agent.tool_format"):
            use()


def test_a_tool_result_that_a_template_drops_without_a_call_is_put_behind_one():
    """Gemma 4 writes results only inside the turn that calls."""
    codec = codec_of("gemma4")
    ids = [*codec.encode_text("<|tool_call>call:f{}<tool_call|>"), codec.eos_token_ids[0]]
    text = codec.decode(
        codec.encode_append(ids, [{"role": "tool", "content": "21 degrees"}]),
        skip_special_tokens=False,
    )
    assert text.startswith("<|tool_response>response:f{")
    assert "21 degrees" in text
    assert text.endswith("<tool_response|>")


@pytest.mark.parametrize(
    ("name", "kinds"), [("qwen3-vl", {"image", "video"}), ("qwen3", set()), ("smollm2", set())]
)
def test_what_a_template_can_show_is_found_by_trying(name, kinds):
    assert codec_of(name).modalities == kinds


def test_an_image_of_a_tool_result_is_one_placeholder_and_its_text_stays_text():
    codec = codec_of("qwen3-vl")
    ids = [*codec.encode_text("x"), codec.eos_token_ids[0]]
    pad = codec.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    result = {
        "role": "tool",
        "content": "I wrote <|image_pad|> myself",
        "media": ["image", "image"],
    }
    appended = codec.encode_append(ids, [result])
    assert appended.count(pad) == 2
    assert "I wrote <|image_pad|> myself" in codec.decode(appended, skip_special_tokens=False)
