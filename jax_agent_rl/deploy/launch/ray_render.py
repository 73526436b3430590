"""Clusters as text: a file for ``ray up`` over hosts with ssh, and a RayJob for KubeRay."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from jax_agent_rl.deploy.launch import ray_job
from jax_agent_rl.errors import LaunchError

_TOKEN_FILE = "~/.ray/auth_token"
_PORT = 6379
_IMAGE_ROOT, _IMAGE_PYTHON = "/app", "/opt/venv/bin/python"  # docker/gpu.Dockerfile
_CONFIG = "/config/run.yaml"
RUNS = "/runs"
"""Where pods mount the claim."""


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks, and nothing by reference."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def cluster_file(hosts: Sequence[str], *, root: Path, venv: Path, device: str) -> str:
    """Return a cluster file for ``ray up``: this folder goes to the same path on every host, with its environment.

    Args:
        hosts: ``[user@]address``, the head first.
        root: the project's folder.
        venv: folder of the environment.
        device: ``cuda`` or ``cpu``.

    Raises:
        LaunchError: no host is named, or they differ in their user.
    """
    users = {host.rpartition("@")[0] for host in hosts}
    if len(users) != 1:
        raise LaunchError(
            f"--hosts={','.join(hosts)}: name [user@]hosts with one user for all, e.g. me@10.0.0.1,me@10.0.0.2"
        )
    head, *workers = [host.rpartition("@")[2] for host in hosts]
    ray = f"RAY_AUTH_MODE=token {venv}/bin/ray"
    start = f"ulimit -n 65536; {ray} start --disable-usage-stats"
    tree: dict[str, Any] = {
        "cluster_name": "jax-agent-rl",
        "provider": {"type": "local", "head_ip": head, "worker_ips": workers},
        "auth": {"ssh_user": next(iter(users))} if users != {""} else {},
        "min_workers": len(workers),
        "max_workers": len(workers),
        "file_mounts": {str(root): str(root), _TOKEN_FILE: _TOKEN_FILE},
        "rsync_exclude": [".git", ".venv*", "runs"],
        "setup_commands": [f"JAX_AGENT_RL_VENV={venv} {root}/launch/gpu_environment.sh {device}"],
        "head_start_ray_commands": [
            f"{ray} stop",
            f"{start} --head --port={_PORT} --autoscaling-config=~/ray_bootstrap_config.yaml",
        ],
        "worker_start_ray_commands": [f"{ray} stop", f"{start} --address=$RAY_HEAD_IP:{_PORT}"],
    }
    return _comment(
        "ray get-auth-token --generate; ray up cluster.yaml; ray dashboard cluster.yaml (keeps port 8265 open);",
        "RAY_AUTH_MODE=token RAY_ADDRESS=http://127.0.0.1:8265 ./launch/gpu.sh --config …",
        "For a cloud, replace provider and auth as docs.ray.io shows for it.",
    ) + yaml.dump(tree, Dumper=_Dumper, sort_keys=False)


def ray_job_manifest(
    arguments: Sequence[str], config: str, *, image: str, nodes: int, gpus: int, claim: str, ray_version: str
) -> str:
    """Return a ConfigMap with the configuration, and a RayJob that runs it, for ``kubectl apply``.

    Args:
        arguments: of the driver, without the configuration.
        config: text of the configuration.
        image: of docker/gpu.Dockerfile.
        nodes: pods with GPUs.
        gpus: GPUs of each of them; 0: CPUs.
        claim: a PersistentVolumeClaim that all pods can write, for run folder, data and models, at ``/runs``.
        ray_version: version in the image.
    """
    name = "jax-agent-rl"
    volumes = [
        {"name": "config", "configMap": {"name": name}},
        {"name": "runs", "persistentVolumeClaim": {"claimName": claim}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]
    mounts = [
        {"name": "config", "mountPath": "/config"},
        {"name": "runs", "mountPath": RUNS},
        {"name": "memory", "mountPath": "/dev/shm"},
    ]

    def pod(role: str, resources: dict[str, Any]) -> dict[str, Any]:
        container = {"name": role, "image": image, "resources": resources, "volumeMounts": mounts}
        return {"spec": {"containers": [container], "volumes": volumes}}

    workers = {
        "groupName": "nodes",
        "replicas": nodes,
        "minReplicas": nodes,
        "maxReplicas": nodes,
        "rayStartParams": {},
        "template": pod("node", {"limits": {"nvidia.com/gpu": gpus}} if gpus else {}),
    }
    head = {"rayStartParams": {"num-cpus": "0"}, "template": pod("head", {"requests": {"cpu": 2, "memory": "8Gi"}})}
    command = ray_job.entrypoint(_IMAGE_ROOT, _IMAGE_PYTHON, name, [f"--config={_CONFIG}", *arguments])
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name},
        "spec": {
            "entrypoint": f"bash -c {shlex.quote(command)}",
            "runtimeEnvYAML": yaml.safe_dump(ray_job.runtime_env(_IMAGE_ROOT)),
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {
                "rayVersion": ray_version,
                "authOptions": {"mode": "token"},
                "headGroupSpec": head,
                "workerGroupSpecs": [workers],
            },
        },
    }
    files = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"run.yaml": config}}
    text = yaml.dump_all([files, job], Dumper=_Dumper, sort_keys=False)
    return _comment(f"run_dir, data and models lie under {RUNS}. kubectl delete rayjob {name} ends the run.") + text


def _comment(*lines: str) -> str:
    return "".join(f"# {line}\n" for line in lines)
