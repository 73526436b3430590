"""Trials in environments of cloud providers, whose own SDKs talk to servers of their formats."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("harbor")
pytest.importorskip("daytona")
pytest.importorskip("e2b")
pytest.importorskip("kubernetes")
pytest.importorskip("modal")

from harbor.environments import gke as harbor_gke
from harbor.environments.daytona import environment as harbor_daytona
from kubernetes.config import kube_config
from tenacity import wait_none

from jax_agent_rl.errors import DropReason, EnvironmentFailedError, EnvironmentTimeoutError
from jax_agent_rl.tool_server.sandbox.limits import process_tree
from jax_agent_rl.types import Trajectory
from tests.capabilities import needs_bwrap
from tests.cloud_providers.daytona import DaytonaServer
from tests.cloud_providers.e2b import E2BServer
from tests.cloud_providers.gke import GKEServer
from tests.cloud_providers.machine import CloudServer
from tests.cloud_providers.modal import ModalServer
from tests.harbor_harnesses import play, write_task
from tests.messages import raises

pytestmark = [pytest.mark.harbor, needs_bwrap]
IMAGE = '[environment]\ndocker_image = "debian:12"\nworkdir = "/work"\n'
TEST_SH = (
    'test "$(cat /work/answer.txt)" = 77 && reward=1 || reward=0\n'
    "ls /tests\necho $reward > /logs/verifier/reward.txt\n"
)
SOLVES = ["ls; pwd", "echo 77 > answer.txt", "done"]


@pytest.fixture(
    params=[DaytonaServer, E2BServer, GKEServer, ModalServer], ids=lambda server: server.name
)
async def cloud(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[CloudServer]:
    server = request.param(tmp_path / "machines")
    children = process_tree(os.getpid())
    async with server.running() as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        # It keeps the address of its first cluster, and what a variable was when it was imported.
        monkeypatch.setattr(harbor_gke.KubernetesClientManager, "_instance", None)
        location = variables.get("KUBECONFIG")
        monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", location)
        # Harbor tries for a minute to read the logs of a pod that is not there.
        for transfer in ("download_dir", "download_file", "upload_dir", "upload_file"):
            retrying = getattr(harbor_gke.GKEEnvironment, transfer).retry
            monkeypatch.setattr(retrying, "wait", wait_none())
        try:
            yield server
        finally:
            manager = harbor_daytona.DaytonaClientManager
            await (await manager.get_instance())._cleanup()
            monkeypatch.setattr(manager, "_instance", None)
    assert server.machines == {}
    assert process_tree(os.getpid()) <= children


async def play_there(
    cloud: Any, tmp_path: Path, script: list[str], settings: str = ""
) -> tuple[Trajectory, dict[str, Any]]:
    task = write_task(tmp_path / "task", settings=IMAGE + settings, test_sh=TEST_SH)
    if not cloud.needs_dockerfile:
        (task / "environment" / "Dockerfile").unlink()
    return await play(
        script, task, environment=cloud.name, environment_options=cloud.environment_options
    )


async def test_a_trial_runs_there_from_its_start_to_its_reward(cloud: CloudServer, tmp_path: Path):
    trajectory, output = await play_there(cloud, tmp_path, SOLVES)
    assert trajectory.num_turns == 3
    assert "/work" in trajectory.messages[2]["content"]
    assert output["reward"] == 1.0
    assert "check.py" in output["verifier"]
    assert cloud.created == 1


async def test_a_wrong_answer_there_earns_nothing(cloud: CloudServer, tmp_path: Path):
    _, output = await play_there(cloud, tmp_path, ["echo 8 > answer.txt", "done"])
    assert output["reward"] == 0.0


@pytest.mark.parametrize("status", [429, 500])
async def test_a_provider_that_refuses_drops_the_trajectory(
    cloud: CloudServer, tmp_path: Path, status: int
):
    cloud.create_status = status
    reason = DropReason.ENVIRONMENT_ERROR
    settings = ""
    if cloud.name == "daytona" and status == 429:
        # Its environment waits a minute and more before it asks again.
        reason = DropReason.ENVIRONMENT_TIMEOUT
        settings = "build_timeout_sec = 3.0\n"
    with pytest.raises(EnvironmentFailedError) as caught:
        await play_there(cloud, tmp_path, SOLVES, settings)
    assert caught.value.drop_reason is reason
    assert cloud.create_requests >= 1
    assert cloud.created == 0


async def test_a_creation_without_an_answer_drops_the_trajectory_and_leaves_no_machine(
    cloud: CloudServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cloud.answers_creations = False
    monkeypatch.setattr(harbor_daytona, "_CANCELLED_CREATE_GRACE_SEC", 0.1)
    with pytest.raises(EnvironmentTimeoutError):
        await play_there(cloud, tmp_path, SOLVES, "build_timeout_sec = 2.0\n")
    assert cloud.create_requests == 1


async def test_a_machine_that_ends_in_the_middle_drops_the_trajectory(
    cloud: CloudServer, tmp_path: Path
):
    cloud.dies_at = "echo 77"
    with raises(EnvironmentFailedError, key="the environment ended while the harness ran"):
        await play_there(cloud, tmp_path, SOLVES)
    assert cloud.created == 1
