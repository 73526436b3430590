"""Cluster files and manifests of ``gpu.sh --render``, read back."""

import shlex
from pathlib import Path

import pytest
import yaml

from jax_agent_rl.deploy.launch.__main__ import main

ROOT = Path(__file__).parents[4]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def test_ray_up_takes_the_cluster_file_and_prepares_every_host(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    util = pytest.importorskip("ray.autoscaler._private.util")
    monkeypatch.setenv("JAX_AGENT_RL_VENV", "/opt/venv")
    assert main(["--render", "ray", "--hosts", "me@10.0.0.1,me@10.0.0.2,me@10.0.0.3"]) == 0
    tree = yaml.safe_load(capsys.readouterr().out)
    util.validate_config(util.prepare_config(tree))
    assert tree["provider"] == {
        "type": "local",
        "head_ip": "10.0.0.1",
        "worker_ips": ["10.0.0.2", "10.0.0.3"],
    }
    assert tree["auth"] == {"ssh_user": "me"}
    assert tree["min_workers"] == 2
    assert tree["file_mounts"][str(ROOT)] == str(ROOT)
    assert tree["setup_commands"] == [
        f"JAX_AGENT_RL_VENV=/opt/venv {ROOT}/launch/gpu_environment.sh cuda"
    ]
    head, worker = (tree[f"{role}_start_ray_commands"][-1] for role in ("head", "worker"))
    assert "--head --port=6379" in head
    assert "--address=$RAY_HEAD_IP:6379" in worker
    assert all(
        "RAY_AUTH_MODE=token /opt/venv/bin/ray start" in command for command in (head, worker)
    )


def test_a_rayjob_runs_the_driver_on_the_configuration_with_time_to_save(
    capsys: pytest.CaptureFixture[str],
):
    arguments = [
        "--render",
        "kuberay",
        "--nodes",
        "2",
        "--gpus-per-node",
        "4",
        "--claim",
        "disk",
        "--resume",
    ]
    assert main([*arguments, "--config", str(QUICKSTART), "run_dir=/runs/my run"]) == 0
    files, job = yaml.safe_load_all(capsys.readouterr().out)
    assert files["data"]["run.yaml"] == QUICKSTART.read_text()
    spec = job["spec"]
    command = shlex.split(shlex.split(spec["entrypoint"])[2].partition(" exec ")[2])
    assert command[:3] == ["/opt/venv/bin/python", "-m", "jax_agent_rl.deploy.launch.ray_driver"]
    assert {"--config=/config/run.yaml", "--resume", "run_dir=/runs/my run"} <= set(command)
    assert int(yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) >= 60
    assert spec["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    pod = group["template"]["spec"]
    assert group["replicas"] == 2
    assert pod["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 4}}
    assert {"name": "runs", "persistentVolumeClaim": {"claimName": "disk"}} in pod["volumes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--render", "ray"], "--hosts=: name [user@]hosts"),
        (["--render", "ray", "--hosts", "a@10.0.0.1,b@10.0.0.2"], "with one user for all"),
        (["--render", "kuberay"], "CONFIG or --config"),
        (
            ["--render", "kuberay", "--config", str(QUICKSTART)],
            "run_dir=runs/quickstart ends with its pod",
        ),
    ],
)
def test_what_cannot_be_rendered_is_refused_with_the_fix(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert main(arguments) == 1
    assert message in capsys.readouterr().err
