"""What Google Cloud does to a launch on TPUs: it refuses, is slow, takes back. It is made up;
processes are real.
"""

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cloud import Cloud
from tests.launching import ended_after, read_until
from tests.messages import assert_message

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
KEPT = ["--bucket", "gs://b", "--config", str(CONFIG)]


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    cloud = Cloud(tmp_path)
    yield cloud
    cloud.close()


def refused(cloud: Cloud, *arguments: object) -> str:
    """What a launch says that cannot begin."""
    result = cloud.launch(*arguments)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "Traceback" not in result.stderr and cloud.runs() == []
    return result.stderr


def said_by(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    remaining = process.stdout.read()
    process.wait()
    return remaining


def test_a_run_from_nothing_to_a_deleted_slice(cloud: Cloud):
    result = cloud.launch(*KEPT, "--topology", "v5p:2x2x2", "trainer.steps=3")
    assert result.returncode == 0, result.stdout + result.stderr
    assert [run.split()[:3] for run in cloud.runs()] == [
        [f"try/{i}", "train", "tpu_pod.yaml"] for i in (0, 1)
    ]
    assert all(
        "trainer.steps=3" in run and "learner.multihost.coordinator=auto" in run
        for run in cloud.runs()
    )
    assert "[host-0] arguments: train" in result.stdout
    assert "[host-1] arguments: train" in result.stdout
    assert cloud.node() is None
    assert "the run is in gs://b/try" in result.stdout
    logs = sorted(
        file.name.partition("-2")[0] for file in (cloud.folder / "buckets/b/try/logs").iterdir()
    )
    assert logs == ["host-0", "host-1"]


def test_one_host_without_a_bucket_keeps_its_slice(cloud: Cloud):
    first = cloud.launch("--config", CONFIG)
    assert first.returncode == 0 and "the slice stays (without --bucket" in first.stdout, (
        first.stdout + first.stderr
    )
    again = cloud.launch("--config", CONFIG)
    assert again.returncode == 0
    assert "try is there already" in again.stdout
    assert len(cloud.calls("tpu-vm create")) == 1
    assert len(cloud.runs()) == 2
    assert cloud.launch("--delete").returncode == 0
    assert cloud.node() is None
    assert "there is no try" in cloud.launch("--delete").stdout


def test_the_quickstart_brings_its_model_and_data_to_every_host(cloud: Cloud):
    cloud.write("venv/bin/jax-agent-rl", '#!/usr/bin/env bash\necho "called: $*"\n').chmod(0o755)
    result = cloud.launch("--bucket", "gs://b")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "called: fetch-model" in result.stdout
    assert "called: prepare shop" in result.stdout


def test_the_exit_status_is_the_runs_and_the_slice_is_given_back(cloud: Cloud):
    cloud.order("trainer", "ends 2")
    result = cloud.launch(*KEPT)
    assert result.returncode == 2
    assert_message(result.stdout, key="host-0", value="ended with 2")
    assert cloud.node() is None


def test_a_preempted_slice_ends_the_launch_and_resume_continues_on_a_new_one(cloud: Cloud):
    cloud.order("trainer", "waits")
    process = cloud.start(*KEPT, "--spot")
    read_until(process, "[host-0] training")
    cloud.preempt()
    output = said_by(process)
    assert process.returncode == 1, output
    assert (
        "the slice was preempted (PREEMPTED):"
        " --resume continues from the last checkpoint in gs://b/try" in output
    )
    cloud.order("trainer", "ends 0")
    result = cloud.launch(*KEPT, "--spot", "--resume")
    assert result.returncode == 0 and "try is PREEMPTED" in result.stdout, (
        result.stdout + result.stderr
    )
    first, second = sorted(cloud.runs(), key=len)
    assert "resume" not in first and second.endswith("--resume")
    assert len(cloud.calls("tpu-vm create")) == 2
    assert cloud.node() is None


def test_a_broken_connection_loses_neither_the_run_nor_a_line(cloud: Cloud):
    cloud.order("trainer", "waits")
    process = cloud.start(*KEPT)
    first_output = "".join(read_until(process, "[host-0] training"))
    cloud.order("cut-0")
    first_output += "".join(read_until(process, "the connection broke, connecting again"))
    last_output = "".join(ended_after(process, signal.SIGINT))
    assert process.returncode == 130 and "[host-0] saved a checkpoint" in last_output, last_output
    assert (first_output + last_output).count("[host-0] training") == 1
    assert len(cloud.runs()) == 1


def test_a_launcher_without_a_network_finds_its_run_again(cloud: Cloud):
    cloud.order("trainer", "waits")
    process = cloud.start(*KEPT)
    read_until(process, "[host-0] training")
    cloud.order("offline")
    for _ in range(3):
        read_until(process, "host-0: the connection broke")
    cloud.recall("offline")
    output = "".join(ended_after(process, signal.SIGINT))
    assert (
        process.returncode == 130
        and "[host-0] saved a checkpoint" in output
        and len(cloud.runs()) == 1
    ), output


def test_ctrl_c_without_a_network_reaches_the_run_once_there_is_one(cloud: Cloud):
    cloud.order("trainer", "waits")
    process = cloud.start(*KEPT)
    read_until(process, "[host-0] training")
    cloud.order("offline")
    process.send_signal(signal.SIGINT)
    read_until(process, "the run could not be interrupted")
    cloud.recall("offline")
    output = said_by(process)
    assert (
        process.returncode == 130
        and "[host-0] saved a checkpoint" in output
        and cloud.node() is None
    ), output


def test_a_run_whose_launcher_lost_it_is_found_by_another(cloud: Cloud):
    cloud.order("trainer", "waits")
    process = cloud.start(*KEPT, "--poll", "0.001")
    read_until(process, "[host-0] training")
    cloud.order("offline")
    output = said_by(process)
    assert process.returncode == 1 and "lost sight of the run" in output, output
    cloud.recall("offline")
    assert cloud.node() is not None
    again = cloud.start(*KEPT)
    read_until(again, "[host-0] training")
    output = "".join(ended_after(again, signal.SIGINT))
    assert again.returncode == 130
    assert len(cloud.runs()) == 1
    assert len(cloud.calls("tpu-vm scp")) == 1


def test_a_failed_run_is_left_while_the_fate_of_its_slice_is_unknown(cloud: Cloud):
    cloud.order("trainer", "waits")
    process = cloud.start(*KEPT, "--poll", "0.01")
    read_until(process, "[host-0] training")
    cloud.order("describe-fails")
    cloud.power_off()
    output = said_by(process)
    assert process.returncode == 1 and "an internal error has occurred" in output, output
    assert "the slice stays and costs" in output
    assert cloud.node() is not None


def test_ctrl_c_lets_the_run_save_before_its_slice_is_deleted(cloud: Cloud):
    cloud.order("trainer", "waits")
    process = cloud.start(*KEPT)
    read_until(process, "[host-0] training")
    output = "".join(ended_after(process, signal.SIGINT))
    assert process.returncode == 130, output
    assert output.index("saved a checkpoint") < output.index("deleting try")
    assert cloud.node() is None


def test_a_killed_launcher_leaves_the_run_going_and_another_finds_it(cloud: Cloud):
    cloud.order("trainer", "waits")
    process = cloud.start(*KEPT)
    read_until(process, "[host-0] training")
    process.kill()
    process.wait()
    again = cloud.start(*KEPT)
    lines = read_until(again, "[host-0] training")
    assert any("a run is under way there: following it" in line for line in lines)
    output = "".join(ended_after(again, signal.SIGINT))
    assert again.returncode == 130
    assert "saved a checkpoint" in output
    assert len(cloud.runs()) == 1
    assert len(cloud.calls("tpu-vm scp")) == 1


def test_logs_shows_the_run_from_its_beginning_and_its_exit_status(cloud: Cloud):
    cloud.order("trainer", "ends 2")
    assert cloud.launch(*KEPT, "--keep").returncode == 2
    result = cloud.launch("--logs")
    assert result.returncode == 2
    assert "[host-0] arguments: train" in result.stdout
    assert (cloud.folder / "logs" / "host-0.log").read_text().count("arguments: train") == 1
    assert cloud.node() is not None and len(cloud.runs()) == 1


def test_logs_of_a_slice_that_is_not_there_says_so(cloud: Cloud):
    assert "try is NOT_FOUND: there is nothing to show" in refused(cloud, "--logs")


def test_variables_reach_what_prepares_and_what_runs_and_are_shown_nowhere(cloud: Cloud):
    cloud.variables["FROM_HERE"] = "a 'secret' of \\\ntwo lines"
    prepare = 'printf %s "$FROM_HERE" >prepared && cat >>prepared'  # its input is empty
    options = ["--env", "FROM_HERE", "--env", "GIVEN=b=c d", "--prepare", prepare]
    result = cloud.launch(*KEPT, *options, "--keep")
    assert result.returncode == 0, result.stdout + result.stderr
    seen = cloud.environment_of("train")
    assert (seen["FROM_HERE"], seen["GIVEN"]) == (cloud.variables["FROM_HERE"], "b=c d")
    prepared = cloud.folder / "hosts" / "try/0" / "jax_agent_rl" / "prepared"
    assert prepared.read_text() == cloud.variables["FROM_HERE"]
    assert not any(
        "secret' of" in text or "b=c" in text for text in (*cloud.calls(), result.stdout)
    )
    result = cloud.launch(*KEPT, "--env", "NOWHERE")
    assert result.returncode == 1
    assert_message(result.stderr, key="--env NOWHERE", value="not set", fix="export it")
    assert cloud.launch("--delete", "--env", "NOWHERE").returncode == 0, (
        "the same command with --delete"
    )


def test_a_preparation_that_fails_with_variables_ends_the_launch(cloud: Cloud):
    result = cloud.launch("--prepare", "exit 7", "--env", "GIVEN=1")
    assert result.returncode == 1
    assert "host-0:" in result.stderr
    assert not cloud.runs()


def test_a_slice_whose_run_has_ended_is_given_back_when_the_cloud_answers(cloud: Cloud):
    cloud.order("delete-fails", "try")
    process = cloud.start(*KEPT)
    read_until(process, "trying again in")
    assert cloud.node() is not None
    cloud.recall("delete-fails")
    output = said_by(process)
    assert process.returncode == 0 and cloud.node() is None and len(cloud.runs()) == 1, output


def test_ctrl_c_ends_the_wait_for_a_cloud_that_does_not_take_a_slice_back(cloud: Cloud):
    cloud.order("delete-fails", "try")
    process = cloud.start(*KEPT, "--poll", 1000)
    read_until(process, "trying again in")
    output = "".join(ended_after(process, signal.SIGINT))
    assert (
        process.returncode == 130 and "--delete deletes it" in output and cloud.node() is not None
    ), output


def test_a_host_that_does_not_listen_yet_is_tried_again(cloud: Cloud):
    cloud.order("deaf", "2")
    result = cloud.launch(*KEPT)
    assert result.returncode == 0 and result.stdout.count("trying again in") == 2, result.stdout
    cloud.order("deaf", "100")
    result = cloud.launch(*KEPT, "--poll", "0.01")
    assert result.returncode == 1 and "host-0: gcloud compute tpus tpu-vm scp" in result.stderr, (
        result.stderr
    )


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("no-quota", "no quota for that many chips of that kind"),
        ("no-capacity", "the zone is full: choose another --zone, or let --render sky wait"),
        (
            "no-zone",
            "there is no such zone, or none for this project: gcloud compute tpus locations list",
        ),
        ("bad-kind", "the zone does not have this kind of chip"),
        ("no-login", "log in again: gcloud auth login"),
        ("no-project", "give --project, or gcloud config set project PROJECT"),
    ],
)
def test_what_google_refuses_is_said_with_the_fix(cloud: Cloud, order: str, message: str):
    cloud.order(order)
    result = cloud.launch(*KEPT)
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert cloud.node() is None and "stays" not in result.stdout


def test_a_slice_that_may_have_been_created_without_an_answer_is_named(cloud: Cloud):
    cloud.order("create-fails")
    assert "try may have been created without an answer: --delete" in refused(cloud, *KEPT)


def test_a_slice_that_another_launcher_creates_is_left_to_it(cloud: Cloud):
    assert cloud.launch(*KEPT, "--keep").returncode == 0
    cloud.set_state("CREATING")
    result = cloud.launch(*KEPT)
    assert result.returncode == 1
    assert_message(result.stderr, key="try", value="CREATING", fix="READY")
    assert cloud.node() is not None and len(cloud.runs()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slices", 2], "--slices is for --render gke or slurm"),
        (["--rollout-hosts", 2], "--rollout-hosts is for --render gke or slurm"),
        (
            ["--zone", "us-west4-a,us-east5-b"],
            "give one, or --render sky, whose job searches several",
        ),
    ],
)
def test_what_schedulers_do_is_left_to_them(cloud: Cloud, arguments: list[object], message: str):
    assert message in refused(cloud, *KEPT, *arguments)
    assert cloud.calls() == []


def test_without_gcloud_its_installation_is_named(cloud: Cloud):
    (cloud.folder / "path" / "gcloud").unlink()
    for tool in ("bash", "dirname"):
        (cloud.folder / "path" / tool).symlink_to(str(shutil.which(tool)))
    cloud.variables["PATH"] = str(
        cloud.folder / "path"
    )  # this machine may have a gcloud of its own
    assert "gcloud is not installed: https://cloud.google.com/sdk" in refused(cloud, *KEPT)


def test_a_name_that_is_another_slices_is_left_alone(cloud: Cloud):
    assert cloud.launch(*KEPT, "--keep").returncode == 0
    result = cloud.launch(*KEPT, "--topology", "v5e:4x4")
    assert result.returncode == 1
    assert_message(result.stderr, key="try", value=("v5litepod-4", "v5litepod-16"))
    assert cloud.node() is not None and len(cloud.runs()) == 1


def test_a_host_that_cannot_be_prepared_is_named(cloud: Cloud):
    result = cloud.launch(*KEPT, "--prepare", "cp /nowhere .")
    assert result.returncode == 1 and cloud.runs() == []
    assert "host-0:" in result.stderr
    assert "failed, see above" in result.stderr
    assert_message(result.stdout, key="slice", value="costs", fix="--delete")
    assert cloud.node() is not None
