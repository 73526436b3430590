"""``sft`` and ``dpo`` against TRL: same model, ids and machine, one after the other.

    python -m venv /tmp/trl && /tmp/trl/bin/pip install torch==2.13.0     # a CPU build where the index has one
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
        lines = [row for _, row in read_row_file(demonstrations)]
        wrong = [{"role": "assistant", "content": "I do not know."}]
        preferences = Path(folder) / "preferences.jsonl"
        rows = [
            {"prompt": line["prompt"], "chosen": line["completion"][:1], "rejected": wrong}
            for line in lines
        ]
        write_rows(preferences, rows)
        pairs = encoder.pairs([DataSource(path=str(preferences))])
    return {"sft": examples, "dpo": pairs}


def as_trl_rows(method: str, rows: list[Any]) -> list[dict[str, list[int]]]:
    """Return the same ids in TRL's columns."""

    def parts(example: Example) -> tuple[list[int], list[int]]:
        (sequence,) = example
        ids, begin = sequence.token_ids.tolist(), int(np.argmax(sequence.loss_mask))
        return ids[:begin], ids[begin:]

    if method == "sft":
        return [
            {
                "input_ids": s.token_ids.tolist(),
                "labels": np.where(s.loss_mask, s.token_ids, -100).tolist(),
            }
            for (s,) in rows
        ]
    made = []
    for pair in rows:
        (prompt, chosen), (_, rejected) = parts(pair.chosen), parts(pair.rejected)
        made.append({"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected})
    return made


def ours(
    method: str, rows: list[Any], updates: int, *, model: str, **config: Any
) -> tuple[list[float], float]:
    """Return the losses before each update, and seconds of the fastest after the first."""
    decoder, params = load_hf(model)
    learner = SequenceLearner(
        decoder, params, config=LearnerConfig(**config), reference=method == "dpo"
    )
    trained: Sft | Dpo = Sft(learner=learner)
    if method == "dpo":
        trained = Dpo(learner=learner, beta=BETA, label_smoothing=0.0)
    numbers = AdamParams(
        learning_rate=OPTIMIZER["learning_rate"],
        beta1=OPTIMIZER["adam_b1"],
        beta2=OPTIMIZER["adam_b2"],
        eps=OPTIMIZER["adam_eps"],
        grad_clip_norm=OPTIMIZER["max_grad_norm"],
    )
    losses, seconds = [], []
    for _ in range(updates):
        begin = time.perf_counter()
        losses.append(trained.step(rows)["loss"])
        learner.optim_step(numbers)
        jax.block_until_ready(learner.trained)
        seconds.append(time.perf_counter() - begin)
    return losses, min(seconds[1:])


def trl(
    python: str, method: str, rows: list[Any], updates: int, *, model: str
) -> tuple[list[float], float]:
    """Return the same of TRL's trainer, run in its environment."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "batch.json"
        file.write_text(
            json.dumps(
                {"method": method, "rows": as_trl_rows(method, rows), "beta": BETA} | OPTIMIZER
            )
        )
        command = [python, str(PEER), f"--model={model}", f"--batch={file}", f"--updates={updates}"]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(
            f"{' '.join(command)} failed; is its environment the one this file's docstring"
            f" makes?\n{done.stderr}"
        )
    line = json.loads(done.stdout.splitlines()[-1])
    return line["losses"], min(line["seconds"][1:])


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure both methods on every side."""
    results: dict[str, Any] = {"cpu": cpu()}
    data = read_rows(arguments.rows)
    # Before ours, which keep the memory that they freed.
    peers = {
        method: trl(arguments.trl_python, method, rows, arguments.updates, model=arguments.model)
        for method, rows in data.items()
    }
    for method, rows in data.items():
        lengths = [
            len(s.token_ids)
            for row in rows
            for s in ((*row.chosen, *row.rejected) if method == "dpo" else row)
        ]
        alone = {
            "pack_length": max(lengths),
            "micro_batch_size": len(rows),
            "share_prefixes": False,
        }
        sides = {
            "own_rows": ours(method, rows, arguments.updates, model=arguments.model, **alone),
            "shared": ours(method, rows, arguments.updates, model=arguments.model),
        }
        peer_losses, peer_seconds = peers[method]
        results[method] = {"trl_seconds": peer_seconds, "trl_losses": peer_losses}
        for name, (losses, seconds) in sides.items():
            results[method][name] = {
                "seconds": seconds,
                "ratio": peer_seconds / seconds,
                "loss_difference": max(
                    abs(a - b) for a, b in zip(losses, peer_losses, strict=True)
                ),
            }
            print(
                f"{method}, {name}: {seconds:.2f} s an update, TRL {peer_seconds:.2f} s", flush=True
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
