"""Whatever an agent does to its context, each id reaches the learner with the experts it chose,
reported once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from jax_agent_rl.agents import ToolAgent
from jax_agent_rl.learner.packing import pack
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.tools import ToolRegistry, function_tool
from jax_agent_rl.types import Fork, RoutedExperts, SamplingParams, TokenOutput, Trajectory
from tests.agent_testbed import AgentHarness, branch_request, session_trajectory
from tests.fakes import ScriptedBackend
from tests.unit.agents.test_recorder import MORE, QUESTION, recorder_of, sampling, sent_back, smollm


def chosen(ids: Sequence[int]) -> np.ndarray:
    """The experts of a context: they tell the id and the position."""
    return np.stack([np.array(ids) % 256, np.arange(len(ids))], axis=-1).astype(np.uint8)[:, None]


class RoutingBackend(ScriptedBackend):
    async def generate(self, request: GenerateRequest) -> TokenOutput:
        output = await super().generate(request)
        start = request.routed_experts_prompt_start
        fed = [*request.prompt_ids, *output.token_ids][:-1]
        return replace(output, routed_experts=RoutedExperts.of(start, chosen(fed)[start:]))


@function_tool
def echo(word: str) -> str:
    """Says it again."""
    return word


def stage(turns: int, **limits) -> AgentHarness:
    said = [f'<call>echo {{"word": "w{number}"}}</call>' for number in range(turns - 1)]
    limits = {"max_assistant_turns": 20, "max_user_turns": 20, **limits}
    return AgentHarness(
        ToolAgent,
        [*said, "done"],
        backend=RoutingBackend,
        shared={"tools": ToolRegistry([echo])},
        **limits,
    )


def assert_known(trajectories: Sequence[Trajectory], *, share_prefixes: bool = False) -> None:
    """Every id that was fed has its experts; only the last of a sequence never was."""
    batch = pack(trajectories, pack_length=250, share_prefixes=share_prefixes)
    assert batch.routed_experts is not None
    sequences = [sequence for trajectory in trajectories for sequence in trajectory.sequences]
    packed_sequences = itertools.chain.from_iterable(batch.packed)
    for sequence, place in zip(sequences, packed_sequences, strict=True):
        ids = [*sequence.prompt_ids, *sequence.response_ids]
        path = place.path[: len(ids)]
        first = len(ids) - len(path)
        if not share_prefixes:
            path = np.arange(path[0] - first, path[-1] + 1)
            first = 0
        np.testing.assert_array_equal(
            batch.routed_experts[place.row, path[:-1]], chosen(ids)[first:-1]
        )


def reported(requests: Sequence[GenerateRequest], turns: Sequence[TokenOutput]) -> int:
    return sum(turn.routed_experts.shape[0] for turn in turns if turn.routed_experts)


async def test_a_trajectory_of_many_turns_reports_every_position_once():
    scene = stage(4)
    trajectory = await scene.run()
    assert trajectory.num_turns == 4
    assert_known([trajectory])
    outputs = [turn.output for turn in trajectory.turns]
    assert (
        reported(scene.backend.requests, outputs)
        == len(trajectory.prompt_ids) + len(trajectory.response_ids) - 1
    )
    assert [request.routed_experts_prompt_start > 0 for request in scene.backend.requests] == [
        False,
        True,
        True,
        True,
    ]


@pytest.mark.parametrize("window", [1, 2])
async def test_with_a_history_window_each_context_has_its_own(window: int):
    assert_known([await stage(5, history_window=window).run()])


@pytest.mark.parametrize(("turns", "tokens"), [(1, 0), (2, 2), (0, 2)])
async def test_a_branch_has_those_it_inherits(turns: int, tokens: int):
    scene = stage(4)
    parent = await scene.run()
    fork = Fork(tree_id="t", parent_id="t", turns=turns, tokens=tokens)
    branch = await scene.agent.play(
        branch_request(parent, fork, SamplingParams(max_tokens=30, seed=1))
    )
    assert_known([parent, branch])
    assert_known([parent, branch], share_prefixes=True)


async def test_the_segments_of_a_session_have_those_of_the_turns_before_them():
    codec = smollm()
    recorder = recorder_of(codec, ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"])
    replies = [
        codec.encode_markup(text) for text in ("one<|im_end|>", "two<|im_end|>", "three<|im_end|>")
    ]
    backend = RoutingBackend(
        codec, lambda request: replies[int(request.request_id.rpartition("/")[2]) - 1]
    )
    recorder.context = replace(recorder.context, client=LLMServerClient([AsyncServer(backend)]))
    first = await recorder.chat([QUESTION], sampling=sampling())
    history = [QUESTION, sent_back(first)]
    await recorder.chat([*history, MORE], sampling=sampling())
    await recorder.chat(
        [*history, {"role": "user", "content": "other"}], tools=[], sampling=sampling()
    )
    trajectory = session_trajectory(recorder)
    assert len(trajectory.sequences) == 2
    assert_known([trajectory])
