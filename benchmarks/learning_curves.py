"""What different ways to train learn: held-out accuracy after every step of the quickstart's task, over seeds.

    python benchmarks/learning_curves.py sft                 # sft and then train, against train alone
    python benchmarks/learning_curves.py lora --seeds 0 1    # train of an adapter, against train of all weights
    python benchmarks/learning_curves.py distill --out runs/curves

Each curve is a list of commands as a user types them. Commands that have ended are not run again; one that was
interrupted begins anew. It prints a JSON object for each curve, with the accuracies of every seed, seconds of training
and the commands, and draws mean and range into ``OUT/EXPERIMENT.svg``.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from common import argument_parser, cpu
from matplotlib.figure import Figure

from jax_agent_rl.observe.run_dir import read_records

TRAIN = "train configs/quickstart.yaml trainer.eval_every=1 data.eval_limit=96"
SFT = "sft configs/supervised/sft.yaml run_dir={out}/sft-{seed}"
EXPERIMENTS = {  # by name: the commands of each curve, the last of which is measured
    "sft": {
        "train": [TRAIN],
        "sft, then train": [SFT, f"{TRAIN} model.path={{out}}/sft-{{seed}}"],
        "sft, then train with a warm-up": [SFT, f"{TRAIN} model.path={{out}}/sft-{{seed}} learner.lr_warmup_steps=3"],
    },
    "lora": {"all weights": [TRAIN], "lora": [f"{TRAIN} learner.lora.rank=16 learner.learning_rate=2e-4"]},
    "async": {"sync": [TRAIN], "one step off": [f"{TRAIN} trainer.mode=one_step_off"]},
    "int8": {
        "float32": [TRAIN],
        "int8 rollouts": [f"{TRAIN} rollout.jetstream.quantize=int8 trainer.on_disagreement=warn"],
        "int8 rollouts, corrected": [
            f"{TRAIN} rollout.jetstream.quantize=int8 trainer.on_disagreement=warn "
            "algorithm.rollout_correction.rollout_is=token"
        ],
    },
    "distill": {
        "train": [TRAIN],
        "distill": [f"{TRAIN.replace('train', 'distill', 1)} distill.teachers={{out}}/distill-train-{{seed}}"],
    },
}


def run(command: str) -> Path:
    """Run a command of ``jax-agent-rl`` unless it has ended already, and return its run folder."""
    words = shlex.split(command)
    folder = Path(next(word for word in words if word.startswith("run_dir=")).partition("=")[2])
    if not (folder / "summary.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        print("+", command, file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "jax_agent_rl.cli", *words], check=True, stdout=sys.stderr)
    return folder


def measure(folders: list[Path]) -> tuple[list[int], list[float], float]:
    """Return the steps after which the last run was measured, its accuracies, and the seconds of all training."""
    records = [read_records(folder / "metrics.jsonl") for folder in folders]
    measured = {line["step"]: line["accuracy"] for line in records[-1] if line["kind"] == "evaluation"}
    seconds = sum(line["step_seconds"] for lines in records for line in lines if line["kind"] == "step")
    return list(measured), list(measured.values()), seconds


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("experiment", choices=sorted(EXPERIMENTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/curves"))
    arguments = parser.parse_args()
    out, name = arguments.out, arguments.experiment
    subprocess.run([sys.executable, "-m", "jax_agent_rl.cli", "prepare", "shop", "--out", "data/shop"], check=True)
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    measured: dict[str, list[tuple[list[int], list[float], float]]] = {curve: [] for curve in EXPERIMENTS[name]}
    for seed in arguments.seeds:
        for curve, commands in EXPERIMENTS[name].items():
            folder = f"run_dir={out}/{name}-{curve.replace(', ', '-').replace(' ', '-')}-{seed}"
            made = [f"{command} seed={seed}".format(out=out, seed=seed) for command in commands]
            made = [command if "run_dir=" in command else f"{command} {folder}" for command in made]
            measured[curve].append(measure([run(command) for command in made]))
    for curve, of_seeds in measured.items():
        steps, accuracies, seconds = of_seeds[0][0], *([one[i] for one in of_seeds] for i in (1, 2))
        values = np.asarray(accuracies) * 100
        (line,) = axes.plot(steps, values.mean(0), label=curve)
        axes.fill_between(steps, values.min(0), values.max(0), color=line.get_color(), alpha=0.2)
        facts = {"accuracy": np.round(values, 1).tolist(), "train_seconds": np.round(seconds, 1).tolist()}
        facts |= {"steps": steps, "commands": EXPERIMENTS[name][curve], "cpu": cpu()}
        print(json.dumps({"curve": curve, **facts}), flush=True)
    axes.set(xlabel="training steps", ylabel="held-out accuracy (%)", ylim=(0, 100))
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(out / f"{name}.svg")


if __name__ == "__main__":
    main()
