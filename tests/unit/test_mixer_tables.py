"""Every table of mixers and of feed-forward networks has all of them."""

from collections.abc import Mapping
from typing import Any, get_args

import pytest

from jax_agent_rl.deploy.plan.model_flops import MIXING_FLOPS
from jax_agent_rl.jetstream.feed_forward import ENGINE_FEED_FORWARDS
from jax_agent_rl.jetstream.mixers.table import ENGINE_MIXERS
from jax_agent_rl.models.feed_forward import FEED_FORWARDS
from jax_agent_rl.models.layer_kinds import FeedForwardName, MixerName
from jax_agent_rl.models.mixers.table import MIXERS
from jax_agent_rl.runtime.engine_devices import POSITION_BYTES


@pytest.mark.parametrize(
    "table",
    [
        pytest.param(MIXERS, id="learner"),
        pytest.param(ENGINE_MIXERS, id="engine"),
        pytest.param(POSITION_BYTES, id="bytes of a position"),
        pytest.param(MIXING_FLOPS, id="operations"),
    ],
)
def test_a_table_has_all_mixers(table: Mapping[MixerName, Any]):
    assert set(table) == set(get_args(MixerName))


@pytest.mark.parametrize(
    "table",
    [
        pytest.param(FEED_FORWARDS, id="learner"),
        pytest.param(ENGINE_FEED_FORWARDS, id="engine"),
    ],
)
def test_a_table_has_all_feed_forward_networks(table: Mapping[FeedForwardName, Any]):
    assert set(table) == set(get_args(FeedForwardName))
