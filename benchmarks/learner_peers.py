r"""One GRPO update of this package, TRL and google-tunix: same model, completions and machine.

    # a CPU build of torch where the index has one
    python -m venv /tmp/trl && /tmp/trl/bin/pip install torch==2.13.0
    /tmp/trl/bin/pip install trl==1.16.0 transformers==5.23.0
    python -m venv /tmp/tunix && /tmp/tunix/bin/pip install google-tunix==0.1.7
    python benchmarks/learner_peers.py \
        --trl-python /tmp/trl/bin/python --tunix-python /tmp/tunix/bin/python

They run one after the other. SmolLM2-135M in float32 on the CPU; a group of 8 completions of 40
tokens to a prompt of 256; one AdamW update, the gradient clipped to 1, no KL term, no rollout. Each
peer's trainer runs its own code in its own environment (``peers/``), the group in one micro-batch.
Ours runs with a row per sample, and with prefixes shared. The last line is one JSON object;
``ratio_vs_*`` are of samples/s. With the versions above they are:

=====================  ===========================  ===========================
two cores of           without prefixes shared      with prefixes shared
=====================  ===========================  ===========================
a Xeon with AVX-512    1.27 (TRL) and 1.50 (Tunix)  4.42 (TRL) and 5.24 (Tunix)
a newer Xeon with AMX  0.88 (TRL) and 1.31 (Tunix)  2.86 (TRL) and 4.27 (Tunix)
an AMD EPYC with AVX2  1.32 (TRL) and 1.34 (Tunix)  4.55 (TRL) and 4.65 (Tunix)
=====================  ===========================  ===========================

``differences`` show that the work is the same, relative to ours without sharing: of the first
update's clipped gradient (``max_grad_diff``, relative to the largest element), its norm before the
clip, and the mean entropy at the sampled tokens. The loss is 0 on every side: an on-policy ratio is
1, and advantages of a group add up to 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from common import argument_parser, cpu, first_gradient, make_learner
from safetensors.numpy import load_file
from shared_prefix import OWN, SAMPLES, SHARED, SIDES, groups

from jax_agent_rl.deploy.quickstart.model import fetch_quickstart_model
from jax_agent_rl.learner.advantages.estimators import grpo
from jax_agent_rl.models.hf import hf_tensors
from jax_agent_rl.types import Group

PEERS = Path(__file__).parent / "peers"
OPTIMIZER: dict[str, Any] = {
    "learning_rate": 1e-6,
    "adam_b1": 0.9,
    "adam_b2": 0.95,
    "max_grad_norm": 1.0,
}
VALUES = ("loss", "grad_norm", "entropy")
"""Of the first update; the norm is before the clip."""
LARGEST_DIFFERENCE = 1e-3
"""Of a gradient, relative to its largest element: rounding is far below, other work far above."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured of one side.

    Attributes:
        seconds: of its fastest update after the first.
        gradient: of the first update, clipped, by Hugging Face tensor name.
        values: of the first update, those that :data:`VALUES` names.
        versions: of its packages.
    """

    seconds: float
    gradient: Mapping[str, np.ndarray]
    values: Mapping[str, float]
    versions: Mapping[str, str]


def write_batch(batch: list[Group], file: Path) -> None:
    """Write what peers read.

    It is ids [N, P] and [N, C], advantages [N] float32, and the optimizer's numbers.
    """
    prompt_ids = []
    completion_ids = []
    advantages = []
    for group in batch:
        for trajectory in group.trajectories:
            prompt_ids.append(trajectory.prompt_ids)
            completion_ids.append(trajectory.response_ids)
        advantages.append(grpo(np.array(group.rewards)))
    np.savez(
        file,
        prompt_ids=np.array(prompt_ids),
        completion_ids=np.array(completion_ids),
        advantages=np.concatenate(advantages),
        **OPTIMIZER,
    )


def ours(side: Mapping[str, Any], batch: list[Group], updates: int) -> Measured:
    """Measure ``Learner.update``, from trajectories to new parameters."""
    learner = make_learner(**side, **OPTIMIZER)
    metrics = learner.update(batch).metrics
    gradient = dict(hf_tensors(learner.model, first_gradient(learner, OPTIMIZER["adam_b1"])))
    seconds = []
    for _ in range(updates - 1):
        start = time.perf_counter()
        learner.update(batch)
        jax.block_until_ready(learner.params)
        seconds.append(time.perf_counter() - start)
    return Measured(
        seconds=min(seconds),
        gradient=gradient,
        values={name: metrics[name] for name in VALUES},
        versions={"jax": jax.__version__},
    )


def peer(python: str, script: str, *, file: Path, updates: int) -> Measured:
    """Run a peer's script in its environment."""
    gradients = file.with_name("gradients.safetensors")
    command = [
        python,
        str(PEERS / script),
        f"--model={fetch_quickstart_model()}",
        f"--batch={file}",
        f"--updates={updates}",
        f"--gradients={gradients}",
    ]
    # PYTHONPATH is for our environment: in another it would bring packages of the wrong versions.
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    environment.pop("PYTHONPATH", None)
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    if process.returncode:
        sys.exit(
            f"{' '.join(command)} failed; is its environment the one this file's docstring"
            f" makes?\n{process.stderr}"
        )
    result = json.loads(process.stdout.splitlines()[-1])
    return Measured(
        seconds=min(result["seconds"][1:]),
        gradient=load_file(gradients),
        values={name: result[name] for name in VALUES},
        versions=result["versions"],
    )


def differences(side: Measured, reference: Measured) -> dict[str, float]:
    """Compare two first updates.

    Differences of gradients are relative to the largest element, those of values to the value if it
    is above 1.
    """
    if side.gradient.keys() != reference.gradient.keys():
        raise ValueError(
            f"other parameters: {sorted(side.gradient.keys() ^ reference.gradient.keys())[:4]}"
        )

    largest_elements = []
    largest_differences = []
    for name, gradient in reference.gradient.items():
        largest_elements.append(float(np.abs(gradient).max()))
        largest_differences.append(float(np.abs(side.gradient[name] - gradient).max()))

    result = {"max_grad_diff": max(largest_differences) / max(largest_elements)}
    for name, value in reference.values.items():
        result[f"{name}_diff"] = abs(side.values[name] - value) / max(1.0, abs(value))
    return result


def measure_all(arguments: argparse.Namespace) -> dict[str, Measured]:
    """Measure every side, one after the other."""
    batch = groups(1)
    measured = {}
    with tempfile.TemporaryDirectory(prefix="learner_peers-") as folder:
        file = Path(folder) / "batch.npz"
        write_batch(batch, file)
        peers = (
            ("trl", "trl_step.py", arguments.trl_python),
            ("tunix", "tunix_step.py", arguments.tunix_python),
        )
        for name, script, python in peers:
            if not python:
                continue
            measured[name] = peer(python, script, file=file, updates=arguments.updates)
            print(f"{name}: {measured[name].seconds:.3f} s an update", flush=True)

    for name, side in SIDES.items():
        measured[name] = ours(side, batch, arguments.updates)
        print(f"ours, {name}: {measured[name].seconds:.3f} s an update", flush=True)
    return measured


def report(measured: Mapping[str, Measured]) -> dict[str, Any]:
    """Return the figures; tokens and samples count what is in the batch, computed once or not."""
    result: dict[str, Any] = {}
    for name, side in measured.items():
        result[f"{name}_samples_per_second"] = round(SAMPLES / side.seconds, 3)
        result[f"{name}_tokens_per_second"] = round(SAMPLES * (SHARED + OWN) / side.seconds, 1)

    shared = measured["shared"]
    naive = measured["naive"]
    versions = {"ours": dict(naive.versions)}
    all_differences = {}
    for name, side in measured.items():
        if name not in SIDES:
            result[f"ratio_vs_{name}"] = round(side.seconds / shared.seconds, 2)
            result[f"ratio_vs_{name}_without_sharing"] = round(side.seconds / naive.seconds, 2)
            versions[name] = dict(side.versions)
        if name != "naive":
            all_differences[name] = differences(side, naive)
    result["differences"] = all_differences
    result["versions"] = versions
    return result


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--trl-python", help="interpreter of TRL's environment; without it TRL is left out"
    )
    parser.add_argument(
        "--tunix-python", help="interpreter of google-tunix' environment; without it it is left out"
    )
    parser.add_argument(
        "--updates", type=int, default=5, help="updates of each side; the first is not timed"
    )
    arguments = parser.parse_args()
    if arguments.updates < 2:
        parser.error("--updates must be at least 2: the first one warms up")
    jax.config.update("jax_platforms", "cpu")
    load = os.getloadavg()[0]
    result = report(measure_all(arguments))
    print(json.dumps(result | {"load_before": round(load, 2), "cpu": cpu()}))

    different_sides = []
    for name, side_differences in result["differences"].items():
        if side_differences["max_grad_diff"] > LARGEST_DIFFERENCE:
            different_sides.append(name)
    if different_sides:
        sys.exit(
            f"the gradient of {', '.join(different_sides)} is not ours: not the same work, so the"
            " ratios mean nothing"
        )


if __name__ == "__main__":
    main()
