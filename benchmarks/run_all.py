r"""Run the benchmarks one after the other, and write benchmarks/results.json and docs/results.md.

    python benchmarks/run_all.py
    python benchmarks/run_all.py --only decode learner --again     # measures these anew
    python benchmarks/run_all.py \
        --vllm-python .venv-vllm/bin/python --trl-python /tmp/trl/bin/python

Results are kept per benchmark and processor, each with its command, date and versions, and written
as soon as they are there: an interrupted run goes on where it stopped. A benchmark that fails is
named at the end and costs no other one. Peers run in environments of their own, see ``decode.py``,
``learner_peers.py`` and ``supervised_peers.py``; without one its ratios are left out. Ours and
peers keep freed memory in huge pages, as ``quickstart`` sets it. Keep the machine free of other
work meanwhile.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from common import ROOT, argument_parser, cpu

import jax_agent_rl
from jax_agent_rl.utils.startup import KEEP_MEMORY

RESULTS = ROOT / "benchmarks" / "results.json"
MACHINES = ROOT / "benchmarks" / "machines.json"
"""The machines of the first table: their keys in ``results.json``, or figures without records."""

PAGE = ROOT / "docs" / "results.md"
VERSIONS = ("jax", "torch", "transformers")

BENCHMARKS = {  # by script: its arguments
    "decode": "--vllm-python {vllm_python}",
    "decode_profile": "",
    "speculation": "--rounds 1",
    "deterministic": "",
    "in_flight_update": "",
    "learner": "",
    "learner_profile": "",
    "learner_peers": "--trl-python {trl_python} --tunix-python {tunix_python}",
    "supervised_peers": "--trl-python {trl_python}",
    "shared_prefix": "",
    "recurrent": "",
    "service": "",
    "async_rollout": "",
    "agent_modes": "--repeats 1",
    "scaling": "",
    "prefix_routing": "",
    "sandboxes": "",
    "long_prompts": "",
    "weight_publication": "",
    "recovery": "",
    "tool_server": "--seconds 60",
    "diagnosis": "",
}


def command_of(name: str, options: argparse.Namespace) -> list[str] | None:
    """Return a benchmark's arguments, without options that have no value.

    Returns:
        None if it compares with peers, and all of them are missing.
    """
    values = {key: value or "" for key, value in vars(options).items()}
    words = BENCHMARKS[name].format(**values).split(" ")

    arguments = []
    for flag, value in zip(words[::2], words[1::2], strict=False):
        if value:
            arguments += [flag, value]
    if name.endswith("_peers") and not arguments:
        return None
    return arguments


def run(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Run a benchmark and return its record.

    Raises:
        RuntimeError: it failed, or printed no JSON object.
    """
    start = time.monotonic()
    command = [sys.executable, "-u", str(ROOT / "benchmarks" / f"{name}.py"), *arguments]
    environment = {"GLIBC_TUNABLES": KEEP_MEMORY} | os.environ
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )
    assert process.stdout is not None
    results = []
    for line in process.stdout:
        print("   ", line, end="", flush=True)
        if line.startswith("{"):
            results.append(json.loads(line))

    if process.wait():
        raise RuntimeError(f"status {process.returncode}")
    if not results:
        raise RuntimeError("no JSON object was printed")

    # Where an interpreter is on this machine does not belong into the record.
    recorded_words = ["PYTHON" if "/" in word else word for word in arguments]
    return {
        "command": " ".join(["python", f"benchmarks/{name}.py", *recorded_words]),
        "date": datetime.date.today().isoformat(),
        "minutes": round((time.monotonic() - start) / 60, 1),
        "versions": versions(),
        "result": results if len(results) > 1 else results[0],
    }


def versions() -> dict[str, str]:
    """Return the versions of what was measured."""
    found = {"jax_agent_rl": jax_agent_rl.__version__}  # of this folder, whatever is installed
    for package in VERSIONS:
        found[package] = importlib.metadata.version(package)
    return found


# --- the page -------------------------------------------------------------------------------------

FIGURES = {
    "decoding, 1 request, tokens per second": ("decode", "batch_1", "tokens_per_second"),
    "decoding, 8 requests, tokens per second": ("decode", "batch_8", "tokens_per_second"),
    "decoding, 32 requests, tokens per second": ("decode", "batch_32", "tokens_per_second"),
    "decoding, 1 request, relative to vLLM": ("decode", "batch_1", "ratio_vs_vllm"),
    "decoding, 8 requests, relative to vLLM": ("decode", "batch_8", "ratio_vs_vllm"),
    "decoding, 32 requests, relative to vLLM": ("decode", "batch_32", "ratio_vs_vllm"),
    "decoding, 1 request, share of the machine's limit": ("decode", "batch_1", "share_of_floor"),
    "decoding, 8 requests, share of the machine's limit": ("decode", "batch_8", "share_of_floor"),
    "decoding, 32 requests, share of the machine's limit": ("decode", "batch_32", "share_of_floor"),
    "speculation relative to plain decoding, 1 request": ("speculation", "batch_1", "ratio"),
    "speculation relative to plain decoding, 4 requests": ("speculation", "batch_4", "ratio"),
    "speculation relative to plain decoding, 8 requests": ("speculation", "batch_8", "ratio"),
    "speculation relative to plain decoding, 32 requests": ("speculation", "batch_32", "ratio"),
    "learner, tokens per second": ("learner", "tokens_per_second"),
    "learner, share of sgemm": ("learner", "share_of_sgemm"),
    "learner relative to transformers": ("learner", "ratio_vs_transformers"),
    "update relative to TRL": ("learner_peers", "ratio_vs_trl_without_sharing"),
    "update relative to Tunix": ("learner_peers", "ratio_vs_tunix_without_sharing"),
    "update with shared prefixes relative to TRL": ("learner_peers", "ratio_vs_trl"),
    "update with shared prefixes relative to Tunix": ("learner_peers", "ratio_vs_tunix"),
    "update with shared prefixes relative to one without": ("shared_prefix", "ratio"),
    "supervised update with shared prefixes relative to TRL": (
        "supervised_peers",
        "sft",
        "shared",
        "ratio",
    ),
    "DPO update with shared prefixes relative to TRL": (
        "supervised_peers",
        "dpo",
        "shared",
        "ratio",
    ),
    "fully asynchronous relative to synchronous": (
        "async_rollout",
        "fully_async",
        "samples_per_second",
    ),
    "fully asynchronous, share of the ideal": ("async_rollout", "fully_async", "share_of_ideal"),
}
"""Rows of the first table: by label, the benchmark and the path of the number in its result."""


def figures_of(records: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a machine from its records."""
    figures = {}
    for label, (benchmark, *path) in FIGURES.items():
        if benchmark not in records:
            continue
        result = value = records[benchmark]["result"]
        for key in path:
            value = value[key]
        if label == "fully asynchronous relative to synchronous":
            value /= result["sync"]["samples_per_second"]
        figures[label] = value
    return figures


def machines_table(
    machines: Mapping[str, Mapping[str, Any]], results: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Return one table of all machines: a row for each figure, the last column over all of them."""
    by_machine = {}
    for name, machine in machines.items():
        if "figures" in machine:
            by_machine[name] = machine["figures"]
        else:
            by_machine[name] = figures_of(results[machine["results"]])

    rows = []
    for label in FIGURES:
        values = [figures[label] for figures in by_machine.values() if label in figures]
        if not values:
            continue
        row = {"": label}
        for name, figures in by_machine.items():
            row[name] = figure(label, figures[label]) if label in figures else ""
        row["all"] = value_range(label, values)
        rows.append(row)
    return _table(rows)


def figure(label: str, value: float) -> str:
    """Return a value with the unit of its figure."""
    if "relative to" in label:
        return f"{value:.2f}×"
    if "share" in label:
        return f"{100 * value:.0f} %"
    return f"{value:.3g}"


def value_range(label: str, values: Sequence[float]) -> str:
    """Return the smallest and the largest value; of a speed nothing, for machines differ."""
    if "per second" in label:
        return ""
    low = figure(label, min(values))
    high = figure(label, max(values))
    if low == high:
        return low
    return f"{low} to {high}"


_INTRODUCTION = """\
# Results

`benchmarks/run_all.py` measures, and writes this page. Everything ran on CPUs: no figure is of a
TPU or a GPU. The model is SmolLM2-135M in float32. Freed memory is kept in huge pages, as
`quickstart` sets it. `--help` of a script says what it does and what its figures mean.
"""
_RATIOS = """\
A ratio above 1 means that this project is faster than what it is compared with on the same machine.
An *update* is one GRPO update of a group of 8 completions of 40 tokens to a prompt of 256; TRL is
1.16.0 and Tunix 0.1.7. Each figure is one run.
"""


def page(
    results: Mapping[str, Mapping[str, Any]], machines: Mapping[str, Mapping[str, Any]]
) -> str:
    """Return docs/results.md: all machines side by side, then each benchmark with its results."""
    machine_rows = []
    for name, machine in machines.items():
        machine_rows.append(
            {"machine": name, "processor": machine["processor"], "measured": machine["date"]}
        )

    lines = [
        *_INTRODUCTION.splitlines(),
        "",
        "## All machines",
        "",
        *_table(machine_rows),
        "",
        *_RATIOS.splitlines(),
        "",
        *machines_table(machines, results),
    ]
    letters = {}
    for name, machine in machines.items():
        if "results" in machine:
            letters[machine["results"]] = name

    for name in BENCHMARKS:
        records = {}
        for machine, machine_records in results.items():
            if name in machine_records:
                records[machine] = machine_records[name]
        if not records:
            continue

        script = (ROOT / "benchmarks" / f"{name}.py").read_text()
        docstring = ast.get_docstring(ast.parse(script)) or name
        summary, _, _ = docstring.partition("\n\n")
        title = " ".join(summary.split())
        lines += ["", f"## {name}.py", "", title]
        for machine, record in records.items():
            versions = ", ".join(
                f"{package} {version}" for package, version in record["versions"].items()
            )
            machine_name = f"machine {letters[machine]}" if machine in letters else machine
            facts = f"{machine_name}; {record['date']}; {record['minutes']} minutes; {versions}"
            lines += ["", f"`{record['command']}`: {facts}", "", *tables(record["result"])]
    return "\n".join(lines) + "\n"


def tables(result: Any) -> list[str]:
    """Return a result as Markdown.

    Its plain values are one table; mappings in it that have the same keys are another one.
    """
    if isinstance(result, list):
        return _table([as_cells(row) for row in result])

    plain_values = {}
    rows_by_keys: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for key, value in result.items():
        if isinstance(value, Mapping):
            row = {"": key.replace("_", " "), **as_cells(value)}
            rows_by_keys.setdefault(tuple(value), []).append(row)
        else:
            plain_values[key] = value

    all_rows = list(rows_by_keys.values())
    plain_row = as_cells(plain_values)
    if plain_row:
        all_rows.insert(0, [plain_row])

    lines: list[str] = []
    for rows in all_rows:
        if lines:
            lines.append("")
        lines += _table(rows)
    return lines


def as_cells(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return values as text by column, mappings flattened."""
    cells = {}
    for key, value in values.items():
        column = f"{prefix} {key}".strip().replace("_", " ")
        if isinstance(value, Mapping):
            cells |= as_cells(value, column)
        elif isinstance(value, float):
            cells[column] = f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
        elif isinstance(value, list):
            cells[column] = ", ".join(f"{x:.3g}" if isinstance(x, float) else str(x) for x in value)
        elif value is not None and column != "cpu":
            cells[column] = str(value)
    return cells


def _table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    columns: list[str] = []
    for row in rows:
        for column in row:
            if column not in columns:
                columns.append(column)

    table = [columns, ["---"] * len(columns)]
    for row in rows:
        table.append([row.get(column, "") for column in columns])
    return ["| " + " | ".join(cells) + " |" for cells in table]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--again", action="store_true", help="measure what has a result as well")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    for peer in ("vllm", "trl", "tunix"):
        parser.add_argument(f"--{peer}-python", help=f"interpreter of {peer}'s environment")
    options = parser.parse_args()

    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    records = results.setdefault(cpu(), {})
    failures = []
    if not options.page:
        for number, name in enumerate(options.only):
            arguments = command_of(name, options)
            if arguments is None:
                print(f"{name}: no peer is given")
                continue
            if name in records and not options.again:
                print(f"{name}: has a result (--again measures anew)")
                continue

            print(f"{number + 1}/{len(options.only)} {name}", flush=True)
            try:
                records[name] = run(name, arguments)
            except RuntimeError as error:
                failures.append(f"{name} ({error})")
                continue
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")

    PAGE.write_text(page(results, json.loads(MACHINES.read_text())))
    if failures:
        sys.exit("failed: " + ", ".join(failures))


if __name__ == "__main__":
    main()
