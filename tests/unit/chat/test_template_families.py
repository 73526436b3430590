"""Token-exactness on the chat templates of many model families, over thousands of random
conversations.

The templates are those that TRL and Axolotl ship (read as data, the packages are not imported) and
SmolLM2's own. Kimi K2's, MiniMax M2's, OLMo 3's and DeepSeek V3.1's, which neither ships, were
written for these tests in the notation of their makers (``templates/``);
tests/parity/test_formats_vs_renderers.py compares the first two. The tokenizers are small
byte-level BPEs with each family's special tokens: what matters is where text is cut and joined. The
reference is the whole conversation rendered and tokenized anew.
"""

from __future__ import annotations

import functools
import json
import random
import re
from dataclasses import dataclass
from importlib.metadata import files
from pathlib import Path

import pytest

from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.errors import TemplateError
from jax_agent_rl.utils.files import cache_root

CONVERSATIONS = 150  # per family and kind of turn


@dataclass(frozen=True)
class Family:
    """A template: its source, special tokens, stop tokens, and added tokens of no special kind.

    ``package`` is :data:`WRITTEN` for a template in ``templates/``.
    """

    package: str
    file: str
    special: tuple[str, ...]
    eos: str
    stops: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()


WRITTEN = "written for these tests"
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

FAMILIES = {
    "qwen2.5": Family(
        "trl",
        "qwen2_5.jinja",
        ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
        "<|im_end|>",
        stops=("<|endoftext|>",),
        tags=("<tool_call>", "</tool_call>"),
    ),
    "qwen3": Family(
        "trl",
        "qwen3.jinja",
        ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
        "<|im_end|>",
        stops=("<|endoftext|>",),
        tags=TAGS,
    ),
    "llama3": Family(
        "trl",
        "llama3.jinja",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
    ),
    "llama3.1": Family(
        "trl",
        "llama3_1.jinja",
        (
            "<|begin_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
            "<|eom_id|>",
            "<|python_tag|>",
        ),
        "<|eot_id|>",
        stops=("<|eom_id|>",),
    ),
    "llama3.2": Family(
        "trl",
        "llama3_2.jinja",
        (
            "<|begin_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
            "<|eom_id|>",
        ),
        "<|eot_id|>",
        stops=("<|eom_id|>",),
    ),
    "gemma": Family(
        "trl", "gemma.jinja", ("<bos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>"
    ),
    "gemma3": Family(
        "trl", "gemma3.jinja", ("<bos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>"
    ),
    "mistral": Family(
        "axolotl", "mistral_v3_tekken.jinja", ("<s>", "</s>", "[INST]", "[/INST]"), "</s>"
    ),
    "deepseek": Family(
        "trl",
        "deepseekv3.jinja",
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        "<｜end▁of▁sentence｜>",
    ),
    "gpt-oss": Family(
        "trl",
        "gptoss.jinja",
        (
            "<|start|>",
            "<|end|>",
            "<|message|>",
            "<|channel|>",
            "<|constrain|>",
            "<|return|>",
            "<|call|>",
        ),
        "<|return|>",
        stops=("<|call|>",),
    ),
    "phi3": Family(
        "trl",
        "phi3.jinja",
        ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>"),
        "<|end|>",
        stops=("<|endoftext|>",),
    ),
    "qwen3.5": Family(
        "trl", "qwen3_5_nothink.jinja", ("<|im_start|>", "<|im_end|>"), "<|im_end|>", tags=TAGS
    ),
    "qwen3-vl": Family(
        "trl",
        "qwen3_vl.jinja",
        (
            "<|im_start|>",
            "<|im_end|>",
            "<|vision_start|>",
            "<|vision_end|>",
            "<|image_pad|>",
            "<|video_pad|>",
        ),
        "<|im_end|>",
    ),
    "nemotron3": Family(
        "trl", "nemotron_3_nano.jinja", ("<|im_start|>", "<|im_end|>"), "<|im_end|>"
    ),
    "glm4": Family(
        "trl",
        "glm4moe.jinja",
        (
            "[gMASK]",
            "<sop>",
            "<|system|>",
            "<|user|>",
            "<|assistant|>",
            "<|observation|>",
            "<|endoftext|>",
        ),
        "<|endoftext|>",
        stops=("<|user|>", "<|observation|>"),
        tags=(*TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink"),
    ),
    "lfm2": Family(
        "trl",
        "lfm2_2_5.jinja",
        (
            "<|startoftext|>",
            "<|im_start|>",
            "<|im_end|>",
            "<|tool_call_start|>",
            "<|tool_call_end|>",
        ),
        "<|im_end|>",
    ),
    "gemma4": Family(
        "trl",
        "gemma4_v5.jinja",
        (
            "<bos>",
            "<|turn>",
            "<turn|>",
            "<|tool_call>",
            "<tool_call|>",
            "<|tool_response>",
            "<tool_response|>",
            "<|channel>",
            "<channel|>",
            '<|"|>',
        ),
        "<turn|>",
        stops=("<|tool_response>",),
    ),
    "smolvlm": Family(
        "trl",
        "smolvlm.jinja",
        ("<|im_start|>", "<end_of_utterance>", "<image>"),
        "<end_of_utterance>",
    ),
    "idefics3": Family(
        "trl",
        "idefics3.jinja",
        ("<|begin_of_text|>", "<end_of_utterance>", "<image>"),
        "<end_of_utterance>",
    ),
    "qwen3.5 thinking": Family(
        "trl", "qwen3_5_think.jinja", ("<|im_start|>", "<|im_end|>"), "<|im_end|>", tags=TAGS
    ),
    "kimi-k2": Family(
        WRITTEN,
        "kimi_k2.jinja",
        (
            "[BOS]",
            "<|im_system|>",
            "<|im_user|>",
            "<|im_assistant|>",
            "<|im_middle|>",
            "<|im_end|>",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
        "<|im_end|>",
    ),
    "minimax-m2": Family(
        WRITTEN,
        "minimax_m2.jinja",
        ("]~!b[", "]~b]", "[e~["),
        "[e~[",
        tags=("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "olmo3": Family(
        WRITTEN,
        "olmo3.jinja",
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
        stops=("<|endoftext|>",),
        tags=("<functions>", "</functions>", "<function_calls>", "</function_calls>"),
    ),
    "deepseek-v3.1": Family(
        WRITTEN,
        "deepseek_v3_1.jinja",
        (
            "<｜begin▁of▁sentence｜>",
            "<｜end▁of▁sentence｜>",
            "<｜User｜>",
            "<｜Assistant｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁output▁begin｜>",
            "<｜tool▁output▁end｜>",
        ),
        "<｜end▁of▁sentence｜>",
        tags=("<think>", "</think>"),
    ),
    "smollm2": Family("", "", (), "<|im_end|>"),
}


FORMAT_OF = {
    "gemma4": "gemma4",
    "glm4": "glm",
    "gpt-oss": "harmony",
    "lfm2": "pythonic",
    "kimi-k2": "kimi",
    "minimax-m2": "minimax",
    "olmo3": "olmo3",
    "deepseek-v3.1": "deepseek_v31",
}
"""Families whose own notation says where a call ends; hermes does for the others here."""


def template_of(family: Family) -> str:
    if family.package == WRITTEN:
        return (Path(__file__).parent / "templates" / family.file).read_text(encoding="utf-8")
    (place,) = [
        f
        for f in files(family.package) or []
        if f.name == family.file and "chat_templates" in str(f)
    ]
    return Path(str(place.locate())).read_text(encoding="utf-8")


def tokenizer_with(special: tuple[str, ...], eos: str, tags: tuple[str, ...] = ()):
    """A small byte-level BPE with these special tokens, the first one as BOS, and added tokens that
    are not special.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(
        ["user assistant system tool\n\n{}: the answer is a question of name and call " * 20],
        trainer,
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos,
        bos_token=special[0],
        clean_up_tokenization_spaces=False,
    )


@functools.cache
def codec_of(name: str) -> ChatCodec:
    if name == "smollm2":
        return ChatCodec.from_pretrained(cache_root() / "models" / "smollm2-135m-instruct")
    family = FAMILIES[name]
    wrapped = tokenizer_with(family.special, family.eos, family.tags)
    wrapped.chat_template = template_of(family)
    return ChatCodec(
        wrapped,
        tool_format=FORMAT_OF.get(name, "hermes"),
        tool_prompt="none",
        eos_token_ids=[
            wrapped.convert_tokens_to_ids(token) for token in (family.eos, *family.stops)
        ],
    )


WORDS = [
    "hello",
    "  spaced",
    "tab\t",
    "line\nbreak",
    "été",
    "日本語",
    "🙂",
    "12345",
    '{"a": 1}',
    "<b>",
    "x" * 30,
    "end.",
]


def text(rng: random.Random) -> str:
    """Random text that neither begins nor ends with white space (templates may trim it)."""
    return ("a" + " ".join(rng.choice(WORDS) for _ in range(rng.randint(0, 6))) + "z").strip()


def sampled(codec: ChatCodec, rng: random.Random) -> list[int]:
    """What a policy might write: text, not always in canonical tokens, and the end of its turn."""
    ids = codec.encode_text(text(rng))
    if rng.random() < 0.5:
        ids = [piece for letter in text(rng) for piece in codec.encode_text(letter)]
    return [*ids, codec.eos_token_ids[0]]


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("name", FAMILIES)
def test_sampled_ids_never_change_and_every_turn_is_a_prefix_of_the_next(name: str, role: str):
    codec = codec_of(name)
    rng = random.Random(f"{name}{role}")
    for _ in range(CONVERSATIONS):
        context = codec.encode_prompt([{"role": "user", "content": text(rng)}])
        mask = [0] * len(context)
        turns = []
        for _ in range(rng.randint(1, 4)):
            ids = sampled(codec, rng)
            addition = codec.encode_append(ids, [{"role": role, "content": text(rng)}])
            previous_context = list(context)
            context += ids + addition
            mask += [1] * len(ids) + [0] * len(addition)
            assert context[: len(previous_context)] == previous_context
            turns.append(ids)
        flat = [token for ids in turns for token in ids]
        assert [
            token for token, sampled_here in zip(context, mask, strict=True) if sampled_here
        ] == flat


def wants_call(codec: ChatCodec, message: dict) -> bool:
    """Whether the template shows such a message only after a turn with calls."""
    turn = {"role": "assistant", "content": "TURN5d2e81"}
    marked = {**message, "content": "CONTENT8f1b"}
    messages = [{"role": "user", "content": "q"}, turn, marked]
    try:
        text = codec.template.render(messages, (), generation_prompt=True)
    except TemplateError:
        return True
    return text.count(turn["content"]) != 1 or marked["content"] not in text


def last_part(codec: ChatCodec, rendered: str, needle: str) -> str:
    return rendered[rendered.rindex(needle) + len(needle) :]


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_appended_reads_as_the_template_writes_it(name: str, role: str):
    """The appended text, with the end token the policy wrote, is that of a conversation rendered as
    a whole.
    """
    codec = codec_of(name)
    rng = random.Random(f"{role}{name}")
    template = codec.template
    for _ in range(CONVERSATIONS // 3):
        answer = "a" + str(rng.random())
        message = {"role": role, "content": text(rng)}
        history = [{"role": "user", "content": text(rng)}, {"role": "assistant", "content": answer}]
        ids = [*codec.encode_text(answer), codec.eos_token_ids[0]]
        appended = codec.decode(codec.encode_append(ids, [message]), skip_special_tokens=False)
        if wants_call(codec, message):
            # It wants a call before a result, so there is no text turn to compare with; gpt-oss
            # quotes results as JSON.
            assert (
                message["content"] in appended
                or json.dumps(message["content"], ensure_ascii=False) in appended
            )
            continue
        rendered = last_part(
            codec, template.render([*history, message], (), generation_prompt=True), answer
        )
        own_end = next((t for t in codec.control.ids if rendered.startswith(t)), "")
        assert appended == (
            rendered
            if codec.control.ids.get(own_end) in codec.boundary.openings
            else rendered[len(own_end) :]
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_turn_that_was_cut_is_closed_before_the_next_message(name: str):
    codec = codec_of(name)
    message = [{"role": "user", "content": "go on"}]
    closed = codec.encode_append([*codec.encode_text("done"), codec.eos_token_ids[0]], message)
    cut = codec.encode_append(codec.encode_text("cut of"), message)
    assert cut in (closed, [*cut[:1], *closed])


def test_the_known_boundary_of_qwen():
    """verl's known value: after the end of a turn the template puts a newline, with mask 0."""
    codec = codec_of("qwen2.5")
    end = codec.eos_token_ids[0]
    addition = codec.encode_append([1, end], [{"role": "user", "content": "hi"}])
    assert codec.decode(addition, skip_special_tokens=False).startswith(
        "\n<|im_start|>user\nhi<|im_end|>\n"
    )


def test_thinking_of_earlier_turns_stays_though_qwen3_would_strip_it():
    codec = codec_of("qwen3")
    prompt = codec.encode_prompt([{"role": "user", "content": "q"}])
    ids = [*codec.encode_text("<think>\nhm\n</think>\n\nanswer"), codec.eos_token_ids[0]]
    context = prompt + ids + codec.encode_append(ids, [{"role": "user", "content": "more"}])
    assert "<think>\nhm\n</think>" in codec.decode(context, skip_special_tokens=False)


def call_ids(codec: ChatCodec, said: str, results: list[dict]) -> list[str]:
    """Ids that Mistral's template writes with these results of a turn."""
    ids = [*codec.encode_text(said), codec.eos_token_ids[0]]
    text = codec.decode(codec.encode_append(ids, results), skip_special_tokens=False)
    return re.findall(r'"call_id": "(\w{9})"', text)


def test_every_tool_result_has_a_call_id_of_its_own():
    codec = codec_of("mistral")
    results = [{"role": "tool", "content": "same", "name": "f"}] * 3
    first = call_ids(codec, "one", results)
    second_ids = call_ids(codec, "two", results)
    assert len({*first, *second_ids}) == 6
    assert call_ids(codec, "one", results) == first, "the same turn is appended to in the same way"


def test_a_tool_results_call_id_is_that_of_its_call(monkeypatch):
    codec = codec_of("mistral")
    rendered = []
    render = codec.template.render

    def listen(messages, tools, **arguments):
        rendered.append(messages)
        return render(messages, tools, **arguments)

    monkeypatch.setattr(codec.template, "render", listen)
    results = [
        {"role": "tool", "content": "a"},
        {"role": "tool", "content": "b", "tool_call_id": "mine56789"},
    ]
    written = call_ids(codec, "x", results)
    _, assistant, *_ = rendered[-1]
    assert [call["id"] for call in assistant["tool_calls"]] == written
    assert written[1] == "mine56789"


def test_results_with_and_without_a_call_id_of_their_own_may_follow_each_other():
    codec = ChatCodec(codec_of("mistral").tokenizer, tool_prompt="none")
    assert call_ids(
        codec, "x", [{"role": "tool", "content": "a", "tool_call_id": "mine56789"}]
    ) == ["mine56789"]
    assert len(call_ids(codec, "x", [{"role": "tool", "content": "a"}])) == 1
