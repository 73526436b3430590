"""Run the benchmarks one after the other and write what they measured: benchmarks/results.json and
docs/results.md.

    python benchmarks/run_all.py
    python benchmarks/run_all.py --only decode learner --again     # measures these anew
    python benchmarks/run_all.py --vllm-python .venv-vllm/bin/python --trl-python /tmp/trl/bin/python

Results are kept per benchmark and processor, each with its command, date and versions, and written
as soon as they are there: an interrupted run goes on where it stopped. A benchmark that fails is
named at the end and costs no other one. Peers run in environments of their own, see ``decode.py``,
``learner_peers.py`` and ``supervised_peers.py``; without one its ratios are left out. All of them,
peers too, keep freed memory in huge pages, as ``quickstart`` sets it. Keep the machine free of
other work meanwhile.
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

from jax_agent_rl.utils.process import KEEP_MEMORY

RESULTS = ROOT / "benchmarks" / "results.json"
MACHINES = ROOT / "benchmarks" / "machines.json"
"""The machines of the first table: where they stand in ``results.json``, or figures whose records
are not kept."""

PAGE = ROOT / "docs" / "results.md"
VERSIONS = ("jax_agent_rl", "jax", "torch", "transformers")

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
    "service": "",
    "async_rollout": "",
    "agent_modes": "--repeats 1",
    "scaling": "",
    "prefix_routing": "",
    "weight_publication": "",
    "recovery": "",
    "tool_server": "--seconds 60",
    "diagnosis": "",
}


def command_of(name: str, options: argparse.Namespace) -> list[str] | None:
    """Return a benchmark's arguments, those without a value left out; None if all its peers are
    missing.
    """
    words = (
        BENCHMARKS[name]
        .format(**{key: value or "" for key, value in vars(options).items()})
        .split(" ")
    )
    given, missing = [], 0
    for flag, value in zip(words[::2], words[1::2], strict=False):
        given += [flag, value] if value else []
        missing += not value
    return None if missing and not given and name.endswith("_peers") else given


def run(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Run a benchmark and return its record.

    Raises:
        RuntimeError: it failed, or printed no JSON object.
    """
    begin = time.monotonic()
    command = [sys.executable, "-u", str(ROOT / "benchmarks" / f"{name}.py"), *arguments]
    environment = {"GLIBC_TUNABLES": KEEP_MEMORY} | os.environ
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )
    assert process.stdout is not None
    found = []
    for line in process.stdout:
        print("   ", line, end="", flush=True)
        if line.startswith("{"):
            found.append(json.loads(line))
    if process.wait() or not found:
        raise RuntimeError(
            f"status {process.returncode}" if process.returncode else "no JSON object was printed"
        )
    return {
        "command": " ".join(
            [
                "python",
                f"benchmarks/{name}.py",
                *("PYTHON" if "/" in word else word for word in arguments),
            ]
        ),
        "date": datetime.date.today().isoformat(),
        "minutes": round((time.monotonic() - begin) / 60, 1),
        "versions": {package: importlib.metadata.version(package) for package in VERSIONS},
        "result": found if len(found) > 1 else found[0],
    }


# --- the page -------------------------------------------------------------------------------------

FIGURES = {  # of the first table: by label, the benchmark and where in its result the number stands
    **{
        f"decoding, {requests}, {label}": ("decode", f"batch_{requests.split()[0]}", key)
        for label, key in (
            ("tokens per second", "tokens_per_second"),
            ("relative to vLLM", "ratio_vs_vllm"),
            ("share of the machine's limit", "share_of_floor"),
        )
        for requests in ("1 request", "8 requests", "32 requests")
    },
    **{
        f"speculation relative to plain decoding, {requests}": (
            "speculation",
            f"batch_{requests.split()[0]}",
            "ratio",
        )
        for requests in ("1 request", "4 requests", "8 requests", "32 requests")
    },
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
        by_machine[name] = (
            machine["figures"] if "figures" in machine else figures_of(results[machine["results"]])
        )
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
    low, high = figure(label, min(values)), figure(label, max(values))
    return low if low == high else f"{low} to {high}"


def page(
    results: Mapping[str, Mapping[str, Any]], machines: Mapping[str, Mapping[str, Any]]
) -> str:
    """Return docs/results.md: all machines side by side, then what each benchmark measured, and
    how.
    """
    lines = [
        "# Results",
        "",
        (
            "`benchmarks/run_all.py` measures, and writes this page. Everything ran on CPUs: no"
            " figure is of a TPU or a"
        ),
        (
            "GPU. The model is SmolLM2-135M in float32. Freed memory is kept in huge pages, as"
            " `quickstart` sets it."
        ),
        "`--help` of a script says what it does and what its figures mean.",
        "",
        "## All machines",
        "",
        *_table(
            [
                {"machine": name, "processor": machine["processor"], "measured": machine["date"]}
                for name, machine in machines.items()
            ]
        ),
        "",
        (
            "A ratio above 1 means that this project is faster than what it is compared with on the"
            " same machine. An"
        ),
        (
            "*update* is one GRPO update of a group of 8 completions of 40 tokens to a prompt of"
            " 256; TRL is 1.16.0 and"
        ),
        "Tunix 0.1.7. Each figure is one run.",
        "",
        *machines_table(machines, results),
    ]
    letters = {
        machine["results"]: name for name, machine in machines.items() if "results" in machine
    }
    for name in BENCHMARKS:
        records = {machine: own[name] for machine, own in results.items() if name in own}
        if not records:
            continue
        script = (ROOT / "benchmarks" / f"{name}.py").read_text()
        docstring = ast.get_docstring(ast.parse(script)) or name
        title = " ".join(docstring.partition("\n\n")[0].split())
        lines += ["", f"## {name}.py", "", title]
        for machine, record in records.items():
            versions = ", ".join(
                f"{package} {version}" for package, version in record["versions"].items()
            )
            place = f"machine {letters[machine]}" if machine in letters else machine
            facts = f"{place}; {record['date']}; {record['minutes']} minutes; {versions}"
            lines += ["", f"`{record['command']}`: {facts}", "", *tables(record["result"])]
    return "\n".join(lines) + "\n"


def tables(result: Any) -> list[str]:
    """Return a result as Markdown: its plain values in one table, and one for the mappings in it of
    one shape.
    """
    if isinstance(result, list):
        return _table([shown(row) for row in result])
    plain = {key: value for key, value in result.items() if not isinstance(value, Mapping)}
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for key, value in result.items():
        if isinstance(value, Mapping):
            row = {"": key.replace("_", " "), **shown(value)}
            groups.setdefault(tuple(value), []).append(row)
    made = [_table(rows) for rows in groups.values()]
    if values := shown(plain):
        made.insert(0, _table([values]))
    return [line for table in made for line in ["", *table]][1:]


def shown(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return values as text by column, mappings flattened."""
    made = {}
    for key, value in values.items():
        column = f"{prefix} {key}".strip().replace("_", " ")
        if isinstance(value, Mapping):
            made |= shown(value, column)
        elif isinstance(value, float):
            made[column] = f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
        elif isinstance(value, list):
            made[column] = ", ".join(f"{x:.3g}" if isinstance(x, float) else str(x) for x in value)
        elif value is not None and column != "cpu":
            made[column] = str(value)
    return made


def _table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    made = [
        columns,
        ["---"] * len(columns),
        *([row.get(column, "") for column in columns] for row in rows),
    ]
    return ["| " + " | ".join(cells) + " |" for cells in made]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--again", action="store_true", help="measure what has a result, too")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    for peer in ("vllm", "trl", "tunix"):
        parser.add_argument(f"--{peer}-python", help=f"interpreter of {peer}'s environment")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    own = results.setdefault(cpu(), {})
    failed = []
    for number, name in enumerate([] if options.page else options.only):
        arguments = command_of(name, options)
        if arguments is None or (name in own and not options.again):
            print(
                f"{name}:"
                f" {'no peer is given' if arguments is None else 'has a result (--again measures anew)'}"
            )
            continue
        print(f"{number + 1}/{len(options.only)} {name}", flush=True)
        try:
            own[name] = run(name, arguments)
        except RuntimeError as error:
            failed.append(f"{name} ({error})")
            continue
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(results, json.loads(MACHINES.read_text())))
    if failed:
        sys.exit("failed: " + ", ".join(failed))


if __name__ == "__main__":
    main()
