"""Dry runs and rendered jobs as golden files: what a user reads before anything costs money."""

import contextlib
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from jax_agent_rl.deploy.launch.tpu.gcloud import DryRun, parse_topology
from jax_agent_rl.deploy.launch.tpu.job import Job, SchedulerOptions, render
from jax_agent_rl.deploy.launch.tpu.launch import SliceLaunch
from jax_agent_rl.errors import LaunchError
from tests.cloud import job_of
from tests.messages import raises
from tests.ports import free_port

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).parents[5]
IMAGE = "europe-docker.pkg.dev/p/r/jax_agent_rl:1"


def golden(name: str, text: str) -> None:
    assert text == (GOLDEN / name).read_text(), f"{name}: see what has changed, and why"


DRY_RUNS = {
    "v5e_4x4.txt": (job_of(), {}),
    "v5p_2x2x2.txt": (job_of("v5p:2x2x2", prepare="gcloud storage cp -r gs://b/model /tmp"), {}),
    "spot_v6e_2x4.txt": (job_of("v6e:2x4", spot=True, config=None), {"resume": True}),
    "one_host_no_bucket.txt": (job_of("v5e:2x2", bucket=None), {}),
    "certify_v5e_2x2.txt": (job_of("v5e:2x2", config=None, certify=True), {}),
    "certify_v5e_4x4.txt": (job_of(certify=True), {}),
}


@pytest.mark.parametrize("name", DRY_RUNS)
def test_a_dry_run_prints_every_command(
    name: str,
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(
        tempfile, "TemporaryDirectory", lambda prefix: contextlib.nullcontext(tmp_path)
    )
    job, how = DRY_RUNS[name]
    job = replace(job, config=job.config and config)
    cloud = DryRun(project="my-project", zone="us-west4-a")
    launch = SliceLaunch(
        cloud=cloud,
        task=job,
        poll=1,
        logs=Path("runs/my-run.logs"),
        print_line=lambda line: print(f"# {line}"),
    )
    assert launch.run(ROOT, **{"resume": False, "keep": False} | how) == 0
    golden(name, capsys.readouterr().out.replace(str(tmp_path), "/tmp"))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "my.yaml"
    file.write_text('model:\n  path: /bucket/model  # "mounted"\ntrainer: {steps: 3}\n')
    return file


def rendered(kind: str, job: Job, **changed: object) -> str:
    options = {"zones": ("us-west4-a",), "image": IMAGE} | changed
    return render(kind, job, SchedulerOptions(**options), root=ROOT)  # type: ignore[arg-type]


V5E_HOST = parse_topology("v5e:2x4")


def test_a_jobset_holds_the_configuration_and_a_pod_per_host(config: Path):
    prepare = "python prepare.py --say 'it is \"fine\"' && true"
    text = rendered(
        "gke", job_of(slices=2, spot=True, config=config, bucket="gs://b/team", prepare=prepare)
    )
    golden("gke.yaml", text)
    config_map, jobset = yaml.safe_load_all(text)
    assert config_map["data"]["run.yaml"] == config.read_text()
    (slices,) = jobset["spec"]["replicatedJobs"]
    job = slices["template"]["spec"]
    container = job["template"]["spec"]["containers"][0]
    assert (slices["replicas"], job["parallelism"], job["completions"]) == (2, 4, 4)
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    assert container["command"][2].startswith(
        f"({prepare}) && exec jax-agent-rl train /config/run.yaml seed=1 "
    )


def test_a_jobset_does_not_start_again_what_a_user_has_to_correct(config: Path):
    text = rendered("gke", job_of(config=config), rollout_hosts=1)
    jobset = list(yaml.safe_load_all(text))[1]["spec"]
    (rule,) = jobset["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    for each in jobset["replicatedJobs"]:
        job = each["template"]["spec"]
        (container,) = job["template"]["spec"]["containers"]
        (failing,) = job["podFailurePolicy"]["rules"]
        codes = {"containerName": container["name"], "operator": "In", "values": [2]}
        assert failing == {"action": "FailJob", "onExitCodes": codes}
        assert (
            job["template"]["spec"]["restartPolicy"] == "Never"
        )  # or Kubernetes refuses the policy


def test_a_name_that_is_a_word_of_yaml_stays_a_name(config: Path):
    job = job_of(name="no", config=config, overrides=(), bucket="gs://123")
    config_map, jobset = yaml.safe_load_all(rendered("gke", job))
    config_volume, bucket = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"][
        "spec"
    ]["volumes"]
    names = [
        config_map["metadata"]["name"],
        jobset["metadata"]["name"],
        config_volume["configMap"]["name"],
    ]
    assert names == ["no"] * 3
    assert bucket["csi"]["volumeAttributes"]["bucketName"] == "123"


def test_a_jobset_starts_sampling_pods_first_and_ends_with_the_others(config: Path):
    job = job_of("v5p:2x2x2", config=config, bucket="gs://b")
    text = rendered("gke", job, rollout_hosts=2, rollout_topology=V5E_HOST)
    golden("gke_rollout.yaml", text)
    _, jobset = yaml.safe_load_all(text)
    rollout, learners = jobset["spec"]["replicatedJobs"]
    assert jobset["spec"]["startupPolicy"]["startupPolicyOrder"] == "InOrder"
    assert jobset["spec"]["successPolicy"]["targetReplicatedJobs"] == [learners["name"]]
    assert (rollout["replicas"], rollout["template"]["spec"]["parallelism"]) == (2, 1)
    serving, training = (
        each["template"]["spec"]["template"]["spec"]["containers"][0]
        for each in (rollout, learners)
    )
    assert serving["resources"]["limits"] == {"google.com/tpu": 8}
    (port,) = (each["containerPort"] for each in serving["ports"])
    assert serving["readinessProbe"]["tcpSocket"]["port"] == port
    assert f"--port={port} " in serving["command"][2]
    name = jobset["metadata"]["name"]
    service = f"{jobset['metadata']['name']}:{port}"
    urls = ",".join(f"http://{name}-{rollout['name']}-{i}-0.{service}" for i in range(2))
    assert f"'rollout.urls=[{urls}]' rollout.token_env=JAX_AGENT_RL_TOKEN" in training["command"][2]
    assert [each["env"][-1] for each in (serving, training)] == [
        {
            "name": "JAX_AGENT_RL_TOKEN",
            "valueFrom": {"secretKeyRef": {"name": f"{name}-token", "key": "token"}},
        }
    ] * 2


def test_given_variables_are_written_and_others_come_from_a_cluster_secret(config: Path):
    text = rendered("gke", job_of(config=config, variables={"NO": "a: 'b'", "WANDB_API_KEY": None}))
    assert (
        'kubectl create secret generic my-run-env --from-literal=WANDB_API_KEY="$WANDB_API_KEY"\n'
        in text
    )
    _, jobset = yaml.safe_load_all(text)
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert {"name": "NO", "value": "a: 'b'"} in pod["containers"][0]["env"]
    secret = {"secretKeyRef": {"name": "my-run-env", "key": "WANDB_API_KEY"}}
    assert {"name": "WANDB_API_KEY", "valueFrom": secret} in pod["containers"][0]["env"]


def submitted(folder: Path, text: str, **programs: str) -> subprocess.CompletedProcess[str]:
    """A Slurm job where these programs stand for Slurm's and ours."""
    (folder / "bin").mkdir(parents=True)
    for name, program in programs.items():
        (folder / "bin" / name.replace("_", "-")).write_text(program)
        (folder / "bin" / name.replace("_", "-")).chmod(0o755)
    (folder / "job.sh").write_text(text)
    paths = {
        "LOG": str(folder / "log"),
        "JAX_AGENT_RL_VENV": str(folder),
        "SLURM_JOB_NODELIST": "host-[a-c]",
    }
    command = ["bash", str(folder / "job.sh")]
    return subprocess.run(
        command, env=os.environ | paths, capture_output=True, text=True, timeout=300
    )


def test_a_slurm_job_sets_variables_and_asks_for_those_that_sbatch_brings(
    config: Path, tmp_path: Path, monkeypatch
):
    job = job_of(config=config, variables={"GIVEN": "a 'b'", "BROUGHT": None})
    programs = {"srun": '#!/usr/bin/env bash\necho "$GIVEN $BROUGHT"\n'}
    result = submitted(tmp_path / "without", rendered("slurm", job), **programs)
    assert result.returncode == 1
    assert "BROUGHT: export it before sbatch" in result.stderr
    monkeypatch.setenv("BROUGHT", "c")
    result = submitted(tmp_path / "with", rendered("slurm", job), **programs)
    assert (result.returncode, result.stdout) == (0, "a 'b' c\n"), result.stderr


SRUN = """#!/bin/bash
echo "srun $*" >> "$LOG"
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
PROGRAM = f"""#!{sys.executable}
import os, socket, sys, time
from pathlib import Path
log = Path(os.environ["LOG"])
if sys.argv[1] == "rollout-server":
    port = next(item.partition("=")[2] for item in sys.argv if item.startswith("--port="))
    listening = socket.create_server(("127.0.0.1", int(port)))
    time.sleep(600)
with log.open("a") as lines:
    print(os.environ["JAX_AGENT_RL_TOKEN"], sys.argv[1:], file=lines)
"""


def test_a_slurm_job_gives_its_last_nodes_to_servers_and_ends_with_training(tmp_path: Path):
    port = free_port()
    job = job_of("v5p:2x2x2", config=Path("my.yaml"), bucket="gs://b")
    text = rendered("slurm", job, rollout_hosts=1, port=port)
    golden("slurm_rollout.sh", text.replace(str(port), "PORT"))
    scontrol = "#!/bin/bash\nprintf '%s\\n' host-a host-b 127.0.0.1\n"
    result = submitted(tmp_path, text, srun=SRUN, jax_agent_rl=PROGRAM, scontrol=scontrol)
    assert result.returncode == 0, result.stderr
    lines = (tmp_path / "log").read_text().splitlines()
    assert "--nodes=1 --ntasks=1 --relative=2 jax-agent-rl rollout-server" in lines[0]
    assert "--nodes=2 --ntasks=2 --relative=0 jax-agent-rl train" in lines[1]
    token, _, arguments = lines[2].partition(" ")
    assert len(token) == 64
    assert "'train', 'my.yaml'" in arguments
    assert f"'rollout.urls=[http://127.0.0.1:{port}]'" in arguments


TIMED = f"""#!{sys.executable}
import os, signal, sys
from pathlib import Path
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM}})
os.kill(os.getppid(), signal.SIGUSR1)  # what Slurm sends to the job's script
signal.sigwait({{signal.SIGTERM}})
with Path(os.environ["LOG"]).open("a") as log:
    print("saved", file=log)
sys.exit(int(os.environ["STATUS"]))
"""


@pytest.mark.parametrize(("status", "requeued"), [(130, ["scontrol requeue 7"]), (0, [])])
def test_a_slurm_job_whose_time_is_over_saves_and_goes_into_the_queue_again(
    tmp_path: Path, status: int, requeued: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("STATUS", str(status))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    text = rendered("slurm", job_of(config=Path("my.yaml"), bucket=None))
    assert "#SBATCH --signal=B:USR1@" in text
    scontrol = '#!/bin/bash\necho "scontrol $*" >> "$LOG"\n'
    result = submitted(tmp_path, text, srun=SRUN, jax_agent_rl=TIMED, scontrol=scontrol)
    assert result.returncode == status, result.stderr
    assert (tmp_path / "log").read_text().splitlines()[1:] == ["saved", *requeued]


def test_a_slurm_job_ends_when_its_servers_do_before_they_listen(tmp_path: Path):
    job = job_of(config=Path("my.yaml"), bucket="gs://b")
    text = rendered("slurm", job, rollout_hosts=1, port=free_port())
    result = submitted(
        tmp_path, text, srun="#!/bin/bash\nexit 7\n", scontrol="#!/bin/bash\necho 127.0.0.1\n"
    )
    assert result.returncode != 0


def test_new_weights_go_through_a_bucket(config: Path):
    with raises(
        LaunchError,
        key=("--bucket", "--rollout-hosts"),
        fix="gs://NAME",
    ):
        rendered("slurm", job_of(config=config, bucket=None), rollout_hosts=1)


def test_a_slurm_job_has_a_task_per_host_and_goes_on_after_a_requeue(config: Path):
    text = rendered("slurm", job_of(config=Path("my.yaml"), bucket=None, prepare="echo 'a b'"))
    golden("slurm.sh", text)


def test_pods_need_an_image_and_a_bucket(config: Path):
    with raises(LaunchError, key="--image", value="missing"):
        rendered("gke", job_of(config=config), image=None)
    with raises(LaunchError, key="--bucket", fix="gs://NAME"):
        rendered("gke", job_of(config=config, bucket=None))


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        ("gke", {"rollout_topology": V5E_HOST}, {"key": "--rollout-hosts", "fix": "their number"}),
        (
            "gke",
            {"rollout_hosts": 2, "rollout_topology": parse_topology("v5e:4x4")},
            {"key": "v5e:4x4", "value": "4 hosts"},
        ),
        (
            "slurm",
            {"rollout_hosts": 1, "rollout_topology": V5E_HOST},
            {"key": "Slurm job", "value": "one kind"},
        ),
        (
            "sky",
            {"rollout_hosts": 1},
            {"key": ("--slices", "--rollout-hosts"), "fix": "--render gke or slurm"},
        ),
    ],
)
def test_rollout_hosts_that_cannot_be_are_refused(
    kind: str, options: dict, named: dict, config: Path
):
    with raises(LaunchError, **named):
        rendered(kind, job_of(config=config), **options)


def test_keys_of_rollout_hosts_are_refused_only_with_them(config: Path):
    job = job_of(config=config, overrides=("rollout.urls=[http://x:1]",))
    assert "'rollout.urls=[http://x:1]'" in rendered("slurm", job)
    with raises(LaunchError, key="rollout.urls", value="[http://x:1]", fix="tpu_pod.sh"):
        rendered("slurm", job, rollout_hosts=1)
