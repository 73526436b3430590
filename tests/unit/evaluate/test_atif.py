"""ATIF: what is written is valid, exact and read back as it was; documents of others are shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import atif
import pytest
from typer.testing import CliRunner

from jax_agent_rl.cli import app
from jax_agent_rl.errors import ConfigError, DataError
from jax_agent_rl.evaluate.atif import Words, as_document, as_record, read_atif, write_atif
from jax_agent_rl.observe.report.command import RunData
from jax_agent_rl.observe.run_dir import json_line, trajectory_record
from jax_agent_rl.types import Trajectory
from tests.messages import raises
from tests.trajectories import call, session, trajectory


class Source(list):
    """Records in memory, as a source."""

    notes = ()

    def read(self, numbers):
        return (self[number] for number in numbers)


def record(original: Trajectory, **values: Any) -> dict[str, Any]:
    return json.loads(json_line(trajectory_record(original, step=3, split="heldout", **values)))


def conversation(*, window: int | None = None) -> Trajectory:
    original = trajectory(
        [1, 2, 3],
        [10, 11, 30, 12, 31, 13],
        mask=[1, 1, 0, 1, 0, 1],
        logprobs=[-0.5, -0.25, 0.0, -1.5, 0.0, -2.0],
        reward=0.5,
        calls=[[call(error="timeout")]],
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hallo"},
            {"role": "assistant", "content": "one"},
            {"role": "tool", "content": "seen"},
            {"role": "assistant", "content": "two"},
            {"role": "user", "content": "more"},
            {"role": "assistant", "content": "three"},
        ],
    )
    return replace(original, history_window=window, row={"data_source": "sums"})


def decode(ids):
    return "".join(f"[{token_id}]" for token_id in ids)


def test_a_turn_is_a_step_with_its_ids_and_log_probs():
    document = as_document(record(conversation()), decode=decode, model_name="models/tiny")
    assert atif.Trajectory.model_validate(document.to_json_dict()) == document
    assert [step.source for step in document.steps] == [
        "system", "user", "agent", "agent", "user", "agent",
    ]  # fmt: skip
    first, second, last = (step for step in document.steps if step.source == "agent")
    assert (first.message, second.message, last.message) == ("one", "two", "three")
    assert first.metrics.prompt_token_ids == [1, 2, 3]
    assert first.metrics.completion_token_ids == [10, 11]
    assert first.metrics.logprobs == [-0.5, -0.25]
    assert first.observation.results[0].source_call_id == first.tool_calls[0].tool_call_id
    assert second.metrics.prompt_token_ids == [1, 2, 3, 10, 11, 30]
    assert last.metrics.prompt_token_ids == [1, 2, 3, 10, 11, 30, 12, 31]
    assert document.final_metrics.extra == {"reward": 0.5}


def test_a_turn_of_a_window_has_the_context_it_was_sampled_in():
    document = as_document(record(conversation(window=1)), decode=decode, model_name=None)
    last = document.steps[-1]
    assert last.metrics.prompt_token_ids == [1, 2, 3, 12, 31]


@pytest.mark.parametrize(
    "original",
    [
        conversation(),
        conversation(window=1),
        session(),
        trajectory([1], [5, 6, 7, 8], mask=[1, 1, 0, 0]),
    ],
    ids=["turns", "window", "segments", "inserted last"],
)
def test_what_is_written_is_read_back_exactly(original: Trajectory, tmp_path: Path):
    written = record(original)
    assert write_atif(RunData(name="r", trajectories=Source([written])), tmp_path) == 1
    data = read_atif(tmp_path)
    assert list(data.trajectories) == [written]
    assert list(data.trajectories.read([0])) == [written]
    assert data.trajectories.notes == []


def test_values_of_tokens_stay_along_the_response():
    values = {"advantages": [1.0, 2.0, 3.0, 4.0]}
    written = record(conversation(), token_values=values)
    document = as_document(written, decode=decode, model_name=None)
    assert as_record(document, words=Words(), name="x") == written


def test_a_document_that_was_changed_is_refused():
    document = as_document(record(conversation()), decode=decode, model_name=None)
    document.steps[2].metrics.completion_token_ids.append(9)
    with raises(DataError, value="does not fit"):
        as_record(document, words=Words(), name="x")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("appended", 10**12),
        ("appended", -1),
        ("policy_versions", 5),
        ("policy_versions", {"a": 1}),
    ],
)
def test_what_was_added_to_a_step_is_checked(name: str, value: Any):
    document = as_document(record(conversation()), decode=decode, model_name=None)
    document.steps[2].extra["jax_agent_rl"][name] = value
    with raises(DataError, value="does not fit"):
        as_record(document, words=Words(), name="x")


def test_calls_that_a_client_sent_nested_too_deep_are_written_as_text():
    call = {"id": "1", "function": {"name": "f", "arguments": "[" * 100_000}}
    turns = conversation()
    answer = {"role": "assistant", "content": "one", "tool_calls": [call]}
    messages = [message | answer if message["content"] == "one" else message
                for message in turns.messages]  # fmt: skip
    written = record(replace(turns, messages=tuple(messages)))
    written["turns"][0]["tool_calls"] = []
    document = as_document(written, decode=decode, model_name=None)
    assert document.steps[2].tool_calls[0].arguments["text"].startswith("[[[")


def test_a_result_whose_call_id_is_no_text_belongs_to_no_call():
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    before = [
        {"role": "assistant", "content": "earlier", "tool_calls": [call]},
        {"role": "tool", "content": "seen", "tool_call_id": ["1"]},
    ]
    turns = conversation()
    written = record(replace(turns, messages=(*before, *turns.messages)))
    document = as_document(written, decode=decode, model_name=None)
    (result,) = document.steps[0].observation.results
    assert (result.content, result.source_call_id) == ("seen", None)


# --- documents of others --------------------------------------------------------------------------


def foreign(*steps: dict[str, Any], **fields: Any) -> dict[str, Any]:
    numbered = [{"step_id": number, **step} for number, step in enumerate(steps, 1)]
    return {
        "schema_version": "ATIF-v1.8",
        "session_id": "s",
        "agent": {"name": "terminus-2", "version": "2"},
        "steps": numbered,
        **fields,
    }


def sampled(prompt: list[int], ids: list[int], **fields: Any) -> dict[str, Any]:
    metrics = {
        "prompt_token_ids": prompt,
        "completion_token_ids": ids,
        "logprobs": [-0.5] * len(ids),
    }
    return {"source": "agent", "message": "x", "metrics": metrics, **fields}


def test_steps_that_go_on_are_one_sequence_and_others_are_segments(tmp_path: Path):
    steps = [
        {"source": "user", "message": "go"},
        sampled([1, 2], [3, 4]),
        sampled([1, 2, 3, 4, 5], [6]),
        sampled([1, 9], [7]),
    ]
    document = foreign(*steps, final_metrics={"extra": {"reward": 0.75}})
    (tmp_path / "trajectory.json").write_text(json.dumps(document))
    (read,) = read_atif(tmp_path / "trajectory.json").trajectories
    (segment,) = read["segments"]
    assert segment["prompt_ids"] == (1, 2)
    assert segment["response_ids"] == (3, 4, 5, 6)
    assert segment["response_mask"] == (1, 1, 0, 1)
    assert (read["prompt_ids"], read["response_ids"]) == ((1, 9), (7,))
    assert (read["reward"], read["agent_name"]) == (0.75, "terminus-2")


def without_ids() -> dict[str, Any]:
    calls = [{"tool_call_id": "a", "function_name": "bash", "arguments": {"command": "ls"}}]
    results = [{"source_call_id": "a", "content": "file.txt"}]
    return foreign(
        {"source": "user", "message": "list it"},
        {
            "source": "agent",
            "message": "I look",
            "tool_calls": calls,
            "observation": {"results": results},
        },
        {"source": "agent", "message": "one file"},
    )


def test_a_document_without_ids_is_shown_by_its_words(tmp_path: Path):
    folder = tmp_path / "job" / "trial" / "agent"
    folder.mkdir(parents=True)
    (folder / "trajectory.json").write_text(json.dumps(without_ids()))
    result = CliRunner().invoke(app, ["view", str(tmp_path / "job"), "--whole-prompt"])
    assert result.exit_code == 0, result.output
    shown = result.output.replace("│", "")
    for text in ("list it", "«I look", "file.txt", "«one file»"):
        assert text in shown
    report = CliRunner().invoke(app, ["report", str(tmp_path / "job")])
    assert report.exit_code == 0, report.output
    assert "file.txt" in (tmp_path / "job" / "report.html").read_text()


def test_a_file_that_is_no_document_is_a_note(tmp_path: Path):
    (tmp_path / "a.json").write_text(json.dumps(without_ids()))
    (tmp_path / "b.json").write_text('{"schema_version": "ATIF-v1.8", "steps": 3}')
    (tmp_path / "c.json").write_text("{}")
    records = read_atif(tmp_path).trajectories
    assert len(list(records)) == 1
    (note,) = records.notes
    assert "b.json" in note and "steps" in note


def test_a_folder_without_documents_is_told_apart(tmp_path: Path):
    with raises(DataError, value="not an ATIF document"):
        read_atif(tmp_path)
    with raises(DataError, value="not an ATIF document"):
        read_atif(tmp_path / "missing.json")


def test_without_the_package_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setitem(__import__("sys").modules, "atif", None)
    with raises(ConfigError, fix="atif"):
        write_atif(RunData(name="r", trajectories=Source([record(conversation())])), tmp_path)


def test_a_table_is_exported_by_the_command(tmp_path: Path):
    source = tmp_path / "in"
    write_atif(RunData(name="r", trajectories=Source([record(session())])), source)
    result = CliRunner().invoke(app, ["export-atif", str(source), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "1 document" in result.output
    assert list(read_atif(tmp_path / "out").trajectories) == list(read_atif(source).trajectories)


@pytest.mark.parametrize("reward", [10**400, 1e300])
def test_a_reward_that_cannot_be_skips_a_document_alone(reward: float, tmp_path: Path):
    good = foreign(sampled([1], [2]))
    bad = foreign(sampled([1], [2]), final_metrics={"extra": {"reward": reward}})
    (tmp_path / "a.json").write_text(json.dumps(bad))
    (tmp_path / "b.json").write_text(json.dumps(good))
    data = read_atif(tmp_path)
    assert len(list(data.trajectories)) == 1
    (note,) = data.trajectories.notes
    assert "reward" in note


def test_ids_above_every_vocabulary_are_shown_as_numbers(tmp_path: Path):
    (tmp_path / "a.json").write_text(json.dumps(foreign(sampled([1], [2**30, 2**40]))))
    data = read_atif(tmp_path)
    (shown,) = data.trajectories
    assert data.open_decoder([])(shown["response_ids"]) == f"[{2**30}][{2**40}]"
