"""What a template writes around inserted messages is told from what they say, in every family."""

import pytest

from jax_agent_rl.chat.markup import TemplateMarkup
from jax_agent_rl.errors import TemplateError
from tests.unit.chat.test_template_families import FAMILIES, codec_of

SAID = "The mug weighs 350 grams\nand costs 57 euros"
SHOWS_CALL_IDS = ("mistral", "tool")
"""Its template writes behind a result which call it answers; this counts as text."""


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("ended", [True, False], ids=["ended", "cut"])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_left_of_an_inserted_message_is_what_it_says(name: str, ended: bool, role: str):
    codec = codec_of(name)
    markup = codec.append_markup()
    end = codec.eos_token_ids[:1] if ended else []
    sampled_ids = [*codec.encode_text("so"), *end]
    try:
        appended_ids = codec.encode_append(sampled_ids, [{"role": role, "content": SAID}])
    except TemplateError:
        pytest.skip(f"{name} has no messages of role {role}")
    is_text = markup.is_text(appended_ids)
    text_ids = [token for token, chosen in zip(appended_ids, is_text, strict=True) if chosen]
    text = codec.decode(text_ids).strip()
    if (name, role) == SHOWS_CALL_IDS:
        text = text.partition(', "call_id"')[0]
    assert text in (SAID, SAID.replace("\n", "\\n"))


@pytest.mark.parametrize("name", ["qwen3", "smollm2", "llama3.1"])
def test_what_stands_between_two_results_is_markup(name: str):
    codec = codec_of(name)
    messages = [{"role": "tool", "content": content} for content in ("57 euros", "350 grams")]
    appended_ids = codec.encode_append(codec.encode_text("so"), messages)
    is_text = codec.append_markup().is_text(appended_ids)
    text_ids = [token for token, chosen in zip(appended_ids, is_text, strict=True) if chosen]
    text = codec.decode(text_ids)
    assert "57 euros" in text and "350 grams" in text
    assert len(text) <= len("57 euros350 grams") + 4


def test_text_that_reads_like_markup_is_cut_at_the_ends_alone():
    markup = TemplateMarkup(
        control_ids=frozenset({1, 2}),
        openings=frozenset({(2, 9, 1, 7), (9, 1, 7)}),
        separators=frozenset({(1, 7)}),
        closings=frozenset({(2, 8)}),
    )
    ids = [9, 1, 7, 20, 7, 8, 1, 7, 21, 2, 8]
    assert markup.is_text(ids) == [False] * 3 + [True] * 3 + [False] * 2 + [True] + [False] * 2
    assert markup.is_text([20, 21]) == [True, True]
    assert markup.is_text([]) == []
