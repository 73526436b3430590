"""``sft`` and ``dpo`` against TRL: same model, ids and machine, one after the other.

    # a CPU build of torch where the index has one
    python -m venv /tmp/trl && /tmp/trl/bin/pip install torch==2.13.0
    /tmp/trl/bin/pip install trl==1.16.0 transformers==5.23.0
    python benchmarks/supervised_peers.py --trl-python /tmp/trl/bin/python

SmolLM2-135M in float32 on the CPU, AdamW, the gradient clipped to 1. sft: demonstrations of the
shop's task, whose prompts begin alike; dpo: the same with a wrong answer each. All rows are in
every update, TRL's in one padded micro-batch; ours first as those (``own_rows``), then packed with
prefixes shared, as by default. The last line is one JSON object: seconds of the fastest update
after the first, ``ratio`` of TRL's to ours, and the largest difference of the losses of all
updates.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from common import argument_parser, cpu

from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.config import LearnerConfig
from jax_agent_rl.config.commands import ConversationsConfig
from jax_agent_rl.config.task import DataSource
from jax_agent_rl.data.reader import read_row_file
from jax_agent_rl.data.rows import write_rows
from jax_agent_rl.data.tasks import prepare_shop
from jax_agent_rl.deploy.quickstart.model import fetch_quickstart_model
from jax_agent_rl.learner.sequence_learner import AdamParams, SequenceLearner
from jax_agent_rl.models.hf import load_hf
from jax_agent_rl.supervised.conversations import Encoder, Example
from jax_agent_rl.supervised.train import Dpo, Sft

PEER = Path(__file__).parent / "peers" / "trl_supervised.py"
OPTIMIZER = {
    "learning_rate": 1e-5,
    "adam_b1": 0.9,
    "adam_b2": 0.999,
    "adam_eps": 1e-8,
    "max_grad_norm": 1.0,
}
BETA = 0.1


def read_rows(count: int) -> dict[str, list[Any]]:
    """Return examples for sft and pairs for dpo."""
    codec = ChatCodec.from_pretrained(
        fetch_quickstart_model(), tool_format="pythonic", tool_prompt="none"
    )
    with tempfile.TemporaryDirectory() as folder:
        *_, demonstrations = prepare_shop(Path(folder), train=count, heldout=1)
        encoder = Encoder(
            codec=codec,
            config=ConversationsConfig.model_validate({"train": str(demonstrations)}),
            pack_length=1024,
        )
        examples = encoder.examples([DataSource(path=str(demonstrations))])

        wrong_answer = [{"role": "assistant", "content": "I do not know."}]
        rows = []
        for _, row in read_row_file(demonstrations):
            rows.append(
                {
                    "prompt": row["prompt"],
                    "chosen": row["completion"][:1],
                    "rejected": wrong_answer,
                }
            )
        preferences = Path(folder) / "preferences.jsonl"
        write_rows(preferences, rows)
        pairs = encoder.pairs([DataSource(path=str(preferences))])
    return {"sft": examples, "dpo": pairs}


def as_trl_rows(method: str, rows: list[Any]) -> list[dict[str, list[int]]]:
    """Return the same ids in TRL's columns."""
    trl_rows = []
    for row in rows:
        if method == "sft":
            (sequence,) = row
            labels = np.where(sequence.loss_mask, sequence.token_ids, -100)
            trl_rows.append({"input_ids": sequence.token_ids.tolist(), "labels": labels.tolist()})
        else:
            prompt_ids, chosen_ids = split_prompt(row.chosen)
            _, rejected_ids = split_prompt(row.rejected)
            trl_rows.append(
                {
                    "prompt_ids": prompt_ids,
                    "chosen_ids": chosen_ids,
                    "rejected_ids": rejected_ids,
                }
            )
    return trl_rows


def split_prompt(example: Example) -> tuple[list[int], list[int]]:
    """Return the ids before the first one in the loss, and those from it on."""
    (sequence,) = example
    ids = sequence.token_ids.tolist()
    prompt_length = int(np.argmax(sequence.loss_mask))
    return ids[:prompt_length], ids[prompt_length:]


def ours(
    method: str, rows: list[Any], updates: int, *, model: str, **config: Any
) -> tuple[list[float], float]:
    """Return the losses before each update, and seconds of the fastest after the first."""
    decoder, params = load_hf(model)
    learner = SequenceLearner(
        decoder, params, config=LearnerConfig(**config), reference=method == "dpo"
    )
    objective: Sft | Dpo = Sft(learner=learner)
    if method == "dpo":
        objective = Dpo(learner=learner, beta=BETA, label_smoothing=0.0)
    adam = AdamParams(
        learning_rate=OPTIMIZER["learning_rate"],
        beta1=OPTIMIZER["adam_b1"],
        beta2=OPTIMIZER["adam_b2"],
        eps=OPTIMIZER["adam_eps"],
        grad_clip_norm=OPTIMIZER["max_grad_norm"],
    )
    losses = []
    seconds = []
    for _ in range(updates):
        start = time.perf_counter()
        losses.append(objective.step(rows)["loss"])
        learner.optim_step(adam)
        jax.block_until_ready(learner.trained)
        seconds.append(time.perf_counter() - start)
    return losses, min(seconds[1:])


def trl(
    python: str, method: str, rows: list[Any], updates: int, *, model: str
) -> tuple[list[float], float]:
    """Return the same of TRL's trainer, run in its environment."""
    with tempfile.TemporaryDirectory() as folder:
        batch = {"method": method, "rows": as_trl_rows(method, rows), "beta": BETA} | OPTIMIZER
        file = Path(folder) / "batch.json"
        file.write_text(json.dumps(batch))
        command = [python, str(PEER), f"--model={model}", f"--batch={file}", f"--updates={updates}"]
        # PYTHONPATH is for our environment.
        environment = dict(os.environ)
        environment.pop("PYTHONPATH", None)
        process = subprocess.run(command, capture_output=True, text=True, env=environment)
    if process.returncode:
        sys.exit(
            f"{' '.join(command)} failed; is its environment the one this file's docstring"
            f" makes?\n{process.stderr}"
        )
    result = json.loads(process.stdout.splitlines()[-1])
    return result["losses"], min(result["seconds"][1:])


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure both methods on every side."""
    results: dict[str, Any] = {"cpu": cpu()}
    data = read_rows(arguments.rows)
    # Before ours, which keep the memory that they freed.
    peers = {}
    for method, rows in data.items():
        peers[method] = trl(
            arguments.trl_python, method, rows, arguments.updates, model=arguments.model
        )

    for method, rows in data.items():
        lengths = []
        for row in rows:
            sequences = (*row.chosen, *row.rejected) if method == "dpo" else row
            lengths += [len(sequence.token_ids) for sequence in sequences]
        row_per_sequence = {
            "pack_length": max(lengths),
            "micro_batch_size": len(rows),
            "share_prefixes": False,
        }

        peer_losses, peer_seconds = peers[method]
        results[method] = {"trl_seconds": peer_seconds, "trl_losses": peer_losses}
        for name, config in (("own_rows", row_per_sequence), ("shared", {})):
            losses, seconds = ours(method, rows, arguments.updates, model=arguments.model, **config)
            differences = [abs(a - b) for a, b in zip(losses, peer_losses, strict=True)]
            results[method][name] = {
                "seconds": seconds,
                "ratio": peer_seconds / seconds,
                "loss_difference": max(differences),
            }
            print(
                f"{method}, {name}: {seconds:.2f} s an update, TRL {peer_seconds:.2f} s",
                flush=True,
            )
    return results


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--trl-python", required=True, help="Python of an environment with TRL")
    parser.add_argument("--rows", type=int, default=8, help="demonstrations, or pairs")
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument(
        "--model", default=None, help="Hugging Face folder; default the quickstart's"
    )
    arguments = parser.parse_args()
    arguments.model = str(arguments.model or fetch_quickstart_model())
    print(json.dumps(measure(arguments)))


if __name__ == "__main__":
    main()
