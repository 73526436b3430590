"""What Google Cloud does to a launch on TPUs: it refuses, is slow, takes back. It is made up; processes are real."""

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cloud import Cloud
from tests.launching import ended_after, read_until
from tests.ports import free_port

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
    rest = process.stdout.read()
    process.wait()
    return rest


def test_a_run_from_nothing_to_a_deleted_slice(cloud: Cloud):
    cloud.order("hosts", "2")
    result = cloud.launch(*KEPT, "--topology", "v5e:4x4", "trainer.steps=3")
    assert result.returncode == 0, result.stdout + result.stderr
    assert [run.split()[:3] for run in cloud.runs()] == [[f"try/{i}", "train", "tpu_pod.yaml"] for i in (0, 1)]
    assert all("trainer.steps=3" in run and "learner.multihost.coordinator=auto" in run for run in cloud.runs())
    assert "[host-0] arguments: train" in result.stdout and "[host-1] arguments: train" in result.stdout
    assert cloud.node() is None and "the run is in gs://b/try" in result.stdout
    logs = sorted(file.name.partition("-2")[0] for file in (cloud.folder / "buckets/b/try/logs").iterdir())
    assert logs == ["host-0", "host-1"]


def test_one_host_without_a_bucket_keeps_its_slice_and_the_next_launch_takes_it(cloud: Cloud):
    first = cloud.launch("--config", CONFIG)
    assert first.returncode == 0 and "the slice stays (without --bucket" in first.stdout, first.stdout + first.stderr
    again = cloud.launch("--config", CONFIG)
    assert again.returncode == 0 and "try is there already (READY)" in again.stdout
    assert len(cloud.calls("tpu-vm create")) == 1 and len(cloud.runs()) == 2
    assert cloud.launch("--delete").returncode == 0 and cloud.node() is None
    assert "there is no try" in cloud.launch("--delete").stdout


def test_the_quickstart_brings_its_model_and_data_to_every_host(cloud: Cloud):
    cloud.write("venv/bin/jax-agent-rl", '#!/usr/bin/env bash\necho "called: $*"\n').chmod(0o755)
    result = cloud.launch("--bucket", "gs://b")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "called: fetch-model" in result.stdout and "called: prepare shop" in result.stdout


def test_the_exit_status_is_the_runs_and_the_slice_is_given_back(cloud: Cloud):
    cloud.order("trainer", "ends 2")
    result = cloud.launch(*KEPT)
    assert result.returncode == 2 and "ended with 2 on host-0" in result.stdout and cloud.node() is None


def test_a_slice_that_is_taken_back_is_made_anew_and_the_run_resumes(cloud: Cloud):
    cloud.order("trainer", "waits")
    process = cloud.start(*KEPT, "--spot")
    read_until(process, "[host-0] training")
    cloud.order("trainer", "ends 0")
    cloud.preempt()
    rest = said_by(process)
    assert process.returncode == 0, rest
    assert "preemption 1 of at most 20 (PREEMPTED)" in rest and "preempted 1 time(s)" in rest
    first, second = sorted(cloud.runs(), key=len)
    assert "resume" not in first and second.endswith("--auto-resume")
    assert len(cloud.calls("tpu-vm create")) == 2 and cloud.node() is None


def test_preemptions_are_bounded(cloud: Cloud):
    cloud.order("trainer", "waits")
    process = cloud.start(*KEPT, "--queued", "--spot", "--max-preemptions", "0")
    read_until(process, "[host-0] training")
    cloud.preempt()
    rest = said_by(process)
    assert process.returncode == 1
    assert "preempted 1 time(s) (--max-preemptions 0); the last checkpoint is in gs://b/try" in rest
    assert "continue with --resume" in rest


def test_a_broken_connection_loses_neither_the_run_nor_a_line(cloud: Cloud):
    cloud.order("trainer", "waits")
    process = cloud.start(*KEPT)
    before = "".join(read_until(process, "[host-0] training"))
    cloud.order("cut-0")
    before += "".join(read_until(process, "the connection broke, connecting again"))
    rest = "".join(ended_after(process, signal.SIGINT))
    assert process.returncode == 130 and "[host-0] saved a checkpoint" in rest, rest
    assert (before + rest).count("[host-0] training") == 1 and len(cloud.runs()) == 1


def test_a_launcher_without_a_network_finds_its_run_again(cloud: Cloud):
    cloud.order("trainer", "waits")
    process = cloud.start(*KEPT)
    read_until(process, "[host-0] training")
    cloud.order("offline")
    for _ in range(3):
        read_until(process, "the connection broke, connecting again")
    cloud.recall("offline")
    rest = "".join(ended_after(process, signal.SIGINT))
    assert process.returncode == 130 and "[host-0] saved a checkpoint" in rest and len(cloud.runs()) == 1, rest


def test_ctrl_c_without_a_network_reaches_the_run_once_there_is_one(cloud: Cloud):
    cloud.order("trainer", "waits")
    process = cloud.start(*KEPT)
    read_until(process, "[host-0] training")
    cloud.order("offline")
    process.send_signal(signal.SIGINT)
    read_until(process, "the run could not be interrupted")
    cloud.recall("offline")
    rest = said_by(process)
    assert process.returncode == 130 and "[host-0] saved a checkpoint" in rest and cloud.node() is None, rest


def test_a_launcher_that_has_lost_sight_of_the_run_leaves_it_and_another_finds_it(cloud: Cloud):
    cloud.order("trainer", "waits")
    process = cloud.start(*KEPT, "--poll", "0.001")
    read_until(process, "[host-0] training")
    cloud.order("offline")
    rest = said_by(process)
    assert process.returncode == 1 and "lost sight of the run" in rest, rest
    cloud.recall("offline")
    assert cloud.node() is not None
    again = cloud.start(*KEPT)
    read_until(again, "[host-0] training")
    rest = "".join(ended_after(again, signal.SIGINT))
    assert again.returncode == 130 and len(cloud.runs()) == 1 and len(cloud.calls("tpu-vm scp")) == 1


def test_a_run_that_failed_is_left_while_nobody_says_whether_its_slice_was_taken_back(cloud: Cloud):
    cloud.order("trainer", "waits")
    process = cloud.start(*KEPT, "--poll", "0.01")
    read_until(process, "[host-0] training")
    cloud.order("describe-fails")
    cloud.power_off()
    rest = said_by(process)
    assert process.returncode == 1 and "gcloud does not report whether the slice was preempted" in rest, rest
    assert cloud.node() is not None


def test_ctrl_c_lets_the_run_save_before_its_slice_is_deleted(cloud: Cloud):
    cloud.order("trainer", "waits")
    process = cloud.start(*KEPT)
    read_until(process, "[host-0] training")
    rest = "".join(ended_after(process, signal.SIGINT))
    assert process.returncode == 130, rest
    assert rest.index("saved a checkpoint") < rest.index("deleting try") and cloud.node() is None


def test_a_killed_launcher_leaves_the_run_going_and_another_finds_it(cloud: Cloud):
    cloud.order("trainer", "waits")
    process = cloud.start(*KEPT)
    read_until(process, "[host-0] training")
    process.kill()
    process.wait()
    again = cloud.start(*KEPT)
    lines = read_until(again, "[host-0] training")
    assert any("a run is under way there: following it" in line for line in lines)
    rest = "".join(ended_after(again, signal.SIGINT))
    assert again.returncode == 130 and "saved a checkpoint" in rest and len(cloud.runs()) == 1
    assert len(cloud.calls("tpu-vm scp")) == 1


def test_logs_shows_the_run_from_its_beginning_and_its_exit_status(cloud: Cloud):
    cloud.order("trainer", "ends 2")
    assert cloud.launch(*KEPT, "--keep").returncode == 2
    shown = cloud.launch("--logs")
    assert shown.returncode == 2 and "[host-0] arguments: train" in shown.stdout
    assert (cloud.folder / "logs" / "host-0.log").read_text().count("arguments: train") == 1
    assert cloud.node() is not None and len(cloud.runs()) == 1


def test_logs_of_a_slice_that_is_not_there_says_so(cloud: Cloud):
    assert "try is NOT_FOUND (there is none): there is nothing to show" in refused(cloud, "--logs")


def test_several_slices_wait_in_the_queue_and_are_one_run(cloud: Cloud):
    cloud.order("waits", "2")
    result = cloud.launch(*KEPT, "--slices", 2, "--valid-until", "6h")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "try is WAITING_FOR_RESOURCES" in result.stdout
    (made,) = cloud.calls("queued-resources create")
    assert "--node-count=2 --node-prefix=try --valid-until-duration=6h" in made
    assert [run.split()[0] for run in cloud.runs()] == ["try-0/0", "try-1/0"]
    assert cloud.calls("queued-resources delete try --force") and cloud.node("try-0") is None


def split(*more: object) -> list[object]:
    """Two slices that learn, and one that samples."""
    return [*KEPT, "--rollout-hosts", 1, "--rollout-port", free_port(), *more]


def test_hosts_that_only_sample_serve_before_the_others_learn_and_end_with_them(cloud: Cloud):
    cloud.order("hosts", "2")
    result = cloud.launch(*split("--topology", "v5e:4x4", "seed=3"))
    assert result.returncode == 0, result.stdout + result.stderr
    server, *learners = sorted(cloud.runs(), key=lambda run: run.startswith("try/"))
    assert (
        server.startswith("try-rollout-0/0 rollout-server --config tpu_pod.yaml --host=0.0.0.0") and "seed=3" in server
    )
    port = server.partition("--port=")[2].split()[0]
    assert [run.split()[0] for run in learners] == ["try/0", "try/1"]
    for run in learners:
        assert f"rollout.backend=remote rollout.urls=[http://127.0.0.1:{port}]" in run
        assert "rollout.weight_transport=tensorstore rollout.weight_dir=" in run
    secrets = [cloud.environment_of(program)["JAX_AGENT_RL_TOKEN"] for program in ("rollout-server", "train")]
    assert len(secrets[0]) == 64 and secrets[0] == secrets[1] and not any(secrets[0] in call for call in cloud.calls())
    assert result.stdout.index("[rollout-0] arguments") < result.stdout.index("[rollout-0] stopped serving")
    assert cloud.node() is None and cloud.node("try-rollout-0") is None


def test_variables_reach_what_prepares_and_what_runs_and_are_shown_nowhere(cloud: Cloud):
    cloud.variables["FROM_HERE"] = "a 'secret' of \\"
    prepare = 'printf %s "$FROM_HERE" >prepared && cat >>prepared'  # its input is empty
    given = ["--env", "FROM_HERE", "--env", "GIVEN=b=c d", "--prepare", prepare]
    result = cloud.launch(*split(*given, "--keep"))
    assert result.returncode == 0, result.stdout + result.stderr
    for program in ("rollout-server", "train"):
        seen = cloud.environment_of(program)
        assert (seen["FROM_HERE"], seen["GIVEN"]) == ("a 'secret' of \\", "b=c d")
    for host in ("try/0", "try-rollout-0/0"):
        assert (cloud.folder / "hosts" / host / "jax_agent_rl" / "prepared").read_text() == "a 'secret' of \\"
    assert not any("secret' of" in text or "b=c" in text for text in (*cloud.calls(), result.stdout))
    result = cloud.launch(*split("--env", "NOWHERE"))
    assert result.returncode == 1 and "--env NOWHERE is not set here: export it, or give" in result.stderr
    assert cloud.launch("--delete", "--env", "NOWHERE").returncode == 0, "the same command with --delete"


def test_a_preparation_that_fails_with_variables_ends_the_launch(cloud: Cloud):
    result = cloud.launch("--prepare", "exit 7", "--env", "GIVEN=1")
    assert result.returncode == 1 and "host-0:" in result.stderr and not cloud.runs()


@pytest.mark.parametrize("lost", ["try-rollout-0", "try"])
def test_the_slice_that_is_taken_back_is_alone_made_anew_and_what_it_leaves_is_saved(cloud: Cloud, lost: str):
    cloud.order("trainer", "waits")
    process = cloud.start(*split("--spot"))
    read_until(process, "[host-0] training")
    cloud.order("trainer", "ends 0")
    cloud.preempt(lost)
    rest = said_by(process)
    assert process.returncode == 0, rest
    taken = rest.index("preemption 1 of at most 20 (PREEMPTED)")
    assert ("[host-0] saved a checkpoint" in rest[:taken]) == (lost != "try")
    made = {name: len(cloud.calls(f"tpu-vm create {name} ")) for name in ("try", "try-rollout-0")}
    assert made == {"try": 1, "try-rollout-0": 1} | {lost: 2}
    assert [run.split()[:2] for run in cloud.runs()].count(["try-rollout-0/0", "rollout-server"]) == 2
    assert [run.split()[0] for run in cloud.runs() if "--auto-resume" in run] == ["try/0"]
    assert cloud.node() is None and cloud.node("try-rollout-0") is None


def test_delete_gives_back_all_slices_of_the_name_and_no_other(cloud: Cloud):
    assert cloud.launch(*split("--keep")).returncode == 0
    assert cloud.launch(*KEPT, "--queued", "--slices", 2, "--name", "try-2", "--keep").returncode == 0
    result = cloud.launch("--delete")
    assert result.returncode == 0 and "deleted try, try-rollout-0" in result.stdout, result.stdout + result.stderr
    assert cloud.node() is None and cloud.node("try-rollout-0") is None and cloud.node("try-2-0") is not None
    result = cloud.launch("--name", "try-2", "--delete")
    assert result.returncode == 0 and cloud.node("try-2-0") is None and cloud.node("try-2-1") is None


@pytest.mark.parametrize("refused_one", ["try", "try-rollout-0"])
def test_a_slice_that_cannot_be_deleted_is_named_and_the_others_are_deleted(cloud: Cloud, refused_one: str):
    cloud.order("delete-fails", refused_one)
    for arguments in (split("--poll", "0.001"), ["--delete"]):
        result = cloud.launch(*arguments)
        assert result.returncode == 1 and f"{refused_one}: still there, and costs" in result.stderr
        assert [name for name in ("try", "try-rollout-0") if cloud.node(name)] == [refused_one]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--name", "try-rollout-0"], "is reserved for slices that sample"),
        (["--rollout-hosts", 2, "--rollout-topology", "v5e:4x4"], "v5e:4x4 has 4 hosts, and an engine runs on one"),
        (["--rollout-topology", "v5e:2x2"], "needs --rollout-hosts: give their number"),
        (
            ["--rollout-hosts", 1, "--rollout-topology", "v5e:2x2", "--render", "slurm"],
            "nodes of a Slurm job are of one kind",
        ),
        (["--rollout-hosts", 1, "rollout.urls=[http://x:1]"], "rollout.urls=[http://x:1]: tpu_pod.sh sets"),
    ],
)
def test_rollout_hosts_that_cannot_be_are_refused(cloud: Cloud, arguments: list[object], message: str):
    assert message in refused(cloud, *KEPT, *arguments)


def test_a_look_that_fails_does_not_end_the_wait_in_the_queue(cloud: Cloud):
    cloud.order("waits", "3")
    process = cloud.start(*KEPT, "--queued")
    read_until(process, "try is WAITING_FOR_RESOURCES")
    cloud.order("offline")
    read_until(process, "Network is unreachable")
    read_until(process, "trying again in")
    cloud.recall("offline")
    rest = said_by(process)
    assert process.returncode == 0 and "try is ready" in rest, rest
    assert len(cloud.calls("queued-resources create")) == 1


def test_after_a_preemption_a_cloud_that_does_not_answer_is_asked_again(cloud: Cloud):
    cloud.order("trainer", "waits")
    process = cloud.start(*KEPT, "--spot")
    read_until(process, "[host-0] training")
    cloud.order("trainer", "ends 0")
    cloud.preempt()
    read_until(process, "preemption 1 of")
    cloud.order("offline")
    read_until(process, "trying again in")
    cloud.recall("offline")
    rest = said_by(process)
    assert process.returncode == 0 and "--auto-resume" in cloud.runs()[-1], rest
    assert cloud.node() is None


def test_a_slice_whose_run_has_ended_is_given_back_when_the_cloud_answers(cloud: Cloud):
    cloud.order("delete-fails", "try")
    process = cloud.start(*KEPT)
    read_until(process, "trying again in")
    assert cloud.node() is not None
    cloud.recall("delete-fails")
    rest = said_by(process)
    assert process.returncode == 0 and cloud.node() is None and len(cloud.runs()) == 1, rest


def test_ctrl_c_ends_the_wait_for_a_cloud_that_does_not_take_a_slice_back(cloud: Cloud):
    cloud.order("delete-fails", "try")
    process = cloud.start(*KEPT, "--poll", 1000)
    read_until(process, "trying again in")
    rest = "".join(ended_after(process, signal.SIGINT))
    assert process.returncode == 130 and "--delete deletes it" in rest and cloud.node() is not None, rest


def test_a_host_that_does_not_listen_yet_is_tried_again(cloud: Cloud):
    cloud.order("deaf", "2")
    result = cloud.launch(*KEPT)
    assert result.returncode == 0 and result.stdout.count("host-0: trying again in") == 2, result.stdout
    cloud.order("deaf", "100")
    result = cloud.launch(*KEPT, "--poll", "0.01")
    assert result.returncode == 1 and "host-0: gcloud compute tpus tpu-vm scp" in result.stderr, result.stderr


@pytest.mark.parametrize(
    "order, message", [("offline", "try again"), ("no-zone", "there is no such zone"), ("describe-fails", "INTERNAL")]
)
def test_a_wait_that_ends_without_an_answer_says_what_stays(cloud: Cloud, order: str, message: str):
    cloud.order("waits", "1000000")
    process = cloud.start(*KEPT, "--queued", "--poll", "0.001")
    read_until(process, "try is WAITING_FOR_RESOURCES")
    cloud.order(order)
    rest = said_by(process)
    assert process.returncode == 1 and message in rest, rest
    assert "the slice stays and costs: --delete deletes it" in rest


def test_a_request_that_is_suspended_before_it_is_ready_is_made_anew(cloud: Cloud):
    cloud.order("suspends")
    result = cloud.launch(*KEPT, "--queued", "--spot")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "preemption 1 of at most 20 (SUSPENDED before it was ready)" in result.stdout
    assert len(cloud.calls("queued-resources create")) == 2
    (run,) = cloud.runs()
    assert "resume" not in run  # there is nothing of this run yet


def test_a_queue_that_gives_up_is_quoted(cloud: Cloud):
    cloud.order("queue-fails", "RESOURCE_EXHAUSTED: quota limit exceeded")
    said = refused(cloud, *KEPT, "--queued")
    assert "the request failed: RESOURCE_EXHAUSTED: quota limit exceeded" in said and "ask for more" in said


@pytest.mark.parametrize(
    "order, text, message",
    [
        ("no-quota", "", "no quota for that many chips of that kind"),
        ("no-capacity", "", "the zone is full: add --queued"),
        ("no-zone", "", "there is no such zone, or none for this project: gcloud compute tpus locations list"),
        ("bad-kind", "", "the zone does not have this kind of chip"),
        ("no-login", "", "nobody is logged in to gcloud: gcloud auth login"),
        ("no-project", "", "give --project, or gcloud config set project PROJECT"),
        ("kinds", "v6e-4", "v5e:2x2 is v5litepod-4, which this zone does not have (it has none of that kind)"),
        ("kinds", "v5litepod-1 v5litepod-8", "(of that kind it has v5litepod-1, v5litepod-8)"),
    ],
)
def test_what_google_refuses_is_said_with_the_fix(cloud: Cloud, order: str, text: str, message: str):
    cloud.order(order, text)
    result = cloud.launch(*KEPT)
    assert result.returncode == 1 and message in result.stderr and "Traceback" not in result.stderr
    assert cloud.node() is None and "stays" not in result.stdout


def test_without_gcloud_its_installation_is_named(cloud: Cloud):
    (cloud.folder / "path" / "gcloud").unlink()
    for tool in ("bash", "dirname"):
        (cloud.folder / "path" / tool).symlink_to(str(shutil.which(tool)))
    cloud.variables["PATH"] = str(cloud.folder / "path")  # this machine may have a gcloud of its own
    assert "gcloud is not installed: https://cloud.google.com/sdk" in refused(cloud, *KEPT)


def test_a_name_that_is_another_slices_is_left_alone(cloud: Cloud):
    assert cloud.launch(*KEPT, "--keep").returncode == 0
    result = cloud.launch(*KEPT, "--topology", "v5e:4x4")
    assert result.returncode == 1 and "try is there already and is a v5litepod-4, not a v5litepod-16" in result.stderr
    assert cloud.node() is not None and len(cloud.runs()) == 1


def test_a_host_that_cannot_be_prepared_is_named(cloud: Cloud):
    result = cloud.launch(*KEPT, "--prepare", "cp /nowhere .")
    assert result.returncode == 1 and cloud.runs() == []
    assert "host-0:" in result.stderr and "failed, see above" in result.stderr
    assert "the slice stays and costs: --delete deletes it" in result.stdout and cloud.node() is not None
