"""NaN wherever it can enter a run: what it touches is counted and left out, and no parameter ever
becomes one.

One run gets them all: rewards in step 1, a log-prob of the engine in step 2, the gradient of step
3.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np

from jax_agent_rl.observe.run_dir import read_records
from tests.messages import assert_message
from tests.run_results import final_state
from tests.tiny_run import tiny_recipe
from tests.warm import python

POISONED = """
import dataclasses, math, sys
import jax
from jax_agent_rl import cli
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.learner.optimized_params import OptimizedParams

every_gradient = sys.argv.pop() == "every gradient"
generate, gradients, steps = JetStreamBackend.generate, OptimizedParams.gradients, 0

async def poisoned_logprobs(self, request):
    output = await generate(self, request)
    if not request.request_id.startswith("train-2-1-3"):
        return output
    return dataclasses.replace(output, log_probs=(math.nan, *output.log_probs[1:]))

def poisoned_gradients(self, *arguments):
    global steps
    steps += 1
    found, statistics = gradients(self, *arguments)
    if every_gradient or steps == 3:
        found = jax.tree.map(lambda x: x * math.nan, found)
    return found, statistics

JetStreamBackend.generate = poisoned_logprobs
OptimizedParams.gradients = poisoned_gradients
cli.main()
"""

POISONED_REWARD = """
import itertools, math
from jax_agent_rl.rewards import register_reward

calls = itertools.count(1)

@register_reward("noise")
async def compute_score(solution_str, ground_truth):
    # Asynchronous functions share a process, and so the count.
    score = float(len(solution_str) % 3 == int(ground_truth))
    return {4: math.nan, 5: math.inf, 6: {"score": -math.inf}}.get(next(calls), score)
"""


def train(recipe: Path, poison: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*python(), "-c", POISONED, "train", str(recipe), poison],
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=300,
    )


def finite(run: Path) -> bool:
    return all(np.isfinite(array).all() for array in final_state(run).values())


def test_nan_costs_what_it_touches_and_the_run_goes_on(
    tmp_path: Path,
):
    recipe = tiny_recipe(tmp_path, trainer={"steps": 4, "checkpoint_every": 1}, data={"eval": None})
    (tmp_path / "reward.py").write_text(POISONED_REWARD)
    result = train(recipe, "once each")
    assert result.returncode == 0, result.stderr[-3000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["dropped"] == {"reward_error": 3, "nan_logprobs": 1, "non_finite": 8}
    assert (summary["started"], summary["trained"]) == (32, 32 - 12)
    assert summary["steps"] == 4
    assert finite(tmp_path / "run")
    steps = [
        line for line in read_records(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "step"
    ]
    assert [line["accounting"]["trained"] for line in steps] == [5, 12, 12, 20]


def test_lasting_nan_gradients_end_the_run_with_finite_parameters(tmp_path: Path):
    recipe = tiny_recipe(
        tmp_path,
        data={"eval": None},
        learner={"max_nonfinite_steps": 2},
        trainer={"checkpoint_every": 0},
    )
    result = train(recipe, "every gradient")
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr[-3000:]
    assert_message(result.stderr.replace("\n", " "), value="2 training steps")
    assert "learner.learning_rate" in result.stderr
    assert finite(tmp_path / "run")
