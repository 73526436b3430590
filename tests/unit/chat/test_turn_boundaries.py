"""What follows a sampled turn is what the template writes there, whichever stop token the turn
ended with.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from jax_agent_rl.agents.context import AgentContext
from jax_agent_rl.agents.episode import Episode
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.chat.formats import get_format
from jax_agent_rl.config import AgentConfig
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.types import FinishReason, SamplingParams
from tests.agent_testbed import episode_request
from tests.fakes import ScriptedBackend
from tests.unit.chat.test_template_families import (
    FAMILIES,
    codec_of,
    template_of,
    tokenizer_with,
    wants_call,
)

WORD = "WORD5d2e81"
CALL = {"id": "0" * 9, "type": "function", "function": {"name": "f", "arguments": {"a": WORD}}}
NEW = {
    "user": {"role": "user", "content": "more"},
    "tool": {"role": "tool", "content": "42", "name": "f", "tool_call_id": "0" * 9},
}
STOPS = [(name, stop) for name, family in FAMILIES.items() for stop in (family.eos, *family.stops)]


def written_after_turn(codec: ChatCodec, role: str) -> str:
    """Return what the template writes after a turn, in a conversation rendered as a whole.

    It begins at the end of the turn's text or of its call.
    """
    calls = wants_call(codec, NEW[role])
    if calls:
        turn: dict = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    else:
        turn = {"role": "assistant", "content": WORD}
    messages = [{"role": "user", "content": "q"}, turn, NEW[role]]
    text = codec.template.render(messages, (), generation_prompt=True).rpartition(WORD)[2]
    if not calls:
        return text
    call_end = get_format(codec.tool_format).call_end
    if call_end and call_end in text:
        text = text.partition(call_end)[2]
    return text[codec.control.first(text).start() :]


@pytest.mark.parametrize("role", NEW)
@pytest.mark.parametrize(("name", "stop"), STOPS)
def test_what_follows_a_stop_token_is_what_the_template_writes(name: str, stop: str, role: str):
    codec = codec_of(name)
    text = codec.encode_text("x")
    end = codec.tokenizer.convert_tokens_to_ids(stop)
    sampled = [*text, end]
    appended = codec.encode_append(sampled, [NEW[role]])
    follows = codec.decode(appended, skip_special_tokens=False)
    expected = written_after_turn(codec, role)
    if codec.replaces_end(sampled, appended):
        assert follows == expected
        assert end in codec.boundary.openings
        return
    begins = codec.control.first(expected)
    template_ends = begins.start() == 0 and codec.control.ids[begins.group()] in codec.boundary.ends
    if expected.startswith(stop):
        assert follows == expected.removeprefix(stop), "it is not written twice"
    elif template_ends:
        assert follows == expected.removeprefix(begins.group()), (
            "the model ended the turn, if by another token"
        )
    else:
        assert follows == expected, "what opens the next message is there"


@pytest.mark.parametrize("role", NEW)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_turn_that_was_cut_is_followed_by_all_that_the_template_writes(name: str, role: str):
    codec = codec_of(name)
    appended = codec.encode_append(codec.encode_text("x"), [NEW[role]])
    assert codec.decode(appended, skip_special_tokens=False) == written_after_turn(codec, role)
    assert not codec.replaces_end(codec.encode_text("x"), appended)


@pytest.mark.parametrize(
    ("name", "ends", "openings"),
    [
        ("qwen3", {"<|im_end|>"}, set()),
        ("gpt-oss", {"<|end|>", "<|call|>"}, set()),
        ("llama3.1", {"<|eot_id|>"}, set()),
        ("glm4", set(), {"<|user|>", "<|observation|>"}),
        ("gemma4", {"<turn|>"}, {"<|tool_response>"}),
        ("smolvlm", {"<end_of_utterance>"}, set()),
    ],
)
def test_ends_of_turns_and_openings_of_messages_are_told_apart(name: str, ends, openings):
    codec = codec_of(name)
    assert codec.boundary.ends == {codec.control.ids[token] for token in ends}
    assert codec.boundary.openings == {codec.control.ids[token] for token in openings}


def test_a_call_that_the_template_does_not_write_ends_no_turn():
    """DeepSeek R1's template cannot write arguments that are an object."""
    like = FAMILIES["deepseek"]
    tokenizer = tokenizer_with(like.special, like.eos)
    tokenizer.chat_template = template_of(replace(like, file="deepseek_r1_distill.jinja"))
    codec = ChatCodec(tokenizer, tool_format="auto")
    assert codec.boundary.ends == {codec.control.ids[like.eos]}


def glm(*tokens: str) -> list[int]:
    return [codec_of("glm4").control.ids[token] for token in tokens]


@pytest.mark.parametrize(
    ("stop", "role", "expected_ids", "opening"),
    [
        ("<|observation|>", "user", [], "<|user|>"),
        ("<|user|>", "tool", [], "<|observation|>"),
        ("<|observation|>", "tool", ["<|observation|>"], None),
        ("<|user|>", "user", ["<|user|>"], None),
        ("<|endoftext|>", "user", ["<|endoftext|>"], "<|user|>"),
        ("<|endoftext|>", "tool", ["<|endoftext|>"], "<|observation|>"),
    ],
)
async def test_glm_opens_the_message_that_follows_and_no_other(
    stop: str, role: str, expected_ids, opening
):
    """verl's known value: ids 1 and <|observation|> become 1 and <|user|>, and mask 1 1 becomes 1
    0.
    """
    codec = codec_of("glm4")
    (said,) = codec.encode_text("x")
    backend = ScriptedBackend(codec, lambda request: [said, *glm(stop)])
    context = AgentContext(
        client=LLMServerClient([AsyncServer(backend)]),
        codec=codec,
        limits=AgentConfig(tool_prompt="none"),
        max_model_len=500,
    )
    row = {"prompt": [{"role": "user", "content": "q"}]}
    request = episode_request(row, SamplingParams(max_tokens=2))
    episode = Episode(context, request, agent_name="a", tools={})
    await episode.generate()
    tokens_left = episode.tokens_left
    assert episode.append([NEW[role]])
    await episode.generate()
    trajectory = episode.finish(FinishReason.ANSWER)
    expected_response = [said, *glm(*expected_ids)]
    inserted = trajectory.turns[0].appended_ids
    assert list(trajectory.response_ids[: len(expected_response)]) == expected_response
    assert trajectory.response_mask[: len(expected_response) + len(inserted)] == (1,) * len(
        expected_response
    ) + (0,) * len(inserted)
    assert (glm(opening)[0] == inserted[0]) if opening else (inserted[0] not in codec.control)
    assert list(backend.requests[1].prompt_ids) == [
        *trajectory.prompt_ids,
        *expected_response,
        *inserted,
    ]
    assert episode.tokens_left == tokens_left - len(inserted) - len(expected_response)


def test_a_turn_of_a_stop_token_alone_keeps_it():
    """A turn holds a sampled id, at least."""
    codec = codec_of("glm4")
    ids = codec.encode_append(glm("<|observation|>"), [NEW["user"]])
    assert ids[0] == glm("<|user|>")[0]
    assert not codec.replaces_end(glm("<|observation|>"), ids)


def test_gemma_opens_a_tool_result_after_the_end_of_a_turn():
    codec = codec_of("gemma4")
    call = codec.encode_text("call")
    stops = {stop: codec.control.ids[stop] for stop in ("<turn|>", "<|tool_response>")}
    next_message = {
        stop: codec.decode(
            codec.encode_append([*call, end], [NEW["tool"]]), skip_special_tokens=False
        )
        for stop, end in stops.items()
    }
    assert next_message["<turn|>"].startswith("<|tool_response>response:f{")
    assert next_message["<|tool_response>"].startswith("response:f{")


@pytest.mark.parametrize(
    ("name", "tag"), [("qwen3", ""), ("deepseek", "<think>"), ("nemotron3", "<think>")]
)
def test_a_turn_begins_in_a_think_block_that_the_generation_prompt_opened(name: str, tag: str):
    codec = codec_of(name)
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert bool(codec.boundary.think_tag) == bool(tag)
    cut = codec.parse_reply(codec.encode_text(f"maybe {call}"))
    assert len(cut.tool_calls) == (0 if tag else 1)
    reply = codec.parse_reply(codec.encode_text(f"maybe</think>so {call}"))
    assert (reply.reasoning, reply.content, len(reply.tool_calls)) == ("maybe", "so", 1)


@pytest.mark.parametrize("name", ["smolvlm", "idefics3"])
def test_a_template_that_reads_parts_alone_is_given_parts(name: str):
    codec = codec_of(name)
    ids = codec.encode_prompt(
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a question"}]
    )
    text = codec.decode(ids, skip_special_tokens=False)
    assert (
        "System: be brief<end_of_utterance>\nUser: a question<end_of_utterance>\nAssistant:" in text
    )
