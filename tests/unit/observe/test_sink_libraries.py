"""The real TensorBoard, W&B (offline) and Trackio (local), read back by their own readers or
format.

Each run is interrupted after step 3 and resumed from step 2, so that step 3 is logged twice.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.observe.sinks.metrics import RunFacts, check_sinks, open_sinks
from tests.messages import raises

CONFIG = {"seed": 7, "model": {"path": "m"}}


def step(number: int, reward: float) -> dict:
    return {
        "kind": "step",
        "step": number,
        "reward_mean": reward,
        "tool_errors_by_kind": {"timeout": 2},
    }


def run_and_resume(name: str, run_dir: Path) -> None:
    """Rewards 0.1, 0.2, 0.9 and an evaluation; then 0.3, 0.4 from step 2 on."""
    run_dir.mkdir(exist_ok=True)
    said: list[str] = []
    for begin, records in (
        (
            0,
            [
                step(1, 0.1),
                step(2, 0.2),
                {"kind": "evaluation", "step": 2, "accuracy": 0.5},
                step(3, 0.9),
            ],
        ),
        (2, [step(3, 0.3), step(4, 0.4)]),
    ):
        facts = RunFacts(run_dir=run_dir, project="mine", config=CONFIG, step=begin)
        with open_sinks([name], facts, print_line=said.append) as sinks:
            for record in records:
                sinks(record)
        assert said == [] and sinks.lost() == {}


def test_tensorboard_shows_one_run_without_the_steps_that_were_undone(tmp_path: Path):
    pytest.importorskip("tensorboardX")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run_and_resume("tensorboard", tmp_path)
    run = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    run.Reload()
    rewards = [(event.step, round(event.value, 6)) for event in run.Scalars("reward_mean")]
    assert rewards == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert [(event.step, event.value) for event in run.Scalars("evaluation/accuracy")] == [(2, 0.5)]
    assert [event.value for event in run.Scalars("tool_errors_by_kind/timeout")] == [2.0] * 4
    (text,) = run.Tensors("config/text_summary")
    assert b"path: m" in text.tensor_proto.string_val[0]


def test_wandb_offline_keeps_one_run_with_the_training_step_as_its_axis(
    tmp_path: Path, monkeypatch
):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_sinks(["wandb"])
    run_and_resume("wandb", tmp_path)
    wandb.teardown()  # its process writes on for a moment after a run is finished
    first, second = sorted(
        (tmp_path / "wandb").glob("offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime_ns
    )
    assert first.name == second.name  # of the run's id: `wandb sync` makes one run of both
    first_records = list(wandb_records(first))
    second_records = list(wandb_records(second))
    (run,) = [record.run for record in first_records if record.HasField("run")]
    assert run.project == "mine" and run.display_name == tmp_path.name
    assert {"seed", "model"} <= {update.key for update in run.config.update}
    assert [
        r.metric.step_metric
        for r in first_records
        if r.HasField("metric") and r.metric.glob_name == "*"
    ] == ["step"]
    assert wandb_rewards(first_records) == [("1", "0.1"), ("2", "0.2"), ("3", "0.9")]
    assert wandb_rewards(second_records) == [("3", "0.3"), ("4", "0.4")]


def test_trackio_keeps_one_run(tmp_path: Path, monkeypatch):
    trackio = pytest.importorskip("trackio")
    from trackio import sqlite_storage, utils

    for module in (
        trackio,
        sqlite_storage,
        utils,
    ):  # read from the environment when they are imported
        if hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    run_and_resume("trackio", tmp_path / "my-run")
    (run,) = sqlite_storage.SQLiteStorage.get_runs("mine")
    assert run.startswith("my-run-")
    logs = sqlite_storage.SQLiteStorage.get_logs("mine", run)
    rewards = [(log["step"], log["reward_mean"]) for log in logs if "reward_mean" in log]
    assert rewards == [(1, 0.1), (2, 0.2), (3, 0.9), (3, 0.3), (4, 0.4)]


def test_wandb_online_without_a_key_is_refused_before_anything_starts(tmp_path: Path, monkeypatch):
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with raises(ConfigError, key="API key", fix=("wandb login", "WANDB_API_KEY", "WANDB_MODE")):
        check_sinks(["wandb"])


def wandb_rewards(records: list) -> list[tuple[str, str]]:
    rows = [
        {"/".join(i.nested_key) or i.key: i.value_json for i in r.history.item} for r in records
    ]
    return [(row["step"], row["reward_mean"]) for row in rows if "reward_mean" in row]


def wandb_records(file: Path) -> Iterator:
    """The messages of a ``.wandb`` file: a LevelDB log (blocks of 32 KiB, fragments with a 7-byte
    head).
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data = file.read_bytes()
    position = 7
    record = b""
    assert data.startswith(b":W&B")
    while position + 7 <= len(data):
        block_bytes = 32768 - position % 32768
        if block_bytes < 7:
            position += block_bytes
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # the whole, or its last fragment
            yield Record.FromString(record)
            record = b""
