"""Train every curve of the gallery (``gallery.yaml``) and write docs/gallery.md with its pictures.

    python benchmarks/gallery.py                           # what has no result yet: two to ten minutes a run
    python benchmarks/gallery.py --only trees adapters --seeds 0
    python benchmarks/gallery.py --page                    # train nothing
    python benchmarks/gallery.py --only peers --trl-python /tmp/trl/bin/python --tunix-python /tmp/tunix/bin/python

A curve is a list of commands as a user types them, the last of which is measured; figures that show
the same curve share its runs. Results are kept in ``gallery.json`` per curve and seed: one that is
there is not measured again, and an interrupted run begins anew. A run that fails is named at the
end and costs no other one. Ours keep freed memory in huge pages, as ``quickstart`` sets it; peers
would not fit 23 GB then. They run in environments of their own (``learner_peers.py`` says how to
make them); without one its curves are left out.
"""

from __future__ import annotations

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
from jax_agent_rl.utils.process import KEEP_MEMORY
from jax_agent_rl.utils.yaml_text import load_yaml

GALLERY, RESULTS = (ROOT / "benchmarks" / name for name in ("gallery.yaml", "gallery.json"))
PAGE, PICTURES = ROOT / "docs" / "gallery.md", ROOT / "docs" / "images" / "gallery"

Results = dict[str, dict[str, Any]]
"""By curve and seed, what :func:`measure` returned."""


def run(command: str) -> Path:
    """Run a command of ``jax-agent-rl``, or a script, unless it has ended already, and return its
    run folder.
    """
    words = shlex.split(command)
    folder = ROOT / next(word for word in words if word.startswith("run_dir=")).partition("=")[2]
    if not (folder / "summary.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        print("+", command, flush=True)
        program = (
            []
            if words[0] == "env" or "/" in words[0]
            else [sys.executable, "-m", "jax_agent_rl.cli"]
        )
        environment = {"JAX_PLATFORMS": "cpu"} | os.environ
        if words[1].endswith(".py"):  # a peer's script
            environment.pop("PYTHONPATH", None)  # it is for our environment
        else:
            environment.setdefault("GLIBC_TUNABLES", KEEP_MEMORY)
        subprocess.run(
            [*program, *words], check=True, stdout=subprocess.DEVNULL, cwd=ROOT, env=environment
        )
    return folder


def measure(
    commands: Sequence[str], metric: str, seed: int, out: Path, slug: str, places: Mapping[str, str]
) -> dict[str, Any]:
    """Run a curve's commands with a seed; return its values by training step, and what it cost.

    Raises:
        subprocess.CalledProcessError: a command failed.
    """
    begin = time.monotonic()
    folders = []
    for number, command in enumerate(commands):
        last = number == len(commands) - 1
        name = slug if last else f"{slug}-{number}"
        made = f"{command} seed={seed}".format(out=out, seed=seed, **places)
        folders.append(run(made if "run_dir=" in made else f"{made} run_dir={out}/{name}-{seed}"))
    records = [read_records(folder / "metrics.jsonl") for folder in folders]
    train_seconds = sum(
        line["step_seconds"] for lines in records for line in lines if line["kind"] == "step"
    )
    steps = [line for line in records[-1] if line["kind"] == "step"]
    values = {line["step"]: line[metric] for line in records[-1] if metric in line}
    totals = json.loads((folders[-1] / "summary.json").read_text())
    shutil.rmtree(
        folders[-1] / "checkpoints", ignore_errors=True
    )  # three gigabytes; other curves use exports
    return {
        "steps": list(values),
        "values": [round(value, 4) for value in values.values()],
        "train_seconds": round(train_seconds, 1),
        "minutes": round((time.monotonic() - begin) / 60, 1),
        "zero_variance": round(totals["dropped"].get("zero_variance", 0) / totals["started"], 3),
        "sampled_tokens": round(
            sum(
                line["sampled_tokens_mean"] * sum(line["finish_reasons"].values()) for line in steps
            )
        ),
        "logprob_gap": totals["max_logprob_gap"],
        "warnings": sorted({warning["name"] for warning in totals["warnings"]}),
        "cpu": cpu(),
        "date": datetime.date.today().isoformat(),
    }


# --- the page -------------------------------------------------------------------------------------


def page(figures: Mapping[str, Any], curves: Mapping[str, Any], results: Results) -> str:
    """Return docs/gallery.md: every figure whose curves all have results."""
    lines = [
        "# Gallery",
        "",
        "What recipes and examples learn, over seeds: mean and range, SmolLM2-135M, two CPU cores.",
        (
            "`benchmarks/gallery.py` trains the curves of `benchmarks/gallery.yaml` and writes this"
            " page and its pictures"
        ),
        (
            "from `benchmarks/gallery.json`. Each command runs with seeds from 0 on. Accuracy is of"
            " held-out rows,"
        ),
        (
            "sampled as in training. Minutes count the training steps alone, on machines that also"
            " did other work."
        ),
        "*No gradient* is the share of trajectories in groups of equal rewards.",
    ]
    for name, figure in figures.items():
        shown = {label: results.get(label, {}) for label in figure["curves"]}
        if not all(shown.values()):
            continue
        lines += ["", f"## {figure['title']}", "", figure["lesson"].strip(), ""]
        lines += [
            (
                f"![{figure['title']}: {metric_of(figure)} over training"
                f" steps](images/gallery/{name}.svg)"
            ),
            "",
        ]
        lines += ["| curve | before | after, by seed | sampled tokens | training | no gradient |"]
        lines += ["| --- | --- | --- | --- | --- | --- |"]
        for label, seeds in shown.items():
            runs = list(seeds.values())
            before = float(np.mean([one["values"][0] for one in runs]))
            after = ", ".join(as_text(one["values"][-1], metric_of(figure)) for one in runs)
            minutes = (
                f"{np.mean([one['train_seconds'] for one in runs]) / 60:.1f} min"
                if figure.get("timed", True)
                else "–"
            )
            lost = np.mean([one["zero_variance"] for one in runs])
            tokens = (
                f"{np.mean([one['sampled_tokens'] for one in runs]):,.0f}".removeprefix("0") or "–"
            )
            cells = [
                label,
                as_text(before, metric_of(figure)),
                after,
                tokens,
                minutes,
                f"{lost:.0%}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
        lines += ["", "```bash"]
        for label in shown:
            lines += [f"# {label}"]
            lines += [as_typed(command) for command in curves[label]["commands"]]
        facts = sorted(
            {(one["cpu"], one["date"]) for seeds in shown.values() for one in seeds.values()}
        )
        lines += ["```", "", "; ".join(f"{machine}, {date}" for machine, date in facts) + "."]
        if warned := {
            x: n
            for x in shown
            if (n := sorted({w for one in shown[x].values() for w in one["warnings"]}))
        }:
            said = "; ".join(
                f"{label}: {', '.join(f'`{n}`' for n in names)}" for label, names in warned.items()
            )
            lines += ["", f"Warnings of these runs: {said}."]
    return "\n".join(lines) + "\n"


def as_typed(command: str) -> str:
    """Return a command as a user types it."""
    typed = command.replace("{out}", "runs").replace("-{seed}", "").removeprefix("env ")
    typed = re.sub(r"\{(\w+)\}", lambda found: found[1].upper(), typed)  # an interpreter, a folder
    return typed if typed[0].isupper() or "/" in typed.split()[0] else f"jax-agent-rl {typed}"


def metric_of(figure: Mapping[str, Any]) -> str:
    return figure.get("metric", "accuracy")


def as_text(value: float, metric: str) -> str:
    return f"{value:.0%}" if metric == "accuracy" else f"{value:.2f}"


def draw(figure: Mapping[str, Any], results: Results, file: Path) -> None:
    """Draw a figure's curves, mean and range over seeds."""
    drawn = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = drawn.subplots()
    for label in figure["curves"]:
        runs = [
            one for one in results[label].values() if one["steps"] == results[label]["0"]["steps"]
        ]
        values = np.asarray([one["values"] for one in runs])
        (line,) = axes.plot(runs[0]["steps"], values.mean(0), label=label)
        axes.fill_between(
            runs[0]["steps"], values.min(0), values.max(0), color=line.get_color(), alpha=0.15
        )
    axes.set(xlabel="training step", ylabel=metric_of(figure))
    if metric_of(figure) == "accuracy":
        axes.set(ylim=(0, 1), ylabel="held-out accuracy")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    axes.locator_params(axis="x", integer=True)
    file.parent.mkdir(exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "gallery"}):  # the same picture is the same file
        drawn.savefig(file, metadata={"Date": None})


def main() -> None:
    tree = load_yaml(GALLERY.read_text())
    figures, curves = tree["figures"], tree["curves"]
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
    places = {
        name: value
        for name, value in vars(options).items()
        if name == "minilm" or name.endswith("_python")
    }
    results: Results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    wanted = {label: figures[name] for name in options.only for label in figures[name]["curves"]}
    failed = []
    for command in [] if options.page else tree["prepare"]:
        subprocess.run(
            [sys.executable, *shlex.split(command)], check=True, stdout=subprocess.DEVNULL, cwd=ROOT
        )
    for label, figure in {} if options.page else wanted.items():
        slug = "-".join("".join(x if x.isalnum() else " " for x in label.lower()).split())
        for seed in options.seeds:
            if str(seed) in results.get(label, {}):
                continue
            commands = curves[label]["commands"]
            if missing := [
                name for name in places if f"{{{name}}}" in " ".join(commands) and not places[name]
            ]:
                print(f"{label}: --{missing[0].replace('_', '-')} is not given", flush=True)
                break
            try:
                made = measure(commands, metric_of(figure), seed, options.out, slug, places)
            except subprocess.CalledProcessError as error:
                failed.append(f"{label}, seed {seed} (status {error.returncode})")
                continue
            results.setdefault(label, {})[str(seed)] = made
            if not curves[label].get("keep"):  # two checkpoints of a run are 3 GB
                shutil.rmtree(
                    ROOT / options.out / f"{slug}-{seed}" / "checkpoints", ignore_errors=True
                )
            print(
                f"{label}, seed {seed}: {made['values']} in {made['minutes']} minutes", flush=True
            )
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    for name, figure in figures.items():
        if all(results.get(label) for label in figure["curves"]):
            draw(figure, results, PICTURES / f"{name}.svg")
    PAGE.write_text(page(figures, curves, results))
    if failed:
        sys.exit("failed: " + "; ".join(failed))


if __name__ == "__main__":
    main()
