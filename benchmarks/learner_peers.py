"""One GRPO update of this package, TRL and google-tunix: same model, completions and machine, one
after the other.

    python -m venv /tmp/trl && /tmp/trl/bin/pip install torch==2.13.0     # a CPU build where the index has one
    /tmp/trl/bin/pip install trl==1.16.0 transformers==5.23.0
    python -m venv /tmp/tunix && /tmp/tunix/bin/pip install google-tunix==0.1.7
    python benchmarks/learner_peers.py --trl-python /tmp/trl/bin/python --tunix-python /tmp/tunix/bin/python

SmolLM2-135M in float32 on the CPU; a group of 8 completions of 40 tokens to a prompt of 256; one
AdamW update, the gradient clipped to 1, no KL term, no rollout. Each peer's trainer runs its own
code in its own environment (``peers/``), the group in one micro-batch. Ours runs with a row per
sample, and with prefixes shared. The last line is one JSON object; ``ratio_vs_*`` are of samples/s.
With the versions above they are, without and with prefixes shared, 1.27 and 4.42 (TRL) and 1.50 and
5.24 (Tunix) on a two-core AVX-512 Xeon; 0.88 and 2.86 (TRL) and 1.31 and 4.27 (Tunix) on two cores
of a newer one with AMX; 1.32 and 4.55 (TRL) and 1.34 and 4.65 (Tunix) on two AVX2 cores of an AMD
EPYC.

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
VALUES = ("loss", "grad_norm", "entropy")  # of the first update; the norm is that before the clip
LARGEST_DIFFERENCE = 1e-3  # of a gradient, relative to its largest element; rounding is far below, other work far above


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One side: seconds of its fastest update after the first, and what the first found.

    ``gradient`` is the clipped one, by Hugging Face tensor name; ``values`` are those of
    ``VALUES``.
    """

    seconds: float
    gradient: Mapping[str, np.ndarray]
    values: Mapping[str, float]
    versions: Mapping[str, str]


def write_batch(batch: list[Group], file: Path) -> None:
    """Write what peers read: ids [N, P] and [N, C], advantages [N] float32, and the optimizer's
    numbers.
    """
    members = [t for group in batch for t in group.trajectories]
    np.savez(
        file,
        prompt_ids=np.array([t.prompt_ids for t in members]),
        completion_ids=np.array([t.response_ids for t in members]),
        advantages=np.concatenate(
            [grpo(np.array([t.reward for t in g.trajectories])) for g in batch]
        ),
        **OPTIMIZER,
    )


def ours(side: Mapping[str, Any], batch: list[Group], updates: int) -> Measured:
    """Measure ``Learner.update``, from trajectories to new parameters."""
    learner = make_learner(**side, **OPTIMIZER)
    metrics = learner.update(batch).metrics
    gradient = dict(hf_tensors(learner.model, first_gradient(learner, OPTIMIZER["adam_b1"])))
    seconds = []
    for _ in range(updates - 1):
        begin = time.perf_counter()
        learner.update(batch)
        jax.block_until_ready(learner.params)
        seconds.append(time.perf_counter() - begin)
    values = {name: metrics[name] for name in VALUES}
    return Measured(
        seconds=min(seconds), gradient=gradient, values=values, versions={"jax": jax.__version__}
    )


def peer(python: str, script: str, *, file: Path, updates: int) -> Measured:
    """Run a peer's script in its environment."""
    gradients = file.with_name("gradients.safetensors")
    options = {
        "model": fetch_quickstart_model(),
        "batch": file,
        "updates": updates,
        "gradients": gradients,
    }
    command = [
        python,
        str(PEERS / script),
        *(f"--{name}={value}" for name, value in options.items()),
    ]
    # PYTHONPATH is for our environment: in another it would bring packages of the wrong versions.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "JAX_PLATFORMS": "cpu"
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(
            f"{' '.join(command)} failed; is its environment the one this file's docstring"
            f" makes?\n{done.stderr}"
        )
    line = json.loads(done.stdout.splitlines()[-1])
    return Measured(
        seconds=min(line["seconds"][1:]),
        gradient=load_file(gradients),
        values={name: line[name] for name in VALUES},
        versions=line["versions"],
    )


def differences(side: Measured, reference: Measured) -> dict[str, float]:
    """Compare two first updates: gradients relative to the largest element, values to theirs if
    above 1.
    """
    if side.gradient.keys() != reference.gradient.keys():
        raise ValueError(
            f"other parameters: {sorted(side.gradient.keys() ^ reference.gradient.keys())[:4]}"
        )
    largest = max(float(np.abs(value).max()) for value in reference.gradient.values())
    gradient = max(
        float(np.abs(side.gradient[name] - value).max())
        for name, value in reference.gradient.items()
    )
    values = {
        f"{name}_diff": abs(side.values[name] - value) / max(1.0, abs(value))
        for name, value in reference.values.items()
    }
    return {"max_grad_diff": gradient / largest, **values}


def measure_all(arguments: argparse.Namespace) -> dict[str, Measured]:
    """Measure every side, one after the other."""
    batch = groups(1)
    measured = {}
    with tempfile.TemporaryDirectory(prefix="learner_peers-") as folder:
        file = Path(folder) / "batch.npz"
        write_batch(batch, file)
        for name, script in (("trl", "trl_step.py"), ("tunix", "tunix_step.py")):
            if python := getattr(arguments, f"{name}_python"):
                measured[name] = peer(python, script, file=file, updates=arguments.updates)
                print(f"{name}: {measured[name].seconds:.3f} s an update", flush=True)
    for name, side in SIDES.items():
        measured[name] = ours(side, batch, arguments.updates)
        print(f"ours, {name}: {measured[name].seconds:.3f} s an update", flush=True)
    return measured


def report(measured: Mapping[str, Measured]) -> dict[str, Any]:
    """Return the figures; tokens and samples count what is given, computed once or not."""
    result: dict[str, Any] = {}
    for name, side in measured.items():
        result[f"{name}_samples_per_second"] = round(SAMPLES / side.seconds, 3)
        result[f"{name}_tokens_per_second"] = round(SAMPLES * (SHARED + OWN) / side.seconds, 1)
    peers = [name for name in measured if name not in SIDES]
    for peer_name in peers:
        for name, suffix in (("shared", ""), ("naive", "_without_sharing")):
            result[f"ratio_vs_{peer_name}{suffix}"] = round(
                measured[peer_name].seconds / measured[name].seconds, 2
            )
    result["differences"] = {
        name: differences(side, measured["naive"])
        for name, side in measured.items()
        if name != "naive"
    }
    result["versions"] = {"ours": dict(measured["naive"].versions)} | {
        name: dict(measured[name].versions) for name in peers
    }
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
    other = [
        name
        for name, found in result["differences"].items()
        if found["max_grad_diff"] > LARGEST_DIFFERENCE
    ]
    if other:
        sys.exit(
            f"the gradient of {', '.join(other)} is not ours: not the same work, so the ratios mean"
            " nothing"
        )


if __name__ == "__main__":
    main()
