"""The contexts of a diagnosis: the same from a step's groups, from the run folder, and from the
recorded evidence.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jax_agent_rl.agreement.subject import Context, collect_contexts
from jax_agent_rl.observe.run_dir import RunDir, read_trajectories
from jax_agent_rl.runtime.diagnosis import record_contexts
from jax_agent_rl.types import FinishReason, Group, StopReason, TokenOutput, Trajectory, Turn


def turn(
    ids: tuple[int, ...], versions: tuple[int, ...], appended: tuple[int, ...] = (), **fields
) -> Turn:
    output = TokenOutput(
        token_ids=ids,
        log_probs=tuple(-0.125 * i for i in ids),
        policy_versions=versions,
        stop_reason=StopReason.STOP,
        context_digest="",
        **fields,
    )
    return Turn(output=output, appended_ids=appended)


TURNS = [
    turn((5, 6, 7), (3, 3, 3), (8, 9)),
    turn((10, 11), (3, 4), (12,)),
    turn((13, 14, 15), (4, 4, 4), constrained=(False, True, False)),
]


def trajectory(name: str = "t0") -> Trajectory:
    segment = Trajectory.from_turns(
        prompt_ids=(1, 2), turns=TURNS[:1], trajectory_id=name, group_id="g", agent_name="a",
        finish_reason=FinishReason.ANSWER,
    )  # fmt: skip
    return Trajectory.from_turns(
        prompt_ids=(1, 2, 3, 4), turns=TURNS, trajectory_id=name, group_id="g", agent_name="a",
        finish_reason=FinishReason.ANSWER, segments=(segment,),
    )  # fmt: skip


def same(a: Context, b: Context) -> bool:
    return json.dumps(a.to_json()) == json.dumps(b.to_json())


def test_turns_begin_where_sampled_and_inserted_ids_take_turns():
    _, context = collect_contexts([Group(group_id="g", trajectories=(trajectory(),))], 0)
    assert context.starts == (4, 7, 9, 11, 12, 15)
    assert context.prompt == 4
    assert [context.sampled_from(i) for i in (2, 4, 6, 8, 10, 14)] == [0, 4, 4, 7, 9, 12]
    assert context.cut(10).starts == (4, 7, 9)


@pytest.mark.parametrize(
    ("since", "before", "expected"),
    [
        (
            0,
            None,
            [4, 5, 6, 9, 12, 14],
        ),  # 10 is of another version than its turn begins with, 13 was constrained
        (4, None, [12, 14]),
        (3, 4, [4, 5, 6, 9]),
        (5, None, []),
    ],
)
def test_compared_are_tokens_of_the_wanted_versions(
    since: int, before: int | None, expected: list[int]
):
    contexts = collect_contexts(
        [Group(group_id="g", trajectories=(trajectory(),))], since, before=before
    )
    positions = [context.at.tolist() for context in contexts if len(context.token_ids) > 10]
    assert positions == ([expected] if expected else [])


def test_a_run_folder_gives_the_contexts_of_each_version(tmp_path: Path):
    group = Group(group_id="g", trajectories=(trajectory(),))
    learner = [np.arange(10.0, 10.0 + sum(sum(s.loss_mask) for s in trajectory().sequences))]
    RunDir(tmp_path).add_trajectories(
        1, "train", group.trajectories, token_values={"t0": {"old_logprobs": learner[0]}}
    )
    (record,) = read_trajectories(tmp_path / "trajectories.jsonl")
    pairs = [pair for part in (*record["segments"], record) for pair in record_contexts(part)]
    for version in (3, 4):
        expected = collect_contexts([group], version, learner, before=version + 1)
        contexts = [context for of, context in pairs if of == version]
        assert len(contexts) == len(expected)
        assert all(map(same, contexts, expected))
        assert all(context.learner is not None for context in contexts)


def test_evidence_keeps_contexts_as_they_are_and_earlier_files_are_read():
    _, context = collect_contexts([Group(group_id="g", trajectories=(trajectory(),))], 0)
    context = replace(context, breach=9)
    saved = json.loads(json.dumps(context.to_json()))
    assert same(Context.from_json(saved), context)
    for name in ("starts", "breach", "supports"):
        saved.pop(name)
    earlier = Context.from_json(saved)
    assert earlier.starts == ()
    assert earlier.breach is None
    assert earlier.sampled_from(6) == 0
