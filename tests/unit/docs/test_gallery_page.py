"""docs/gallery.md shows what benchmarks/gallery.json holds; the commands of benchmarks/gallery.yaml
are valid.
"""

import json
import shlex

import pytest
import yaml

from jax_agent_rl.config.run import load
from tests.unit.docs.pages import BENCHMARKS, DOCS, ROOT, import_benchmark

PLACES = ("trl_python", "tunix_python", "vllm_python", "minilm")
TREE = yaml.safe_load((BENCHMARKS / "gallery.yaml").read_text())


@pytest.fixture
def gallery(monkeypatch: pytest.MonkeyPatch):
    return import_benchmark(monkeypatch, "gallery")


def test_page_pictures_and_results_agree(gallery):
    results = json.loads((BENCHMARKS / "gallery.json").read_text())
    assert (DOCS / "gallery.md").read_text() == gallery.page(
        TREE["figures"], TREE["curves"], results
    )
    complete_figures = {
        name
        for name, figure in TREE["figures"].items()
        if all(label in results for label in figure["curves"])
    }
    assert {file.stem for file in (DOCS / "images" / "gallery").glob("*.svg")} == complete_figures


def test_every_curve_is_shown_and_every_shown_curve_has_commands():
    assert {label for figure in TREE["figures"].values() for label in figure["curves"]} == set(
        TREE["curves"]
    )


@pytest.mark.parametrize(
    "command", [c for curve in TREE["curves"].values() for c in curve["commands"]]
)
def test_a_command_names_existing_files_and_keys(command: str):
    program, *words = shlex.split(
        command.format(out="runs", seed=0, **dict.fromkeys(PLACES, "/python"))
    )
    if program == "env":
        program, *words = words[1:]
    if program.endswith(".sh"):
        assert (ROOT / program).is_file()
        load((ROOT / program).with_name("config.yaml"), words)
    elif program in ("train", "distill"):
        load(ROOT / words[0], words[1:])
    elif program == "/python":
        assert (ROOT / words[0]).is_file() or words[:2] == ["-m", "jax_agent_rl.cli"]
    else:
        assert program == "sft"
        assert (ROOT / words[0]).is_file()


def test_a_curve_is_its_last_command_and_costs_what_all_of_them_cost(
    gallery, tmp_path, monkeypatch
):
    """Two seeds of a curve of two commands, from run folders that hold what runs write."""
    commands_run = []

    def run(command: str):
        commands_run.append(command)
        folder = tmp_path / f"run-{len(commands_run)}"
        folder.mkdir()
        step = {"kind": "step", "step": 1, "step_seconds": 2.5, "sampled_tokens_mean": 10.0}
        lines = [
            {"kind": "evaluation", "step": 0, "accuracy": 0.25},
            step | {"finish_reasons": {"answer": 3, "response_length": 1}},
            {"kind": "evaluation", "step": 1, "accuracy": 0.75},
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        summary = {
            "dropped": {"zero_variance": 1},
            "started": 4,
            "max_logprob_gap": 1e-5,
            "warnings": [{"name": "w"}],
        }
        (folder / "summary.json").write_text(json.dumps(summary))
        return folder

    monkeypatch.setattr(gallery, "run", run)
    commands = ["sft a.yaml run_dir={out}/sft-{seed}", "train b.yaml model.path={out}/sft-{seed}"]
    curve = gallery.measure(commands, "accuracy", 2, tmp_path / "out", "both", {})
    assert commands_run == [
        f"sft a.yaml run_dir={tmp_path}/out/sft-2 seed=2",
        f"train b.yaml model.path={tmp_path}/out/sft-2 seed=2 run_dir={tmp_path}/out/both-2",
    ]
    assert (curve["steps"], curve["values"], curve["train_seconds"], curve["zero_variance"]) == (
        [0, 1],
        [0.25, 0.75],
        5.0,
        0.25,
    )
    assert curve["sampled_tokens"] == 40
    assert curve["warnings"] == ["w"]
    figures = {"f": {"title": "T", "lesson": "L.", "curves": ["both"]}}
    figures["unfinished"] = {"title": "U", "lesson": "M.", "curves": ["both", "missing"]}
    text = gallery.page(
        figures, {"both": {"commands": commands}}, {"both": {"0": curve, "1": curve}}
    )
    assert "| both | 25% | 75%, 75% | 40 | 0.1 min | 25% |" in text
    assert "missing" not in text
    assert "## U" not in text
    assert "jax-agent-rl train b.yaml model.path=runs/sft\n" in text
    assert "Warnings of these runs: both: `w`." in text
