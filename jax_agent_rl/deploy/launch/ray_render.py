"""Clusters as text: a file for ``ray up`` over hosts with ssh, and a RayJob for KubeRay. See ``launch/templates``."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jax_agent_rl.config import Config
from jax_agent_rl.deploy.launch import ray_job
from jax_agent_rl.errors import LaunchError


def cluster_file(hosts: Sequence[str], *, root: Path, venv: str, device: str) -> str:
    """Return a cluster file for ``ray up``.

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
    (user,) = users
    return _render("ray_cluster", root, head=head, workers=workers, user=user, root=str(root), venv=venv, device=device)


def ray_job_manifest(options: argparse.Namespace, config: Config, arguments: Sequence[str], *, root: Path) -> str:
    """Return a ConfigMap with the configuration's file and a RayJob that runs it, for ``kubectl apply``.

    Args:
        options: of the command line: ``config``, ``image``, ``claim``, ``nodes``, ``gpus_per_node``, ``device``.
        config: the configuration.
        arguments: of the driver, without the configuration.
        root: the project's folder.

    Raises:
        LaunchError: the run folder would end with its pod.
    """
    if not config.run_dir.startswith("/runs/"):
        raise LaunchError(f"run_dir={config.run_dir} ends with its pod; set it to a folder of /runs, e.g. /runs/my")
    python, job = "/opt/venv/bin/python", "jax-agent-rl"  # of docker/gpu.Dockerfile, as /app is
    return _render(
        "kuberay",
        root,
        config=options.config.read_text(),
        entrypoint=ray_job.entrypoint("/app", python, job, ["--config=/config/run.yaml", *arguments]),
        runtime_env=ray_job.runtime_env("/app"),
        image=options.image,
        claim=options.claim,
        nodes=options.nodes,
        gpus=options.gpus_per_node if options.device == "cuda" else 0,
        ray_version=version("ray"),
    )


def _render(template: str, folder: Path, **values: Any) -> str:
    import jinja2

    loader = jinja2.FileSystemLoader(folder / "launch" / "templates")
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters |= {"quoted": shlex.quote, "json": json.dumps}
    return environment.get_template(f"{template}.yaml.j2").render(values)
