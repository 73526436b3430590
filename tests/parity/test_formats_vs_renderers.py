"""Tool calls as the package renderers writes and reads them: Kimi K2, MiniMax M2, GLM 4.5, Qwen
3.5, DeepSeek V3.

Its writers follow the models' own templates token by token. Ours must read what they write, and
find what its readers find. Its readers are no substitute: two tests show where they run what must
not run, or raise.
"""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_agent_rl.chat.formats import get_format
from tests.examples import examples
from tests.unit.chat.test_template_families import codec_of, tokenizer_with

renderers = pytest.importorskip("renderers")

CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")
FAMILIES = {
    "kimi": (
        "kimi-k2",
        (
            *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>"),
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
        "<|im_end|>",
    ),
    "minimax": (
        "minimax-m2",
        (
            "]~!b[",
            "]~b]",
            "[e~[",
            "<think>",
            "</think>",
            "<minimax:tool_call>",
            "</minimax:tool_call>",
        ),
        "[e~[",
    ),
    "glm": (
        "glm-4.5",
        (
            *(
                "[gMASK]",
                "<sop>",
                "<|system|>",
                "<|user|>",
                "<|assistant|>",
                "<|observation|>",
                "<|endoftext|>",
            ),
            *(*TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink"),
        ),
        "<|endoftext|>",
    ),
    "qwen3_coder": (
        "qwen3.5",
        (*CHATML, *TAGS, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        "<|im_end|>",
    ),
    "deepseek_v3": (
        "deepseek-v3",
        (
            *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
            *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
            *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
            *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        ),
        "<｜end▁of▁sentence｜>",
    ),
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
            },
        },
    }
    for name in ("search", "look")
]


@functools.cache
def renderer_of(name):
    known, special, eos = FAMILIES[name]
    return renderers.create_renderer(
        tokenizer_with(special, eos), renderers.config_from_name(known)
    )


def turn_of(renderer, calls):
    """Ids of the assistant turn that makes these calls, from the first call on."""
    tool_calls = [
        {
            "id": f"functions.{tool}:{number}",
            "type": "function",
            "function": {"name": tool, "arguments": arguments},
        }
        for number, (tool, arguments) in enumerate(calls)
    ]
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "so", "tool_calls": tool_calls},
    ]
    ids = renderer.render_ids(messages)
    openings = renderer._tokenizer.convert_tokens_to_ids(
        [
            "<tool_call>",
            "<minimax:tool_call>",
            "<|tool_calls_section_begin|>",
            "<｜tool▁calls▁begin｜>",
        ]
    )
    return ids[next(place for place, token in enumerate(ids) if token in openings) :]


texts = st.text(
    st.characters(whitelist_categories=("L", "N"), whitelist_characters=" .,:()[]{}'\"\\"),
    min_size=1,
    max_size=12,
)
arguments = st.dictionaries(st.sampled_from("ab"), texts, min_size=1, max_size=2)


def without_edges(arguments: dict[str, str]) -> dict[str, str]:
    return {key: value.strip() for key, value in arguments.items()}


@settings(max_examples=examples(40))
@given(
    calls=st.lists(
        st.tuples(st.sampled_from(["search", "look"]), arguments), min_size=1, max_size=3
    )
)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_it_writes_is_read_alike_by_both(name, calls):
    renderer = renderer_of(name)
    ids = turn_of(renderer, calls)
    reply = get_format(name).parse(renderer._tokenizer.decode(ids), ())
    assert [(call.name, dict(call.arguments)) for call in reply.tool_calls] == calls
    theirs = [
        call for call in renderer.parse_response(ids, tools=TOOLS).tool_calls if call.status == "ok"
    ]
    stripped = [(tool, without_edges(arguments)) for tool, arguments in calls]
    parsed = [
        (call.name.removeprefix("functions."), without_edges(call.arguments)) for call in theirs
    ]
    assert parsed == stripped


@pytest.mark.parametrize(
    ("name", "family"), [("kimi", "kimi-k2"), ("minimax", "minimax-m2")], ids=["kimi", "minimax"]
)
def test_our_templates_of_families_without_a_shipped_one_write_what_it_writes(name, family):
    def call(tool, number, arguments):
        function = {"name": tool, "arguments": arguments}
        return {"id": f"functions.{tool}:{number}", "type": "function", "function": function}

    def result(tool, number, content):
        call_id = f"functions.{tool}:{number}"
        return {"role": "tool", "name": tool, "tool_call_id": call_id, "content": content}

    calls = [call("search", 0, {"a": "x y", "b": 'a "quoted" é'}), call("look", 1, {"a": "z"})]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "first question"},
        {"role": "assistant", "content": "an answer"},
        {"role": "user", "content": "second question"},
        {"role": "assistant", "content": "so", "tool_calls": calls},
        result("search", 0, "found\nmuch"),
        result("look", 1, "seen"),
    ]
    renderer = renderer_of(name)
    for count in range(2, len(messages) + 1):
        if count == len(messages) - 1:
            continue  # one of two results
        ids = renderer.render_ids(messages[:count], add_generation_prompt=True)
        written = codec_of(family).template.render(messages[:count], (), generation_prompt=True)
        assert written == renderer._tokenizer.decode(ids)


def test_a_call_inside_open_reasoning_is_run_by_it_and_not_by_us():
    renderer = renderer_of("qwen3_coder")
    text = (
        "<think>maybe"
        " <tool_call>\n<function=search>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>"
    )
    ids = renderer._tokenizer.encode(text, add_special_tokens=False)
    assert [call.name for call in renderer.parse_response(ids).tool_calls] == ["search"]
    assert get_format("qwen3_coder").parse(text, ()).tool_calls == ()


def test_a_number_too_long_to_convert_makes_it_raise_and_us_report():
    renderer = renderer_of("kimi")
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        + '{"a": '
        + "9" * 5000
        + "}<|tool_call_end|><|tool_calls_section_end|>"
    )
    with pytest.raises(ValueError, match="digits"):
        renderer.parse_response(renderer._tokenizer.encode(text, add_special_tokens=False))
    assert len(get_format("kimi").parse(text, ()).malformed) == 1
