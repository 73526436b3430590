"""Sinks get what the run folder gets, go on with their run when it resumes, and never harm it."""

import contextvars
import json
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from jax_agent_rl.config import build
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.observe.sinks import metrics
from jax_agent_rl.observe.sinks.metrics import RunFacts, check_sinks, open_sinks, scalars
from jax_agent_rl.observe.sinks.threads import SinkThread
from jax_agent_rl.utils.packages import install_command
from tests.messages import raises

STEP = {
    "kind": "step",
    "step": 3,
    "reward_mean": 0.5,
    "tool_errors_by_kind": {"timeout": 2},
    "staleness_histogram": {"0": 9},
    "note": "text",
    "missing": None,
}
EVALUATION = {"kind": "evaluation", "step": 3, "accuracy": 0.25, "lost": {}}


class Kept:
    """A sink that keeps what it gets; it fails on values of ``bad``, or when it is opened."""

    def __init__(self, *, broken: bool = False):
        self.broken = broken
        self.facts: RunFacts | None = None
        self.got: list[tuple[int, dict]] = []
        self.closed = 0

    def open(self, run: RunFacts) -> dict[str, str]:
        self.facts = run
        if self.broken:
            raise OSError("no [route] to host")
        return run.identity or {"id": "first"}

    def write(self, item) -> None:
        if "bad" in item.values:
            raise ValueError("odd value")
        self.got.append((item.step, dict(item.values)))

    def close(self) -> None:
        self.closed += 1


def facts(run_dir: Path, step: int = 0) -> RunFacts:
    return RunFacts(
        run_dir=run_dir, project="mine", config={"seed": 7, "model": {"path": "m"}}, step=step
    )


@pytest.fixture
def fake_sink(monkeypatch) -> Kept:
    """Stands in for the library behind the name ``wandb``."""
    sink = Kept()
    monkeypatch.setitem(metrics.SINKS, "wandb", lambda: sink)
    return sink


def feed(run_dir: Path, *records: dict, step: int = 0) -> tuple[dict[str, int], list[str]]:
    """What is lost and what is said."""
    said: list[str] = []
    with open_sinks(["wandb"], facts(run_dir, step), print_line=said.append) as sinks:
        for record in records:
            sinks(record)
    return sinks.lost(), said


# --- what they get --------------------------------------------------------------------------------


def test_names_are_those_of_the_run_folder_and_nested_counts_have_a_slash():
    assert scalars(STEP) == {
        "reward_mean": 0.5,
        "tool_errors_by_kind/timeout": 2.0,
        "staleness_histogram/0": 9.0,
    }
    assert scalars(EVALUATION) == {"evaluation/accuracy": 0.25}


def test_a_sink_gets_every_record_in_order_and_is_closed(fake_sink: Kept, tmp_path: Path):
    lost, said = feed(tmp_path, EVALUATION, STEP)
    assert fake_sink.got == [(3, scalars(EVALUATION)), (3, scalars(STEP))]
    assert fake_sink.closed == 1
    assert lost == {} and said == []


def test_a_run_that_resumes_tells_the_sink_which_run_it_was(fake_sink: Kept, tmp_path: Path):
    feed(tmp_path, STEP)
    assert json.loads((tmp_path / "loggers.json").read_text()) == {"wandb": {"id": "first"}}
    feed(tmp_path, step=3)
    assert fake_sink.facts
    assert fake_sink.facts.identity == {"id": "first"}
    assert fake_sink.facts.step == 3


def test_sinks_that_open_together_record_their_runs_in_turn(tmp_path: Path, monkeypatch):
    together = threading.Barrier(2)
    write = metrics.write_atomically

    def write_slowly(file: Path, text: str) -> None:
        with suppress(threading.BrokenBarrierError):
            together.wait(0.2)
            raise AssertionError("two threads write the file at the same time")
        write(file, text)

    monkeypatch.setattr(metrics, "write_atomically", write_slowly)
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(metrics.SINKS, name, Kept)
    lines: list[str] = []
    with open_sinks(["wandb", "trackio"], facts(tmp_path), print_line=lines.append):
        pass
    assert lines == []
    assert json.loads((tmp_path / "loggers.json").read_text()) == {
        n: {"id": "first"} for n in ("wandb", "trackio")
    }


# --- failures -------------------------------------------------------------------------------------


def test_a_sink_that_fails_is_said_once_counted_and_goes_on(fake_sink: Kept, tmp_path: Path):
    bad = {"kind": "step", "step": 4, "bad": 1.0}
    lost, said = feed(tmp_path, bad, bad, STEP)
    assert lost == {"wandb": 2}
    assert [step for step, _ in fake_sink.got] == [3]
    assert fake_sink.closed == 1
    (line,) = said
    assert "wandb failed (ValueError: odd value); the run continues" in line


def test_a_sink_that_cannot_begin_loses_its_records_and_nothing_else(
    fake_sink: Kept, tmp_path: Path
):
    fake_sink.broken = True
    lost, said = feed(tmp_path, STEP, STEP)
    assert lost == {"wandb": 2} and fake_sink.got == []
    assert len(said) == 1
    assert "cannot start (OSError: no [route] to host)" in said[0]
    assert not (tmp_path / "loggers.json").exists()


def test_a_sink_that_hangs_is_left_behind_and_that_is_said():
    release = threading.Event()
    said = []
    sink = Kept()
    sink.write = lambda item: release.wait()
    thread = SinkThread("wandb", sink, print_line=said.append)
    thread.put({})
    thread.end()
    thread.join(0.05)
    release.set()
    assert len(said) == 1
    assert "wandb did not finish in time" in said[0]
    assert thread.num_lost >= 1


def test_a_sink_runs_in_a_context_of_its_own_unless_it_is_given_one():
    """A tracker finishes the run that it finds in its caller's context: a trace sink's, say."""
    variable = contextvars.ContextVar("run")
    values = []
    variable.set("the caller's")
    for context in (None, contextvars.copy_context()):
        thread = SinkThread(
            "a",
            Kept(),
            print_line=print,
            start=lambda: values.append(variable.get(None)),
            context=context,
        )
        thread.end()
        thread.join(10)
    assert values == [None, "the caller's"]


def test_a_missing_package_is_named_with_its_extra_before_anything_starts(monkeypatch):
    for name in ("tensorboardX", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it is an ImportError
    with raises(ConfigError, fix=install_command("tensorboard", "trackio")):
        check_sinks(["tensorboard", "trackio"])


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("trainer.logger=[console, wandb]", {"value": "leave 'console' out"}),
        ("trainer.logger=[wandb, wandb]", {"value": "twice"}),
        ("trainer.logger=swanlab", {"fix": ("'tensorboard'", "'wandb'", "'trackio'")}),
        ("trainer.project_name=mine", {"fix": "trainer.logger=wandb or trackio"}),
    ],
)
def test_a_wrong_logger_is_refused_with_the_fix(override: str, named: dict):
    with raises(ConfigError, **named):
        build({"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}}, [override])


def test_one_logger_needs_no_list():
    config = build(
        {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}}, ["trainer.logger=wandb"]
    )
    assert config.trainer.logger == ("wandb",)
