"""docs/results.md shows what benchmarks/results.json holds, and nothing else."""

import json
import re
from types import SimpleNamespace

import pytest

from tests.unit.docs.pages import BENCHMARKS, DOCS, ROOT, import_benchmark


@pytest.fixture
def run_all(monkeypatch: pytest.MonkeyPatch):
    return import_benchmark(monkeypatch, "run_all")


def test_page_and_results_agree(run_all):
    results, machines = (
        json.loads((BENCHMARKS / name).read_text()) for name in ("results.json", "machines.json")
    )
    assert (DOCS / "results.md").read_text() == run_all.page(results, machines)


def test_the_table_of_machines_has_ranges_of_ratios_and_none_of_speeds(run_all):
    machines = {
        "A": {"processor": "x", "date": "today", "figures": {"update relative to TRL": 1.25}},
        "B": {"processor": "y", "date": "today", "results": "y, 2 cores"},
    }
    results = {"y, 2 cores": {"learner_peers": {"result": {"ratio_vs_trl_without_sharing": 0.5}}}}
    results["y, 2 cores"]["learner_peers"]["result"] |= {
        "ratio_vs_tunix_without_sharing": 2.0,
        "ratio_vs_trl": 3.0,
        "ratio_vs_tunix": 4.0,
    }
    results["y, 2 cores"]["learner"] = {
        "result": {"tokens_per_second": 10.0, "share_of_sgemm": 0.5, "ratio_vs_transformers": 0.9}
    }
    table_text = run_all.machines_table(machines, results)
    assert "| update relative to TRL | 1.25× | 0.50× | 0.50× to 1.25× |" in table_text
    assert "| learner, tokens per second |  | 10 |  |" in table_text
    assert "| learner, share of sgemm |  | 50 % | 50 % |" in table_text


def test_every_figure_of_a_machine_has_a_row(run_all):
    machines = json.loads((BENCHMARKS / "machines.json").read_text())
    named = {label for machine in machines.values() for label in machine.get("figures", ())}
    assert named <= set(run_all.FIGURES)


def test_ratios_to_other_projects_stand_on_the_page_of_results_alone():
    pages = [
        ROOT / "README.md",
        *(page for page in DOCS.rglob("*.md") if page.name not in ("results.md", "gallery.md")),
    ]
    ratio = re.compile(r"\d\.\d+×|\d\.\d+ times as fast")
    for page in pages:
        assert ratio.findall(page.read_text()) == [], page


def test_every_benchmark_exists_and_is_run_or_takes_too_long_or_needs_choices(run_all):
    scripts = {path.stem for path in BENCHMARKS.glob("*.py")} - {"common", "paced", "run_all"}
    assert scripts - set(run_all.BENCHMARKS) == {
        "cuda_kernels",  # its tables are in docs/gpu.md
        "gallery",
        "precision",  # its table is in docs/agreement.md
        "tpu_delta_rule",
        "tpu_experts",
        "tpu_plans",
        "tpu_programs",
    }
    assert set(run_all.BENCHMARKS) < scripts


def test_results_become_tables(run_all):
    result = {
        "cpu": "x",
        "gap": 1.5e-6,
        "batch_1": {"rate": 31.25, "vllm": None},
        "batch_8": {"rate": 1234.5, "vllm": 2},
    }
    assert run_all.tables(result) == [
        "| gap |",
        "| --- |",
        "| 1.5e-06 |",
        "",
        "|  | rate | vllm |",
        "| --- | --- | --- |",
        "| batch 1 | 31.2 |  |",
        "| batch 8 | 1,234 | 2 |",
    ]
    assert run_all.tables({"cpu": "x", "sft": {"ratio": 2}}) == [
        "|  | ratio |",
        "| --- | --- |",
        "| sft | 2 |",
    ]
    assert (
        run_all.tables([{"adapters": 1, "rate": 2.0}, {"adapters": 4, "rate": 8.0}])[-1]
        == "| 4 | 8 |"
    )


def test_a_peer_without_an_environment_is_left_out(run_all):
    options = SimpleNamespace(vllm_python=None, trl_python="/t/python", tunix_python=None)
    assert run_all.command_of("decode", options) == []
    assert run_all.command_of("learner_peers", options) == ["--trl-python", "/t/python"]
    assert run_all.command_of("tool_server", options) == ["--seconds", "60"]
    options.trl_python = None
    assert run_all.command_of("supervised_peers", options) is None
