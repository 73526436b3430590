"""New weights from a learner through each transport, over HTTP, into an engine."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from jax_agent_rl.config import build
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.engine import EngineShapes
from jax_agent_rl.models import stored
from jax_agent_rl.models.config import Params
from jax_agent_rl.rollout.http.client import RemoteBackend
from jax_agent_rl.rollout.http.server import RolloutServer
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.runtime.publishers import make_publisher
from jax_agent_rl.types import SamplingParams
from tests.tiny import TINY, greedy, tiny_params

SHAPES = EngineShapes(
    max_model_len=32, max_concurrent_decodes=2, kv_cache_tokens=64, decode_steps=4, prefill_buckets=(8,)
)
PROMPT = (5, 6, 7)


def configured(**rollout):
    rollout = {"backend": "remote", "urls": ["http://127.0.0.1:1"]} | rollout
    return build({"run_dir": "x", "model": {"path": "x"}, "data": {"train": "x"}, "rollout": rollout})


@dataclass
class Parameters:
    """A learner that has been trained."""

    params: Params

    def store(self, folder: str) -> str:
        stored.write_part(folder, self.params, part=0)
        return stored.publish(folder, parts=1)


@pytest.mark.parametrize("transport", ["files", "tensorstore"])
async def test_what_a_learner_publishes_a_remote_engine_serves(tmp_path: Path, transport: str):
    config = configured(weight_dir=str(tmp_path), weight_transport=transport)
    publisher = make_publisher(config, TINY, probe_ids=[3, 4, 5])
    backend = JetStreamBackend(TINY, tiny_params(), SHAPES, version=-1)
    await backend.start()
    server = RolloutServer(backend, weight_dir=str(tmp_path))
    await server.start()
    remote = RemoteBackend(server.url, shares_disk=True)
    await remote.start()
    try:
        for version in range(3):
            update = publisher.make(Parameters(tiny_params(version)), version)
            assert update.lasting and update.digests
            await remote.update_weights(update)
            sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
            request = GenerateRequest(request_id=f"r{version}", prompt_ids=PROMPT, sampling=sampling)
            output = await remote.generate(request)
            assert list(output.token_ids) == greedy(tiny_params(version), PROMPT, 6, frozenset())
            (kept,) = tmp_path.iterdir()
            assert {path.name[:2] for path in kept.iterdir()} == {f"v{version}"}, "the one before is removed"
        publisher.close()
        assert not list(tmp_path.iterdir())
    finally:
        await remote.close()
        await server.close()
        await backend.close()


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"weight_transport": "tensorstore"}, "rollout.weight_dir=None: .*; set rollout.weight_dir"),
        (
            {"weight_transport": "tensorstore", "weight_dir": "/x", "backend": "jetstream", "urls": []},
            "tensorstore with rollout.backend=jetstream",
        ),
        ({"weight_dir": "gs://bucket/weights"}, "gs://bucket/weights is no folder .*=tensorstore"),
    ],
)
def test_a_transport_that_cannot_reach_the_engines_is_refused(rollout: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        configured(**rollout)
