r"""Train every curve of the gallery (``gallery.yaml``) and write docs/gallery.md with its pictures.

    python benchmarks/gallery.py            # what has no result yet: two to ten minutes a run
    python benchmarks/gallery.py --only trees adapters --seeds 0
    python benchmarks/gallery.py --page     # train nothing
    python benchmarks/gallery.py --only peers \
        --trl-python /tmp/trl/bin/python --tunix-python /tmp/tunix/bin/python

A curve is a list of commands as a user types them, the last of which is measured; figures that show
the same curve share its runs. Results are kept in ``gallery.json`` per curve and seed: one that is
there is not measured again, and an interrupted run begins anew. A run that fails is named at the
end and costs no other one. Ours keep freed memory in huge pages, as ``quickstart`` sets it; peers
would not fit 23 GB then. They run in environments of their own (``learner_peers.py`` says how to
make them); without one its curves are left out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from common import ROOT, argument_parser, cpu
from matplotlib.figure import Figure

from jax_agent_rl.observe.run_dir import read_records
from jax_agent_rl.utils.startup import KEEP_MEMORY
from jax_agent_rl.utils.yaml_text import load_yaml

GALLERY = ROOT / "benchmarks" / "gallery.yaml"
RESULTS = ROOT / "benchmarks" / "gallery.json"
PAGE = ROOT / "docs" / "gallery.md"
PICTURES = ROOT / "docs" / "images" / "gallery"

Results = dict[str, dict[str, Any]]
"""By curve and seed, what :func:`measure` returned."""


def run(command: str) -> Path:
    """Run a command of ``jax-agent-rl``, or a script, unless it has ended already.

    Returns:
        Its run folder.
    """
    words = shlex.split(command)
    run_dir = next(word for word in words if word.startswith("run_dir=")).removeprefix("run_dir=")
    folder = ROOT / run_dir
    if (folder / "summary.json").exists():
        return folder

    shutil.rmtree(folder, ignore_errors=True)
    print("+", command, flush=True)
    if words[0] != "env" and "/" not in words[0]:
        words = [sys.executable, "-m", "jax_agent_rl.cli", *words]
        is_peer = False
    else:
        is_peer = words[1].endswith(".py")

    environment = {"JAX_PLATFORMS": "cpu"} | os.environ
    if is_peer:
        environment.pop("PYTHONPATH", None)  # it is for our environment
    else:
        environment.setdefault("GLIBC_TUNABLES", KEEP_MEMORY)
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, cwd=ROOT, env=environment)
    return folder


def measure(
    commands: Sequence[str], metric: str, seed: int, out: Path, slug: str, paths: Mapping[str, str]
) -> dict[str, Any]:
    """Run a curve's commands with a seed; return its values by training step, and what it cost.

    Args:
        metric: name of the values in ``metrics.jsonl``.
        out: folder of the run folders.
        slug: of the curve, for the names of its run folders.
        paths: interpreters and folders that commands name.

    Raises:
        subprocess.CalledProcessError: a command failed.
    """
    start = time.monotonic()
    folders = []
    for number, command in enumerate(commands):
        is_last = number == len(commands) - 1
        name = slug if is_last else f"{slug}-{number}"
        command = f"{command} seed={seed}".format(out=out, seed=seed, **paths)
        if "run_dir=" not in command:
            command += f" run_dir={out}/{name}-{seed}"
        folders.append(run(command))

    # All commands cost time; the curve is the last one's.
    records_by_command = [read_records(folder / "metrics.jsonl") for folder in folders]
    train_seconds = 0.0
    for records in records_by_command:
        for record in records:
            if record["kind"] == "step":
                train_seconds += record["step_seconds"]

    values = {}
    sampled_tokens = 0.0
    for record in records_by_command[-1]:
        if metric in record:
            values[record["step"]] = record[metric]
        if record["kind"] == "step":
            num_trajectories = sum(record["finish_reasons"].values())
            sampled_tokens += record["sampled_tokens_mean"] * num_trajectories

    totals = json.loads((folders[-1] / "summary.json").read_text())
    # Three gigabytes; other curves use exports.
    shutil.rmtree(folders[-1] / "checkpoints", ignore_errors=True)
    return {
        "steps": list(values),
        "values": [round(value, 4) for value in values.values()],
        "train_seconds": round(train_seconds, 1),
        "minutes": round((time.monotonic() - start) / 60, 1),
        "zero_variance": round(totals["dropped"].get("zero_variance", 0) / totals["started"], 3),
        "sampled_tokens": round(sampled_tokens),
        "logprob_gap": totals["max_logprob_gap"],
        "warnings": sorted({warning["name"] for warning in totals["warnings"]}),
        "cpu": cpu(),
        "date": datetime.date.today().isoformat(),
    }


# --- the page -------------------------------------------------------------------------------------


_INTRODUCTION = """\
# Gallery

What recipes and examples learn, over seeds: mean and range, SmolLM2-135M, two CPU cores.
`benchmarks/gallery.py` trains the curves of `benchmarks/gallery.yaml` and writes this page and its
pictures from `benchmarks/gallery.json`. Each command runs with seeds from 0 on. Accuracy is of
held-out rows, sampled as in training. Minutes count the training steps alone, on machines that also
did other work. *No gradient* is the share of trajectories in groups of equal rewards.
"""


def page(figures: Mapping[str, Any], curves: Mapping[str, Any], results: Results) -> str:
    """Return docs/gallery.md: every figure whose curves all have results."""
    lines = _INTRODUCTION.splitlines()
    for name, figure in figures.items():
        runs_by_curve = {}
        for label in figure["curves"]:
            runs_by_curve[label] = list(results.get(label, {}).values())
        if not all(runs_by_curve.values()):
            continue
        commands = {label: curves[label]["commands"] for label in figure["curves"]}
        lines += section(name, figure, commands, runs_by_curve)
    return "\n".join(lines) + "\n"


def section(
    name: str,
    figure: Mapping[str, Any],
    commands: Mapping[str, Sequence[str]],
    runs_by_curve: Mapping[str, Sequence[Mapping[str, Any]]],
) -> list[str]:
    """Return the lines of one figure.

    Args:
        name: of its picture.
        commands: by curve, as in ``gallery.yaml``.
        runs_by_curve: one per seed, as :func:`measure` returned them.
    """
    title = figure["title"]
    picture = f"![{title}: {metric_of(figure)} over training steps](images/gallery/{name}.svg)"
    lines = ["", f"## {title}", "", figure["lesson"].strip(), "", picture, ""]

    lines.append("| curve | before | after, by seed | sampled tokens | training | no gradient |")
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for label, runs in runs_by_curve.items():
        cells = [label, *table_cells(figure, runs)]
        lines.append("| " + " | ".join(cells) + " |")

    lines += ["", "```bash"]
    for label in runs_by_curve:
        lines.append(f"# {label}")
        lines += [as_typed(command) for command in commands[label]]

    machines = set()
    warnings_by_curve: dict[str, set[str]] = {}
    for label, runs in runs_by_curve.items():
        for one_run in runs:
            machines.add((one_run["cpu"], one_run["date"]))
            warnings_by_curve.setdefault(label, set()).update(one_run["warnings"])
    facts = "; ".join(f"{machine}, {date}" for machine, date in sorted(machines))
    lines += ["```", "", f"{facts}."]

    warnings = []
    for label, names in warnings_by_curve.items():
        if names:
            warnings.append(f"{label}: {', '.join(f'`{name}`' for name in sorted(names))}")
    if warnings:
        lines += ["", f"Warnings of these runs: {'; '.join(warnings)}."]
    return lines


def table_cells(figure: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the cells of a curve, from ``before`` on."""
    metric = metric_of(figure)
    before = float(np.mean([one_run["values"][0] for one_run in runs]))
    after = ", ".join(as_text(one_run["values"][-1], metric) for one_run in runs)
    num_tokens = np.mean([one_run["sampled_tokens"] for one_run in runs])
    tokens = f"{num_tokens:,.0f}"
    if tokens == "0":
        tokens = "–"
    minutes = "–"
    if figure.get("timed", True):
        seconds = np.mean([one_run["train_seconds"] for one_run in runs])
        minutes = f"{seconds / 60:.1f} min"
    zero_variance = np.mean([one_run["zero_variance"] for one_run in runs])
    return [as_text(before, metric), after, tokens, minutes, f"{zero_variance:.0%}"]


def as_typed(command: str) -> str:
    """Return a command as a user types it."""
    typed = command.replace("{out}", "runs").replace("-{seed}", "").removeprefix("env ")
    # What remains in braces is an interpreter or a folder.
    typed = re.sub(r"\{(\w+)\}", lambda match: match[1].upper(), typed)
    if typed[0].isupper() or "/" in typed.split()[0]:
        return typed
    return f"jax-agent-rl {typed}"


def metric_of(figure: Mapping[str, Any]) -> str:
    """Return the name of the metric that a figure shows."""
    return figure.get("metric", "accuracy")


def as_text(value: float, metric: str) -> str:
    """Return a value of a metric for the table."""
    if metric == "accuracy":
        return f"{value:.0%}"
    return f"{value:.2f}"


def draw(figure: Mapping[str, Any], results: Results, file: Path) -> None:
    """Draw a figure's curves, mean and range over seeds."""
    picture = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = picture.subplots()
    for label in figure["curves"]:
        steps = results[label]["0"]["steps"]
        values = np.asarray(
            [one_run["values"] for one_run in results[label].values() if one_run["steps"] == steps]
        )
        (line,) = axes.plot(steps, values.mean(0), label=label)
        axes.fill_between(steps, values.min(0), values.max(0), color=line.get_color(), alpha=0.15)
    axes.set(xlabel="training step", ylabel=metric_of(figure))
    if metric_of(figure) == "accuracy":
        axes.set(ylim=(0, 1), ylabel="held-out accuracy")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    axes.locator_params(axis="x", integer=True)
    file.parent.mkdir(exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "gallery"}):  # the same picture is the same file
        picture.savefig(file, metadata={"Date": None})


def main() -> None:
    tree = load_yaml(GALLERY.read_text())
    figures = tree["figures"]
    curves = tree["curves"]
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=sorted(figures), default=list(figures), metavar="FIGURE"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gallery"), help="where the runs are kept"
    )
    parser.add_argument("--page", action="store_true", help="train nothing")
    for peer in ("trl", "tunix", "vllm"):
        parser.add_argument(f"--{peer}-python", help=f"interpreter of {peer}'s environment")
    parser.add_argument("--minilm", help="folder of all-MiniLM-L6-v2")
    options = parser.parse_args()

    results: Results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    failures = []
    if not options.page:
        failures = train_missing(tree, results, options)

    for name, figure in figures.items():
        if all(results.get(label) for label in figure["curves"]):
            draw(figure, results, PICTURES / f"{name}.svg")
    PAGE.write_text(page(figures, curves, results))
    if failures:
        sys.exit("failed: " + "; ".join(failures))


def train_missing(
    tree: Mapping[str, Any], results: Results, options: argparse.Namespace
) -> list[str]:
    """Train what has no result yet, add the results, and write them after each run.

    Args:
        tree: of ``gallery.yaml``.

    Returns:
        The runs that failed.
    """
    for command in tree["prepare"]:
        words = [sys.executable, *shlex.split(command)]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)

    paths = {}
    for name, value in vars(options).items():
        if name == "minilm" or name.endswith("_python"):
            paths[name] = value
    metrics = {}
    for name in options.only:
        figure = tree["figures"][name]
        for label in figure["curves"]:
            metrics[label] = metric_of(figure)

    failures = []
    for label, metric in metrics.items():
        curve = tree["curves"][label]
        commands = curve["commands"]
        slug = "-".join(re.findall(r"[^\W_]+", label.lower()))
        missing = [
            name for name in paths if f"{{{name}}}" in " ".join(commands) and not paths[name]
        ]
        for seed in options.seeds:
            if str(seed) in results.get(label, {}):
                continue
            if missing:
                print(f"{label}: --{missing[0].replace('_', '-')} is not given", flush=True)
                break
            try:
                result = measure(commands, metric, seed, options.out, slug, paths)
            except subprocess.CalledProcessError as error:
                failures.append(f"{label}, seed {seed} (status {error.returncode})")
                continue

            results.setdefault(label, {})[str(seed)] = result
            if not curve.get("keep"):  # two checkpoints of a run are 3 GB
                folder = ROOT / options.out / f"{slug}-{seed}"
                shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            print(
                f"{label}, seed {seed}: {result['values']} in {result['minutes']} minutes",
                flush=True,
            )
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return failures


if __name__ == "__main__":
    main()
