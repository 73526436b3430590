"""A fully asynchronous run of a model with recurrent layers, whose weights change under running
generations: a slot's state is then of older weights, or is computed again.
"""

import functools
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.models.config import DecoderConfig, DeltaNet, Params
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.hf import load_hf, save_hf
from jax_agent_rl.observe.run_dir import read_records
from jax_agent_rl.runtime.policy import export_run
from tests.tiny import DELTA_NETS, tiny_params
from tests.tiny_chat import tokenizer
from tests.tiny_run import step_records, tiny_recipe
from tests.warm import python

STEPS = 6
LONGEST = 160
"""Ids of a context."""
ROUNDING = 2e-3
"""Largest difference between log-probs of engine and learner that are of the same weights."""
QWEN3_5 = replace(
    DELTA_NETS,
    family="qwen3_5_text",
    vocab_size=400,
    num_layers=4,
    norm_offset=1.0,
    delta_net=DeltaNet(
        layers=(True, True, True, False), key_heads=2, value_heads=4, key_dim=8, value_dim=8
    ),
)
"""Three delta nets, then gated attention."""


def recipe_of(folder: Path, in_flight_update: str) -> Path:
    # The engine, which samples one id at a time for large groups, is slower than the learner, so it
    # is sampling when there are new weights.
    recipe = tiny_recipe(
        folder,
        agent={"max_response_length": LONGEST - 32},
        rollout={
            "group_size": 8,
            "max_in_flight": 32,
            "max_model_len": LONGEST,
            "jetstream": {"max_concurrent_decodes": 1, "prefill_buckets": [32], "decode_steps": 1},
        },
        learner={"pack_length": LONGEST},
        trainer={
            "mode": "fully_async",
            "in_flight_update": in_flight_update,
            "max_staleness": 2,
            "steps": STEPS,
            "checkpoint_every": 1,
            "keep_checkpoints": STEPS,
        },
    )
    save_hf(folder / "model", QWEN3_5, tiny_params(config=QWEN3_5))
    tokenizer().save_pretrained(folder / "model")
    return recipe


def weights_of(run: Path, model: Path, folder: Path) -> list[tuple[DecoderConfig, Params]]:
    """The weights of each version; that of a step is its number."""
    versions = [load_hf(model)]
    for step in range(1, STEPS + 1):
        versions.append(load_hf(export_run(run, folder / str(step), step=step)))
    return versions


@functools.partial(jax.jit, static_argnums=0)
def logprobs_of_context(config: DecoderConfig, params: Params, ids: jax.Array) -> jax.Array:
    """Log-probs of ids [T], but for the first one, by one full pass."""
    model = Decoder.from_params(config, params)
    scores = jax.nn.log_softmax(model.logits(model(ids[None])[0])[0])
    return jnp.take_along_axis(scores[:-1], ids[1:, None], axis=1)[:, 0]


def gaps_of(record: dict[str, Any], versions: list[tuple[DecoderConfig, Params]]) -> np.ndarray:
    """How far each sampled id's log-prob is from that of its version's weights; 0 for others."""
    ids = [*record["prompt_ids"], *record["response_ids"]]
    padded = np.zeros(LONGEST, np.int32)
    padded[: len(ids)] = ids
    token_versions = np.array(record["policy_versions"])
    gaps = np.zeros(len(token_versions))
    for version in set(token_versions[token_versions >= 0]):
        expected = np.asarray(logprobs_of_context(*versions[version], padded))
        expected = expected[len(record["prompt_ids"]) - 1 : len(ids) - 1]
        gap = np.abs(expected - np.array(record["rollout_logprobs"]))
        gaps = np.where(token_versions == version, gap, gaps)
    return gaps


@pytest.mark.parametrize("in_flight_update", ["keep", "recompute"])
def test_every_token_is_of_its_version_while_weights_change_under_recurrent_states(
    tmp_path: Path, in_flight_update: str
):
    recipe = recipe_of(tmp_path, in_flight_update)
    command = [*python(), "-m", "jax_agent_rl.cli", "train", str(recipe)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]

    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["token_drift"] == 0
    assert summary["recompilations_after_warmup"] == 0
    steps = step_records(run)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    for step in steps:
        books = step["accounting"]
        assert books["started"] == books["trained"] + books["dropped"] + books["in_flight"]

    versions = weights_of(run, tmp_path / "model", tmp_path / "weights")
    updated_in_flight = 0
    first_gaps = []
    later_gaps = []
    for record in read_records(run / "trajectories.jsonl"):
        gaps = gaps_of(record, versions)
        sampled = np.array(record["response_mask"], bool)
        token_versions = np.array(record["policy_versions"])
        is_first = token_versions == token_versions[sampled].min()
        updated_in_flight += not np.all(is_first[sampled])
        first_gaps.extend(gaps[sampled & is_first])
        later_gaps.extend(gaps[sampled & ~is_first])
    assert updated_in_flight > 0, "no weights changed under a generation"
    assert max(first_gaps) < ROUNDING
    if in_flight_update == "recompute":
        assert max(later_gaps) < ROUNDING
    else:
        # States and keys of older weights remain: no rounding, and no other model either.
        assert max(later_gaps) > ROUNDING
        assert np.mean(later_gaps) < 0.1
