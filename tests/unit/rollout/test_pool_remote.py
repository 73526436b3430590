"""A client over real rollout servers on loopback, one of which is killed and started again."""

import asyncio
import functools
from pathlib import Path

from jax_agent_rl.errors import ConfigError, EngineDiedError
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.http.client import RemoteBackend
from jax_agent_rl.rollout.http.server import RolloutServer
from jax_agent_rl.rollout.protocol import WeightUpdate
from jax_agent_rl.types import PauseMode, SamplingParams
from jax_agent_rl.utils.fingerprints import read_fingerprint
from tests.messages import raises
from tests.toy_backend import ToyBackend, to_text


class Engine(ToyBackend):
    """Notes the version of the weights at every request."""

    def __init__(self):
        super().__init__(
            tick_seconds=0.002, max_concurrent=64, weight_payloads=frozenset({"safetensors"})
        )
        self.asked = []

    def stream(self, request):
        self.asked.append(self.policy_version)
        return super().stream(request)


class Host:
    """A rollout server that can be killed and started again on its port."""

    port = 0

    async def start(self):
        self.engine = Engine()
        await self.engine.start()
        self.server = RolloutServer(self.engine, port=self.port, heartbeat_seconds=0.2)
        await self.server.start()
        self.url = self.server.url
        self.port = int(self.server.url.rsplit(":", 1)[1])

    async def kill(self):
        await self.server.close()
        await self.engine.close()


async def test_a_restarted_server_comes_back_with_the_served_weights(
    tmp_path: Path,
):
    file = tmp_path / "w.safetensors"
    file.write_text("other")
    hosts = [Host(), Host()]
    await asyncio.gather(*(host.start() for host in hosts))
    client = LLMServerClient(
        decode_text=to_text,
        wait_for_server_seconds=120.0,
        recovery_seconds=120.0,
        stall_seconds=60.0,
    )
    try:
        await client.pool.start(
            {
                host.url: functools.partial(RemoteBackend, host.url, start_seconds=0)
                for host in hosts
            }
        )
        update = WeightUpdate(version=1, kind="safetensors", payload=[str(file)], lasting=True)
        await client.pool.update_weights(update)

        def ask(name, **fields):
            sampling = SamplingParams(max_tokens=100, seed=7, temperature=1.0, ignore_eos=True)
            return asyncio.ensure_future(
                client.generate(name, prompt_ids=[5, 6, 7], sampling_params=sampling, **fields)
            )

        heard = []
        tasks = [ask("plain"), ask("other"), ask("streamed", on_ids=heard.extend)]
        while len(heard) < 3:
            await asyncio.sleep(0.001)
        for host in hosts:  # both: requests wait for the first to come back
            await host.engine.pause(PauseMode.KEEP)
        await asyncio.gather(*(host.kill() for host in hosts))
        await hosts[0].start()
        outputs = await asyncio.gather(*tasks)
        assert len({output.token_ids for output in outputs}) == 1, (
            "keyed by seed and position: whoever sampled them"
        )
        assert {len(output.token_ids) for output in outputs} == {100}
        assert tuple(heard) == outputs[2].token_ids, (
            "what was streamed stands, and nothing is streamed twice"
        )
        assert set(hosts[0].engine.asked) == {1}, "no request before the weights"
        stats = client.stats()
        assert (stats.servers_up, stats.servers_lost, stats.servers_joined, stats.stale_served) == (
            1,
            2,
            1,
            0,
        )
        await hosts[1].start()
        while len(client.pool.servers) < 2:
            await asyncio.sleep(0.01)
        assert hosts[1].engine.policy_version == 1
    finally:
        await client.pool.close()
        for host in hosts:
            await host.kill()


def weights(folder: Path, version: int, content: str) -> WeightUpdate:
    """An update with a file of this content."""
    file = folder / f"v{version}-{content}.safetensors"
    file.write_text(content)
    digests = {file.name: read_fingerprint(file)}
    return WeightUpdate(version=version, kind="safetensors", payload=[str(file)], digests=digests)


async def test_a_server_of_another_run_waits_for_our_weights(
    tmp_path: Path,
):
    """A run was rewound and has written version 2 again; one server still has the abandoned one."""
    hosts = [Host(), Host()]
    await asyncio.gather(*(host.start() for host in hosts))
    client = LLMServerClient(decode_text=to_text)
    try:
        stranger = RemoteBackend(hosts[1].url)
        await stranger.start()
        await stranger.update_weights(weights(tmp_path, 2, "other"))
        await stranger.close()
        await client.pool.start({"ours": functools.partial(RemoteBackend, hosts[0].url)})
        await client.pool.update_weights(weights(tmp_path, 2, "base"))
        joining = asyncio.ensure_future(
            client.pool.join("other", functools.partial(RemoteBackend, hosts[1].url))
        )
        while len(client.pool.backends) < 2:
            await asyncio.sleep(0.001)
        assert [server.name for server in client.pool.servers] == ["ours"]
        await client.pool.update_weights(weights(tmp_path, 3, "base"))
        await joining
        assert {server.name for server in client.pool.servers} == {"ours", "other"}
        assert [host.engine.policy_version for host in hosts] == [3, 3]
    finally:
        await client.pool.close()
        for host in hosts:
            await host.kill()


async def test_servers_of_one_version_need_the_same_weights(
    tmp_path: Path,
):
    hosts = [Host(), Host()]
    await asyncio.gather(*(host.start() for host in hosts))
    client = LLMServerClient(decode_text=to_text)
    try:
        for host, content in zip(hosts, ("base", "other"), strict=True):
            backend = RemoteBackend(host.url)
            await backend.start()
            await backend.update_weights(weights(tmp_path, 2, content))
            await backend.close()
        with raises(ConfigError, key="different weights", value="version 2"):
            await client.pool.start(
                {host.url: functools.partial(RemoteBackend, host.url) for host in hosts}
            )
    finally:
        await client.pool.close()
        for host in hosts:
            await host.kill()


async def test_a_server_that_cannot_be_reached_at_the_start_is_an_error_at_once():
    client = LLMServerClient(recovery_seconds=30.0)
    with raises(EngineDiedError, key="http://127.0.0.1:9", value="gone"):
        await client.pool.start(
            {"nobody": lambda: RemoteBackend("http://127.0.0.1:9", start_seconds=0)}
        )
    await client.pool.close()
