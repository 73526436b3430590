"""The gradient of a whole session, recorded over HTTP: compacted, with sub-agents, 24 calls.

The expected gradient is transformers' in float64: one full pass for each call the engine answered,
over exactly the ids it was asked with, and autograd of the log-probs of what it answered. Nothing
of it knows segments, rows or prefixes.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

openai = pytest.importorskip("openai")
torch = pytest.importorskip("torch")

from jax_agent_rl.config import AlgorithmConfig, LearnerConfig  # noqa: E402
from jax_agent_rl.learner.learner import Learner  # noqa: E402
from jax_agent_rl.models.hf import save_hf  # noqa: E402
from jax_agent_rl.trajectory_graph import session_graph  # noqa: E402
from jax_agent_rl.types import Group, Trajectory  # noqa: E402
from tests.gradients import policy_batch, policy_gradient  # noqa: E402
from tests.tiny_chat import CONFIG, Watched, assert_exact, params, tiny_context  # noqa: E402
from tests.unit.agents.test_openai_loop import client_of, trajectory_of  # noqa: E402

Calls = list[tuple[tuple[int, ...], tuple[int, ...]]]
"""What the engine was asked and what it answered, in ids."""


async def researcher(base_url, api_key, row):
    """Eight turns, two sub-agents at the same time, two more turns, a summary that takes their
    place, five turns.
    """
    async with client_of(base_url, api_key) as client:

        async def talk(messages: list[dict], lines: list[str]) -> str:
            for line in lines:
                messages.append({"role": "user", "content": line})
                answer = await client.chat.completions.create(
                    model="m", messages=messages, max_tokens=6
                )
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            return messages[-1]["content"]

        system = {"role": "system", "content": "answer questions"}
        main = [system]
        await talk(main, [f"step {i}" for i in range(8)])
        helpers = (
            [{"role": "system", "content": "you help with part x"}],
            list(main),
        )  # the second knows all so far
        findings = await asyncio.gather(
            *(talk(helper, ["find", "more", "most", "sum up"]) for helper in helpers)
        )
        await talk(main, [f"they say {' and '.join(findings)}", "go on"])
        summary = await talk(main, ["summarize"])
        await talk([system], [f"so far: {summary}", *(f"then {i}" for i in range(4))])


async def short(base_url, api_key, row):
    async with client_of(base_url, api_key) as client:
        messages = [
            {"role": "system", "content": "answer questions"},
            {"role": "user", "content": "step 0"},
        ]
        await client.chat.completions.create(model="m", messages=messages, max_tokens=6)


async def recorded() -> tuple[list[Trajectory], list[Calls]]:
    """Two sessions of a group, and the engine's own record of each."""
    trajectories = []
    calls = []
    async with tiny_context(
        max_assistant_turns=99, max_user_turns=99, max_response_length=400
    ) as context:
        backend: Watched = context.client.pool.servers[0].backend
        for reward, agent in enumerate((short, researcher)):
            backend.seen.clear()
            trajectory = await trajectory_of(agent, context, seed=reward)
            assert_exact(trajectory, backend)
            trajectories.append(
                replace(trajectory, trajectory_id=f"t-{reward}", reward=float(reward))
            )
            calls.append(
                [(request.prompt_ids, output.token_ids) for request, output in backend.seen]
            )
    return trajectories, calls


NAMES = {
    "embed": lambda peer: peer.model.embed_tokens.weight,
    "final_norm": lambda peer: peer.model.norm.weight,
    "q": lambda peer: peer.model.layers[1].self_attn.q_proj.weight,
    "v": lambda peer: peer.model.layers[0].self_attn.v_proj.weight,
    "down": lambda peer: peer.model.layers[2].mlp.down_proj.weight,
}


def gradient_of(params) -> dict[str, np.ndarray]:
    layers = params["layers"]
    chosen = {"q": layers["q"][1], "v": layers["v"][0], "down": layers["down"][2]}
    return {name: np.asarray(params[name] if name in params else chosen[name]) for name in NAMES}


def by_hand(peer, calls: Calls) -> dict[str, np.ndarray]:
    """The gradient of the sum of all sampled ids' log-probs."""
    peer.zero_grad()
    for prompt, sampled in calls:
        logits = peer(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1]
        torch.log_softmax(logits, -1)[range(len(sampled)), list(sampled)].sum().backward()
    return {name: weight(peer).grad.numpy().copy() for name, weight in NAMES.items()}


async def test_a_session_has_the_gradient_of_its_single_calls(
    tmp_path: Path,
):
    from transformers import AutoModelForCausalLM

    trajectories, calls = await recorded()
    session = trajectories[1]
    assert len(calls[1]) == 24
    # the second sub-agent goes on from the first eight turns, as their caller does after it
    assert [(s.sequence.num_turns, s.turns) for s in session_graph(session)] == [
        (12, 0),
        (4, 0),
        (3, 8),
        (5, 0),
    ]
    save_hf(tmp_path, CONFIG, params())
    peer = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, attn_implementation="eager"
    )
    sums = [by_hand(peer, of_call) for of_call in calls]
    lengths = [sum(len(sampled) for _, sampled in of_call) for of_call in calls]
    group = Group(group_id="g", trajectories=tuple(trajectories))
    sequences = [s.prompt_ids + s.response_ids for t in trajectories for s in t.sequences]
    prefixes = {ids[:n] for ids in sequences for n in range(1, len(ids) + 1)}
    algorithm = AlgorithmConfig(adv_estimator="rloo", loss_agg_mode="seq-mean-token-mean")
    config = LearnerConfig(pack_length=1024, remat="none")
    learner = Learner(CONFIG, params(), algorithm=algorithm, config=config, temperature=1.0)
    batch = policy_batch(learner, [group])
    # a prefix that several contexts share is computed once
    assert (batch.num_nodes, batch.num_tokens) == (len(prefixes), sum(map(len, sequences)))
    gradients, _ = policy_gradient(learner, [group])
    for name, got in gradient_of(jax.device_get(gradients)).items():
        # of two sessions with rewards 0 and 1: advantages -1 and 1, however many calls they made
        expected = sums[0][name] / (2 * lengths[0]) - sums[1][name] / (2 * lengths[1])
        np.testing.assert_allclose(got, expected, atol=2e-5 * np.abs(expected).max(), err_msg=name)
