"""One process of a run whose every process samples, for ``test_multihost_engines``: a configuration
and overrides.

Process 0 prints, for every version and engine, what was sampled and the log-probs a plain forward
pass gives it.
"""

import asyncio
import functools
import json
import sys
import time
from typing import Any

from jax_agent_rl.config import Config, load
from jax_agent_rl.jetstream.weights import JointLoader
from jax_agent_rl.models.hf import load_config
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.protocol import GenerateRequest, WeightUpdate
from jax_agent_rl.rollout.transport import WeightSource, WeightTransport
from jax_agent_rl.runtime import multihost_engines
from jax_agent_rl.runtime.build import follow_run, make_learner
from jax_agent_rl.runtime.multihost import initialize, leading
from jax_agent_rl.runtime.multihost_engines import join_hosts, make_host_engine, make_host_transport
from jax_agent_rl.types import SamplingParams
from tests.tiny import logprobs_of
from tests.trajectories import random_groups

PROMPT = (5, 6, 7, 8)
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


class LateLoader(JointLoader):
    """Returns the weights one second late, when process 0 has long had its own."""

    def __call__(self, params: Any, old: Any) -> Any:
        loaded = super().__call__(params, old)
        time.sleep(1)
        return loaded


async def lead(config: Config) -> None:
    model = load_config(config.model.path)
    with leading() as channel:
        learner = make_learner(config, model, channel=channel)
        transport = make_host_transport(config)
        client = LLMServerClient(decode_text=str)
        try:
            await client.pool.start(
                {"host-0": functools.partial(make_host_engine, config, transport)}
            )
            await join_hosts(client)
            for version in range(2):
                if version:
                    learner.update(random_groups(version, vocabulary=400))
                await publish(client, transport, learner, version)
                await show(client, learner, version)
        finally:
            await client.pool.close()


async def publish(
    client: LLMServerClient, transport: WeightTransport, learner: WeightSource, version: int
) -> None:
    async def offer() -> WeightUpdate:
        return await asyncio.to_thread(transport.offer, learner, version)

    await client.pool.update_weights_in_place(offer)


async def show(client: LLMServerClient, learner: WeightSource, version: int) -> None:
    for server in client.pool.servers:
        requests = (
            GenerateRequest(request_id=f"v{version}-{i}", prompt_ids=PROMPT, sampling=GREEDY)
            for i in range(2)
        )
        output, other_output = await asyncio.gather(
            *map(server.generate, requests)
        )  # by each engine, if there are two
        line = {
            "server": server.name,
            "versions": sorted({*output.policy_versions, *other_output.policy_versions}),
        }
        line |= {"found": output.log_probs, "other": other_output.log_probs}
        line["expected"] = logprobs_of(learner.params, PROMPT, output.token_ids).tolist()
        line["recompilations"] = (await server.backend.metrics()).recompilations
        print(json.dumps(line), flush=True)


def main() -> None:
    config = load(sys.argv[1], sys.argv[2:])
    if initialize(config.learner.multihost):
        multihost_engines.JointLoader = LateLoader
        follow_run(config)
    else:
        asyncio.run(lead(config))


if __name__ == "__main__":
    main()
