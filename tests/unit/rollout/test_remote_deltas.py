"""What changed since the version before, over HTTP to a server: the files its engine opens are the
learner's.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.rollout.http.client import RemoteBackend
from jax_agent_rl.rollout.http.server import RolloutServer
from jax_agent_rl.rollout.protocol import WeightUpdate
from jax_agent_rl.runtime.transports import FileTransport
from jax_agent_rl.utils.weight_deltas import delta_path
from jax_agent_rl.utils.weight_transfer import check_files
from tests.served import Upload, note_uploads
from tests.tiny import TINY, tiny_params
from tests.toy_backend import ToyBackend


class Reader(ToyBackend):
    """An engine that reads what it is given, as a real one does."""

    refuses = False

    def __init__(self) -> None:
        super().__init__(weight_payloads=frozenset({"safetensors"}))
        self.contents: list[bytes] = []

    async def load(self, update: WeightUpdate) -> None:
        check_files(update.payload, update.digests)
        if self.refuses:
            raise WeightUpdateError("a probe differs")
        self.contents = [Path(path).read_bytes() for path in update.payload]


class Learner:
    """Takes small steps in bfloat16."""

    def __init__(self, folder: Path, *, full_every: int = 100) -> None:
        self.params = tiny_params()
        self.files = FileTransport(
            TINY,
            probe_ids=[[3, 4, 5]],
            folder=folder,
            full_every=full_every,
            shard_bytes=20000,
        )
        self.version = 0

    def publish(self) -> WeightUpdate:
        self.version += 1
        key = jax.random.key(self.version)
        self.params = jax.tree.map(
            lambda x: x * jnp.where(jax.random.uniform(key, x.shape) < 0.01, 1.01, 1.0), self.params
        )
        return self.files.write(self.params, self.version, dtype="bfloat16")


class Client:
    """The connection to a server on another machine, which counts what it receives."""

    def __init__(self, remote: RemoteBackend, uploads: list[Upload]) -> None:
        self.remote = remote
        self._uploads = uploads

    async def send(self, update: WeightUpdate) -> int:
        """Send an update; return the bytes it took."""
        num_earlier = len(self._uploads)
        await self.remote.update_weights(update)
        return sum(upload.size for upload in self._uploads[num_earlier:])


@contextlib.asynccontextmanager
async def serving(backend: Reader, upload_folder: Path) -> AsyncIterator[Client]:
    await backend.start()
    server = RolloutServer(backend, upload_folder=upload_folder)
    uploads = note_uploads(server)
    await server.start()
    remote = RemoteBackend(server.url, shares_disk=False)
    try:
        await remote.start()
        yield Client(remote, uploads)
    finally:
        await remote.close()
        await server.close()
        await backend.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "learner").mkdir()
    (tmp_path / "server").mkdir()
    return tmp_path


def whole(update: WeightUpdate) -> int:
    return sum(Path(path).stat().st_size for path in update.payload)


async def test_changes_follow_the_first_version(folder: Path):
    learner = Learner(folder / "learner")
    backend = Reader()
    async with serving(backend, folder / "server") as client:
        first = learner.publish()
        assert first.deltas == {}
        assert await client.send(first) == whole(first)
        for _ in range(3):
            update = learner.publish()
            assert await client.send(update) < 0.4 * whole(update), (
                "small files: headers and the probe count"
            )
            assert backend.contents == [Path(path).read_bytes() for path in update.payload]
            assert len(backend.contents) > 1
            names = sorted(file.name for file in (folder / "server").rglob("*.safetensors"))
            assert names == sorted(Path(path).name for path in update.payload), (
                "one version is kept"
            )
            assert client.remote.policy_version == update.version
    assert not list((folder / "server").rglob("*.safetensors"))


async def test_every_so_many_versions_all_is_sent(folder: Path):
    learner = Learner(folder / "learner", full_every=3)
    async with serving(Reader(), folder / "server") as client:
        is_whole = []
        for _ in range(7):
            update = learner.publish()
            is_whole.append(await client.send(update) == whole(update))
        assert is_whole == [True, False, False, True, False, False, True]


async def test_a_server_that_missed_a_version_gets_all_of_the_next(folder: Path):
    learner = Learner(folder / "learner")
    backend = Reader()
    async with serving(backend, folder / "server") as client:
        await client.send(learner.publish())
        learner.publish()
        update = learner.publish()
        assert update.deltas
        assert await client.send(update) == whole(update)
        assert backend.contents == [Path(path).read_bytes() for path in update.payload]
        update = learner.publish()
        assert await client.send(update) < whole(update), "then changes again"


async def test_a_result_with_another_digest_is_not_served_and_all_is_sent(folder: Path):
    learner = Learner(folder / "learner")
    backend = Reader()
    async with serving(backend, folder / "server") as client:
        await client.send(learner.publish())
        kept_file = sorted((folder / "server").rglob("*.safetensors"))[0]
        content = bytearray(kept_file.read_bytes())
        content[-5] ^= 1  # a bit of the server's copy flips between two updates
        kept_file.write_bytes(content)
        update = learner.publish()
        size = await client.send(update)
        file = Path(update.payload[0])
        resent_size = delta_path(file).stat().st_size + file.stat().st_size
        other_sizes = [Path(delta).stat().st_size for delta in update.deltas or {}][1:]
        assert size == resent_size + sum(other_sizes), "its changes in vain, then this file"
        assert backend.contents == [Path(path).read_bytes() for path in update.payload]


async def test_what_an_engine_refuses_is_not_the_base_of_the_next_delta(folder: Path):
    learner = Learner(folder / "learner")
    backend = Reader()
    async with serving(backend, folder / "server") as client:
        await client.send(learner.publish())
        backend.refuses = True
        with pytest.raises(WeightUpdateError, match="a probe differs"):
            await client.send(learner.publish())
        assert not list((folder / "server").rglob("*.safetensors"))
        backend.refuses = False
        update = learner.publish()
        assert await client.send(update) == whole(update)


async def test_a_learner_that_sends_no_deltas_leaves_nothing_on_the_server(folder: Path):
    learner = Learner(folder / "learner", full_every=1)
    async with serving(Reader(), folder / "server") as client:
        update = learner.publish()
        assert update.deltas is None
        assert await client.send(update) == whole(update)
        assert not list((folder / "server").rglob("*.safetensors"))
