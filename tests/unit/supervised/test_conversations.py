"""Rows to ids and loss masks. The reference is the template's own rendering of the whole
conversation.
"""

from __future__ import annotations

import json
import random
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.config.commands import ConversationsConfig, SftDataConfig
from jax_agent_rl.config.task import DataSource
from jax_agent_rl.errors import DataError
from jax_agent_rl.supervised.conversations import Encoder, encode_conversation
from tests.messages import raises
from tests.tiny_chat import tokenizer
from tests.unit.chat.test_template_families import FAMILIES, codec_of, text

OPEN_THINKING = {
    "deepseek": "</think>\n\n",
    "minimax-m2": "</think>\n\n",
    "nemotron3": "</think>",
    "qwen3.5 thinking": "\n</think>\n\n",
}
"""Families whose generation prompt opens a think block, and how a turn without reasoning closes it.
"""
REWRITTEN = {"qwen3", "qwen3.5", "glm4", "gpt-oss", "gemma4", "qwen3-vl"}
"""Families whose template writes the last turn otherwise than earlier ones."""


def by_turn(ids: list[int], mask: list[int]) -> list[list[int]]:
    """The runs of ids with loss."""
    runs = []
    for loss, run in groupby(zip(ids, mask, strict=True), lambda item: item[1]):
        if loss:
            runs.append([token for token, _ in run])
    return runs


def conversation(rng: random.Random, turns: int = 3) -> list[dict[str, str]]:
    messages = []
    for _ in range(turns):
        messages.append({"role": "user", "content": text(rng)})
        messages.append({"role": "assistant", "content": text(rng)})
    return messages


@pytest.mark.parametrize("name", FAMILIES)
def test_only_the_assistants_turns_carry_loss(name: str):
    codec = codec_of(name)
    rng = random.Random(name)
    for _ in range(20):
        messages = conversation(rng)
        ids, mask = encode_conversation(
            codec, messages, (), lambda _, message: message["role"] == "assistant"
        )
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        turns = by_turn(ids, mask)
        assert len(turns) == len(said)
        for content, turn, last in zip(said, turns, [False, False, True], strict=True):
            assert codec.decode(turn).rstrip("\n").endswith(content) or content in codec.decode(
                turn
            )
            # GLM ends a turn by opening the next message, so that nothing ends the last one
            assert turn[-1] in {*codec.eos_token_ids, *codec.boundary.ends} or (
                last and name == "glm4"
            )


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - OPEN_THINKING.keys() - REWRITTEN))
def test_the_ids_read_as_the_template_writes_the_whole_conversation(name: str):
    codec = codec_of(name)
    rng = random.Random(name)
    for _ in range(20):
        messages = conversation(rng)
        ids, _ = encode_conversation(codec, messages, (), lambda *_: True)
        text = codec.template.render(messages, (), generation_prompt=False)
        read = codec.decode(ids, skip_special_tokens=False)
        assert text.startswith(read)
        assert text.removeprefix(read).strip() in (
            "",
            "<|end|>",
        )  # Phi closes the conversation, too


@pytest.mark.parametrize("name", OPEN_THINKING)
def test_a_turn_closes_the_think_block_that_its_prompt_opens(name: str):
    codec = codec_of(name)
    turn = codec.decode(codec.encode_turn({"role": "assistant", "content": "4"}))
    assert turn == f"{OPEN_THINKING[name]}4"


def test_reasoning_stands_in_the_think_block_of_its_prompt():
    codec = codec_of("deepseek")
    turn = codec.encode_turn({"role": "assistant", "content": "4", "reasoning_content": "2 + 2\n"})
    assert codec.decode(turn) == "2 + 2\n</think>\n\n4"


def test_calls_follow_the_template_and_results_carry_no_loss():
    codec = codec_of("qwen2.5")
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    row = {
        "messages": [
            {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "2"},
            {"role": "assistant", "content": "It is 2."},
        ]
    }
    sequence = encoder(codec).conversation(row)
    turns = by_turn(sequence.token_ids.tolist(), sequence.loss_mask.tolist())
    assert [codec.decode(turn, skip_special_tokens=False) for turn in turns] == [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
        "It is 2.<|im_end|>",
    ]


def encoder(
    codec: ChatCodec | None = None, *, longest: int = 1000, pairs: bool = False, **data
) -> Encoder:
    kind = ConversationsConfig if pairs else SftDataConfig
    config = kind.model_validate({"train": "unused.jsonl", **data})
    return Encoder(codec=codec or tiny(), config=config, pack_length=longest)


def tiny() -> ChatCodec:
    return ChatCodec(tokenizer())


def trained_text(sequence) -> list[str]:
    codec = tiny()
    return [
        codec.decode(turn)
        for turn in by_turn(sequence.token_ids.tolist(), sequence.loss_mask.tolist())
    ]


MESSAGES = [
    {"role": "system", "content": "answer"},
    {"role": "user", "content": "one plus two"},
    {"role": "assistant", "content": "add", "weight": 0},
    {"role": "tool", "content": "three"},
    {"role": "assistant", "content": "the answer is three"},
]


@pytest.mark.parametrize(
    ("train_on", "trained"),
    [
        (("assistant",), ["the answer is three"]),
        (("tool",), ["\nuser:<tool_response>\nthree\n</tool_response>\nassistant:"]),
        (
            ("tool", "assistant"),
            ["\nuser:<tool_response>\nthree\n</tool_response>\nassistant:the answer is three"],
        ),
    ],
)
def test_roles_and_weights_choose_what_carries_loss(train_on, trained):
    assert trained_text(encoder(train_on=train_on).conversation({"messages": MESSAGES})) == trained


def test_the_first_id_never_carries_loss():
    sequence = encoder(train_on=("user",)).conversation({"messages": MESSAGES})
    assert not sequence.loss_mask[0] and sequence.loss_mask[1]


def write(folder: Path, rows: list[dict], name: str = "rows.jsonl") -> list[DataSource]:
    file = folder / name
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [DataSource(path=str(file))]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_only_the_completion_of_a_prompt_carries_loss(tmp_path: Path, name: str):
    rows = [
        {"prompt": MESSAGES[1:4], "completion": MESSAGES[4:]},
        {"prompt": MESSAGES[:2], "completion": MESSAGES[4:]},
    ]
    examples = encoder().examples(write(tmp_path, rows, name))
    assert [trained_text(sequence) for (sequence,) in examples] == [["the answer is three"]] * 2


def test_a_preference_finds_its_prompt_where_both_begin_alike(tmp_path: Path):
    good = {"role": "assistant", "content": "three"}
    bad = {"role": "assistant", "content": "add"}
    rows = [{"chosen": [*MESSAGES[:4], good], "rejected": [*MESSAGES[:4], bad]}]
    rows += [{"prompt": MESSAGES[:4], "chosen": [good], "rejected": [bad]}]
    for pair in encoder(pairs=True).pairs(write(tmp_path, rows)):
        assert [trained_text(pair.chosen[0]), trained_text(pair.rejected[0])] == [
            ["three"],
            ["add"],
        ]


def trajectory(group: str, number: int, reward: float, *, sequence: int = 0, **fields) -> dict:
    ids = {
        "prompt_ids": [1, 2, 3],
        "response_ids": [10 + number, 20, 30 + sequence],
        "loss_mask": [1, 0, 1],
    }
    return {
        **ids,
        "group_id": group,
        "trajectory_id": f"{group}-{number}",
        "reward": reward,
        **fields,
    }


ROLLOUTS = [
    trajectory("a", 0, 0.0),
    trajectory("a", 1, 1.0),
    trajectory("a", 1, 1.0, sequence=1),
    trajectory("a", 2, 1.0, no_loss="timeout"),
    trajectory("b", 3, 0.5),
    trajectory("b", 4, 0.5),
]


def first_ids(examples) -> list[list[int]]:
    return [[int(sequence.token_ids[3]) for sequence in example] for example in examples]


def test_rejection_sampling_keeps_the_best_of_each_group(tmp_path: Path):
    sources = write(tmp_path, ROLLOUTS)
    assert first_ids(encoder().examples(sources)) == [[11, 11], [10], [13], [14]]
    best = encoder(best_of=1).examples(sources)
    assert first_ids(best) == [[11, 11], [13]]
    assert best[0][0].loss_mask.tolist() == [False, False, False, True, False, True]
    assert first_ids(encoder(best_of=1, min_reward=0.9).examples(sources)) == [[11, 11]]


def test_the_best_and_the_worst_of_a_group_are_a_preference(tmp_path: Path):
    (pair,) = encoder(pairs=True).pairs(write(tmp_path, ROLLOUTS))
    assert first_ids([pair.chosen, pair.rejected]) == [[11, 11], [10]]


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"text": "x"}, {"key": "line 1", "value": "'text'", "fix": "messages"}),
        ({"messages": MESSAGES[:2]}, {"fix": "message of the assistant"}),
        ({"messages": MESSAGES[2:]}, {"value": "begins"}),
        (
            {"messages": [*MESSAGES, MESSAGES[4]]},
            {"key": "messages 4 and 5", "value": "assistant's"},
        ),
        ({"messages": MESSAGES[:3]}, {"value": "carries loss", "fix": "role assistant"}),
        ({"messages": [{"content": "x"}]}, {"value": "'role' is missing"}),
        (
            trajectory("a", 0, 1.0) | {"response_ids": [5] * 3000, "loss_mask": [1] * 3000},
            {"value": "set learner.pack_length >= 3003"},
        ),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path: Path, row: dict, named: dict):
    with raises(DataError, **named):
        encoder().examples(write(tmp_path, [row]))


def test_long_rows_are_left_out_on_request_but_not_all(tmp_path: Path):
    long = trajectory("c", 5, 1.0) | {"response_ids": [5] * 300, "loss_mask": [1] * 300}
    sources = write(tmp_path, [*ROLLOUTS, long])
    assert len(encoder(max_length=100).examples(sources)) == 4
    with raises(DataError, fix=("data.min_reward", "data.max_length")):
        encoder(max_length=3).examples(sources)


def test_lines_of_a_runs_trajectories_are_read_with_all_their_contexts(tmp_path: Path):
    from jax_agent_rl.observe.run_dir import trajectory_record
    from tests.trajectories import random_groups

    trajectories = [t for group in random_groups(0) for t in group.trajectories]
    rows = [trajectory_record(t, step=1, split="train") for t in trajectories]
    examples = encoder().examples(write(tmp_path, rows))
    ids = {tuple(s.token_ids.tolist()) for example in examples for s in example}
    assert ids == {tuple(s.prompt_ids + s.response_ids) for t in trajectories for s in t.sequences}
    assert sum(s.num_scored for example in examples for s in example) == sum(
        int(np.sum(s.loss_mask)) for t in trajectories for s in t.sequences
    )
