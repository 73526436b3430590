"""A trainer's observers: warnings reach the summary, also those of before a restart; sinks are
closed and counted.
"""

import re
import sys
from pathlib import Path

import pytest

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.observe.sinks import metrics
from jax_agent_rl.observe.sinks.metrics import check_sinks
from jax_agent_rl.trainer.base import Trainer
from jax_agent_rl.trainer.observing import format_warnings, observers
from jax_agent_rl.utils.packages import install_command
from tests.fake_training import make_trainer


class Failing:
    """A sink that fails on the second record."""

    def __init__(self):
        self.steps: list[int] = []
        self.closed = False

    def open(self, run):
        assert run.project == "mine"
        assert run.config["model"]["path"] == "none"
        return {}

    def write(self, item):
        self.steps.append(item.step)
        if len(self.steps) == 2:
            raise OSError("full")

    def close(self):
        self.closed = True


def training(tmp_path: Path, steps: int, **options) -> Trainer:
    """Every group's rewards are equal."""

    async def same(trajectory):
        return trajectory

    return make_trainer(tmp_path, steps=steps, score=same, **options)


async def observed(trainer: Trainer) -> dict:
    runtime = trainer.runtime
    with observers(
        runtime.config,
        trainer.folder,
        step=trainer.record.step,
        rows=runtime.training_rows,
        progress=trainer.progress,
    ) as watchers:
        trainer.reporter.observers = watchers.each
        await trainer.run()
    return watchers.summary()


async def test_a_warning_of_the_run_is_in_its_summary_with_what_to_do(tmp_path: Path):
    trainer = training(tmp_path, 5)
    printed = []
    trainer.progress.warn = printed.append
    summary = await observed(trainer)
    (warned,) = [w for w in summary["warnings"] if w["name"] == "zero_variance"]
    assert (warned["first_step"], warned["last_step"], warned["active"]) == (3, 5, True)
    assert "algorithm.max_resample_rounds=3" in warned["advice"]
    assert "zero_variance" not in printed[2]
    assert "zero_variance" in printed[-1]
    text = format_warnings(summary["warnings"])
    assert "zero_variance (step 3 to the end, 3 steps): 100% of the groups" in text
    assert format_warnings([]) == ""


async def test_a_resumed_run_does_not_repeat_its_warnings(tmp_path: Path):
    await observed(training(tmp_path, 4))
    trainer = training(tmp_path, 4)
    lines: list[str] = []
    trainer.progress.print_line = lines.append
    with observers(
        trainer.runtime.config, trainer.folder, step=4, rows=[], progress=trainer.progress
    ) as watchers:
        warned = [w["name"] for w in watchers.summary()["warnings"]]
        assert warned[0] == "no_reward" and {"zero_variance", "repeated_failures"} <= set(warned)
        assert lines == []


async def test_rows_without_an_agent_are_in_the_summary_from_the_start(tmp_path: Path):
    trainer = training(tmp_path, 1)
    config = trainer.runtime.config.model_copy(
        update={
            "tools": trainer.runtime.config.tools.model_copy(
                update={"function_tool_path": "tools.py"}
            )
        }
    )
    with observers(
        config, trainer.folder, step=0, rows=[{}], progress=trainer.progress
    ) as watchers:
        (warned,) = watchers.summary()["warnings"]
    assert warned["name"] == "agent_name_missing"
    assert "(from the start)" in format_warnings([warned])


async def test_a_sink_that_fails_is_counted_and_the_run_ends_well(tmp_path: Path, monkeypatch):
    sink = Failing()
    monkeypatch.setitem(metrics.SINKS, "trackio", lambda: sink)
    options = {"logger": ["trackio"], "project_name": "mine"}
    summary = await observed(training(tmp_path, 3, trainer=options))
    assert summary["lost_by_logger"] == {"trackio": 1}
    assert sink.steps == [0, 1, 2, 3, 3] and sink.closed  # evaluations before and after


def test_what_is_missing_is_said_before_anything_starts(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match=re.escape(install_command("tensorboard"))):
        check_sinks(
            training(tmp_path, 1, trainer={"logger": ["tensorboard"]}).runtime.config.trainer.logger
        )
