"""Training on restricted draws is refused where an engine does not say what it drew from."""

import pytest

from jax_agent_rl.config import build
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.runtime.build import require_replay
from jax_agent_rl.runtime.rollouts import require_grammars
from tests.messages import raises
from tests.toy_backend import ToyBackend

MINIMAL = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}}
CALLS = ["agent.constrain_tool_calls=true", "agent.default_agent=tool_agent"]


def server(**capabilities) -> AsyncServer:
    return AsyncServer(ToyBackend(**capabilities))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["rollout.top_p=0.9"], "top_p=0.9"),
        (["rollout.min_p=0.1"], "min_p=0.1"),
        (CALLS, "constrain_tool_calls=true"),
    ],
)
async def test_an_engine_without_replay_is_refused_by_the_key_that_needs_it(overrides, named):
    config = build(MINIMAL, overrides)
    require_replay(config, server())
    with raises(ConfigError, key=named, value="report which ids"):
        require_replay(config, server(sampling_replay=False))


async def test_sampling_from_all_ids_needs_no_replay():
    require_replay(build(MINIMAL), server(sampling_replay=False))


async def test_constrained_calls_need_an_engine_that_follows_grammars():
    config = build(MINIMAL, CALLS)
    require_grammars(config, server(grammars=True))
    with pytest.raises(ConfigError, match="cannot follow grammars"):
        require_grammars(config, server())


def test_a_deterministic_run_refuses_restricted_sampling_before_it_starts():
    with raises(ConfigError, key=("rollout.deterministic", "rollout.top_p"), value=0.9):
        build(MINIMAL, ["rollout.deterministic=true", "rollout.top_p=0.9"])
