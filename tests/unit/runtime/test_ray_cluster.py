"""What has to be so before Ray is started; none is."""

import sys
from types import SimpleNamespace

import pytest

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.runtime.ray_cluster import open_ray

VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_ADDRESS")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


async def test_an_own_cluster_that_could_not_be_secured_is_not_started(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    with pytest.raises(ConfigError, match="set RAY_AUTH_MODE, RAY_AUTH_TOKEN, RAY_ENABLE_.* before the program starts"):
        async with open_ray(None):
            raise AssertionError("it was started")


async def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'jax_agent_rl\[ray\]'"):
        async with open_ray("10.0.0.5:6379"):
            raise AssertionError("there is none")
