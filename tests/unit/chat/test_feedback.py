"""The prompt under which a policy teaches itself, in every family of templates."""

from dataclasses import replace

import pytest

from jax_agent_rl.chat.feedback import feedback_of, with_teacher_prompt
from jax_agent_rl.errors import TemplateError
from tests.trajectories import call, session, trajectory
from tests.unit.chat.test_template_families import FAMILIES, codec_of

QUESTION = {"role": "user", "content": "What does the mug weigh?"}
SAID = "weigh: no item 'Mug' <|im_end|>"


@pytest.mark.parametrize("name", FAMILIES)
def test_feedback_is_a_message_before_the_generation_prompt(name: str):
    codec = codec_of(name)
    prompt_ids = codec.encode_prompt([QUESTION])
    inserted = codec.insert_message(prompt_ids, SAID)
    if inserted is None:
        with pytest.raises(TemplateError):
            codec.encode_prompt([QUESTION, QUESTION])
        return
    text = codec.decode(inserted, skip_special_tokens=False)
    before, _, behind = text.partition(SAID)
    prompt = codec.decode(prompt_ids, skip_special_tokens=False)
    assert before.startswith(prompt.partition(QUESTION["content"])[0] + QUESTION["content"])
    assert behind.strip() and prompt.endswith(behind)
    # Its control tokens are the template's: what the feedback says stays text.
    of_plain_text = codec.insert_message(prompt_ids, "plain")
    assert [i for i in inserted if i in codec.control] == [
        i for i in of_plain_text if i in codec.control
    ]
    try:
        as_rendered = codec.encode_prompt([QUESTION, {"role": "user", "content": SAID}])
    except TemplateError:
        return
    if name in ("qwen2.5", "qwen3", "smollm2", "llama3.1"):
        assert inserted == as_rendered


def test_a_prompt_of_another_end_takes_no_message():
    codec = codec_of("qwen2.5")
    assert codec.insert_message(codec.encode_text("What does the mug weigh?"), SAID) is None


def test_feedback_is_what_failing_calls_and_the_reward_function_said():
    failed = replace(call(error="raised"), name="weigh", observation="no item 'Mug'")
    member = trajectory(
        [3], [4, 7, 5, 8, 6], mask=[1, 0, 1, 0, 1], calls=[[failed, call()], [failed]]
    )
    assert feedback_of(member) == "weigh: no item 'Mug'"
    judged = replace(member, feedback="The unit is missing.")
    assert feedback_of(judged) == "weigh: no item 'Mug'\nThe unit is missing."
    assert feedback_of(trajectory([3], [4])) == ""


def taught(member, **changes):
    limits = {"template": "Note: {feedback}!", "max_feedback_length": 40, "max_length": 1000}
    return with_teacher_prompt(member, codec_of("qwen2.5"), **(limits | changes))


def test_only_what_can_be_taught_has_a_teacher_prompt():
    codec = codec_of("qwen2.5")
    prompt_ids = codec.encode_prompt([QUESTION])
    member = replace(trajectory(prompt_ids, [4, 5]), feedback="wrong {feedback}")
    with_prompt = taught(member)
    written = codec.decode(with_prompt.teacher_prompt_ids, skip_special_tokens=False)
    assert "Note: wrong {feedback}!<|im_end|>" in written
    assert with_prompt.prompt_ids == member.prompt_ids

    without = [
        replace(member, feedback=""),
        replace(member, prompt_media={"image": ("picture",)}),
        replace(member, history_window=1),
        replace(session(), feedback="wrong"),
        replace(trajectory([3], [4]), feedback="wrong"),
    ]
    assert [taught(other).teacher_prompt_ids for other in without] == [()] * len(without)
    length = len(with_prompt.teacher_prompt_ids) + 2
    assert taught(member, max_length=length).teacher_prompt_ids
    assert not taught(member, max_length=length - 1).teacher_prompt_ids


def test_long_feedback_loses_its_middle():
    codec = codec_of("qwen2.5")
    member = replace(
        trajectory(codec.encode_prompt([QUESTION]), [4]), feedback="first " + "word " * 500 + "last"
    )
    text = codec.decode(taught(member).teacher_prompt_ids)
    assert "first" in text and "last!" in text
    assert text.count("word") < 20
