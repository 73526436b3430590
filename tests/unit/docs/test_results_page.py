"""docs/results.md shows what benchmarks/results.json holds, and nothing else."""

import json
from types import SimpleNamespace

import pytest

from tests.unit.docs.pages import BENCHMARKS, DOCS, import_benchmark


@pytest.fixture
def run_all(monkeypatch: pytest.MonkeyPatch):
    return import_benchmark(monkeypatch, "run_all")


def test_page_and_results_agree(run_all):
    assert (DOCS / "results.md").read_text() == run_all.page(json.loads((BENCHMARKS / "results.json").read_text()))


def test_every_benchmark_exists_and_is_run_or_takes_too_long_or_needs_choices(run_all):
    scripts = {path.stem for path in BENCHMARKS.glob("*.py")} - {"common", "paced", "run_all"}
    assert scripts - set(run_all.BENCHMARKS) == {"gallery", "tpu_plans", "tpu_programs"}
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
    assert run_all.tables({"cpu": "x", "sft": {"ratio": 2}}) == ["|  | ratio |", "| --- | --- |", "| sft | 2 |"]
    assert run_all.tables([{"adapters": 1, "rate": 2.0}, {"adapters": 4, "rate": 8.0}])[-1] == "| 4 | 8 |"


def test_a_peer_without_an_environment_is_left_out(run_all):
    options = SimpleNamespace(vllm_python=None, trl_python="/t/python", tunix_python=None)
    assert run_all.command_of("decode", options) == []
    assert run_all.command_of("learner_peers", options) == ["--trl-python", "/t/python"]
    assert run_all.command_of("tool_server", options) == ["--seconds", "60"]
    options.trl_python = None
    assert run_all.command_of("supervised_peers", options) is None
