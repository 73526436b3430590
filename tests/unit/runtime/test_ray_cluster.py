"""What has to be so before Ray is started; none is."""

import sys
import threading
from types import SimpleNamespace

import pytest

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.runtime import ray_cluster
from jax_agent_rl.runtime.ray_cluster import open_ray
from jax_agent_rl.utils.packages import install_command
from tests.messages import assert_message, raises

VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_ADDRESS")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


async def test_an_own_cluster_that_could_not_be_secured_is_not_started(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    with raises(
        ConfigError,
        fix=("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "before the program starts"),
    ):
        async with open_ray(None):
            raise AssertionError("it was started")


def never_answering_ray(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    ray = SimpleNamespace(
        is_initialized=lambda: False,
        init=lambda *_, **options: threading.Event().wait(),
        shutdown=lambda: None,
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", SimpleNamespace(RayError=OSError))
    monkeypatch.setattr(ray_cluster, "START_SECONDS", 0.01)
    return ray


@pytest.mark.parametrize("address", ["10.0.0.5:6379", None])
async def test_a_cluster_that_never_answers_is_named(monkeypatch: pytest.MonkeyPatch, address):
    for name in (*VARIABLES, "RAY_USAGE_STATS_ENABLED", "RAY_worker_niceness"):
        monkeypatch.setenv(name, "" if name == "RAY_ADDRESS" else "token")
    never_answering_ray(monkeypatch)
    with raises(ConfigError, key=address or "this machine", value="0.01 seconds"):
        async with open_ray(address):
            raise AssertionError("it answered")


async def test_a_cluster_that_never_ends_is_left(monkeypatch: pytest.MonkeyPatch, caplog):
    ray = never_answering_ray(monkeypatch)
    ray.init = lambda *_, **options: None
    ray.shutdown = threading.Event().wait
    async with open_ray("10.0.0.5:6379"):
        pass
    assert_message(caplog.text, key="10.0.0.5:6379", value="0.01 seconds")


async def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with raises(ConfigError, fix=install_command("ray")):
        async with open_ray("10.0.0.5:6379"):
            raise AssertionError("there is none")
