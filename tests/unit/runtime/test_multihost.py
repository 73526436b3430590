"""Several processes over loopback train as one does, and restore each other's checkpoints."""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jax_agent_rl.config import MultihostConfig
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.runtime.multihost import decode_groups, encode_groups, initialize
from jax_agent_rl.types import DropReason
from jax_agent_rl.utils.media import as_frames
from tests.messages import raises
from tests.ports import free_port
from tests.simulated import environment_with
from tests.tiny_vision import picture, seeing_trajectory
from tests.trajectories import call, group_of, random_groups, trajectory
from tests.warm import python


def run(
    folder: Path,
    name: str,
    *,
    processes: int,
    devices: int,
    mesh: dict,
    steps: int,
    restore: bool = False,
    lora: dict | None = None,
):
    """Runs the job on ``processes`` x ``devices`` and returns what process 0 printed, and the
    parameters.
    """
    port = free_port()
    job = {"mesh": mesh, "steps": steps, "restore": restore, "out": str(folder / f"{name}.npz")}
    job |= {"checkpoints": str(folder / "checkpoints"), "lora": lora}
    started = []
    environment = environment_with(devices)
    for number in range(processes):
        several = {
            "coordinator": f"127.0.0.1:{port}",
            "num_processes": processes,
            "process_id": number,
        }
        process_job = job | {"multihost": several if processes > 1 else {}}
        command = [*python(), "-m", "tests.unit.runtime.multihost_worker", json.dumps(process_job)]
        started.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        outputs = [process.communicate(timeout=280) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [p.returncode for p in started] == [0] * processes, "\n".join(
        err[-3000:] for _, err in outputs
    )
    with np.load(folder / f"{name}.npz") as arrays:
        return json.loads(outputs[0][0].splitlines()[-1]), [arrays[key] for key in arrays.files]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """Two steps on two processes with two devices each, and the folder of their checkpoints."""
    folder = tmp_path_factory.mktemp("two")
    return folder, *run(
        folder, "two", processes=2, devices=2, mesh={"data": 2, "expert": 2}, steps=2
    )


def test_two_processes_train_as_one_does(two_processes, tmp_path: Path):
    _, metrics, params = two_processes
    alone, expected = run(tmp_path, "one", processes=1, devices=1, mesh={}, steps=2)
    assert metrics == pytest.approx(alone, rel=1e-4)
    for a, b in zip(params, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_adapters_train_on_two_processes_as_on_one(tmp_path: Path):
    lora = {"rank": 2, "targets": ["q_proj", "v_proj"]}
    (tmp_path / "one").mkdir()
    by_one, expected = run(
        tmp_path / "one", "one", processes=1, devices=1, mesh={}, steps=2, lora=lora
    )
    two, params = run(tmp_path, "two", processes=2, devices=1, mesh={"fsdp": 2}, steps=2, lora=lora)
    assert two == pytest.approx(by_one, rel=1e-4)
    for a, b in zip(params, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    # Of the weights that both wrote to a folder, a process reads what its own device holds.
    assert float((tmp_path / "one" / "one.share").read_text()) == 1
    assert 0.5 < float((tmp_path / "two.share").read_text()) < 0.52, "norms are on every device"


def test_one_and_four_processes_go_on_from_what_two_saved(two_processes, tmp_path: Path):
    results = []
    for processes, mesh in ((1, {}), (4, {"fsdp": 2, "context": 2})):
        folder = tmp_path / str(processes)
        shutil.copytree(two_processes[0], folder)
        results.append(
            run(folder, "more", processes=processes, devices=1, mesh=mesh, steps=3, restore=True)
        )
    (by_one, expected), (four, params) = results
    assert by_one["begin"] == four["begin"] == 2
    assert four == pytest.approx(by_one, rel=1e-4)
    for a, b, saved in zip(params, expected, two_processes[2], strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
        assert a.shape == saved.shape
    assert any(
        np.abs(a - saved).max() > 1e-4 for a, saved in zip(params, two_processes[2], strict=True)
    )


def test_what_the_learner_reads_of_groups_survives_the_way_to_the_last_bit():
    failed_call = call(error="timeout", reward=0.1)
    segment = trajectory([5, 6], [7, 2], index=0)
    complete = trajectory(
        [3, 4], [8, 9, 2], mask=[1, 0, 1], logprobs=[-1 / 3, 0.0, float("nan")], reward=0.1 + 0.2
    )
    first = replace(
        complete,
        segments=(segment,),
        turns=(
            replace(complete.turns[0], tool_calls=(failed_call,), learn_appended=True),
            *complete.turns[1:],
        ),
        reward_parts={"format": 1e-17},
        no_loss=DropReason.OVERLONG,
        teacher_prompt_ids=(3, 9, 4),
    )
    group = group_of(
        [first, trajectory([3], [2], index=1)],
        dropped={DropReason.REWARD_ERROR: 2},
        greedy_reward=0.7,
    )
    (got,) = decode_groups(json.loads(json.dumps(encode_groups([group]))))
    assert repr(got).replace("arguments=None", "arguments={}") == repr(
        group
    )  # repr: a NaN is not equal to itself
    assert decode_groups(json.loads(json.dumps(encode_groups(random_groups(0))))) == random_groups(
        0
    )


def test_texts_stay_where_they_are():
    long_call = replace(
        call(), observation="long", media={"image": (object(),)}, arguments={"a": object()}
    )
    text = replace(
        trajectory([3], [4, 2], calls=[[long_call]]),
        row={"answer": object()},
        messages=({"role": "user"},),
        feedback="long",
    )
    ((got,),) = (
        group.trajectories
        for group in decode_groups(json.loads(json.dumps(encode_groups([group_of([text])]))))
    )
    assert got.response_ids == (4, 2)
    assert not got.messages
    assert not got.feedback
    assert not got.row
    assert not got.tool_calls[0].observation


def test_pictures_that_ids_show_travel_pixel_by_pixel():
    image = picture(1)
    clip = [picture(seed) for seed in (2, 3)]
    sent = seeing_trajectory(
        [5], ([7], {"image": [image]}), ([8], {"video": [clip]}), prompt_media={"image": (image,)}
    )
    ((got,),) = (
        group.trajectories
        for group in decode_groups(json.loads(json.dumps(encode_groups([group_of([sent])]))))
    )
    assert got.multi_modal.keys() == {"image", "video"}
    assert got.response_ids == sent.response_ids
    for decoded in got.multi_modal["image"]:
        np.testing.assert_array_equal(np.asarray(decoded), np.asarray(image))
    np.testing.assert_array_equal(as_frames(got.multi_modal["video"][0]), as_frames(clip))


def test_what_cannot_join_says_what_to_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    with raises(ConfigError, value=("process None of 2", "'localhost:1'"), fix="process_id"):
        initialize(MultihostConfig(coordinator="localhost:1", num_processes=2))
    with raises(ConfigError, key="num_processes", value=2, fix="HOST:PORT"):
        initialize(MultihostConfig(num_processes=2, process_id=1))
    with raises(ValueError, key=("process_id=2", "num_processes=2"), fix="0 to 1"):
        MultihostConfig(coordinator="localhost:1", num_processes=2, process_id=2)


def test_without_a_coordinator_a_process_is_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    assert initialize(MultihostConfig()) == 0


def test_a_process_waits_for_the_others_as_long_as_configured(monkeypatch: pytest.MonkeyPatch):
    options = {}

    def joined(**keys):
        options.update(keys)

    monkeypatch.setattr(jax.distributed, "initialize", joined)
    initialize(MultihostConfig(coordinator="localhost:1", num_processes=2, process_id=1, timeout=7))
    assert (options["initialization_timeout"], options["process_id"], options["num_processes"]) == (
        7,
        1,
        2,
    )
