"""Where a rollout server takes weights from: files below its folder and uploads within limits, and
nothing else.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import xxhash

from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.rollout.http import weight_files, wire
from jax_agent_rl.rollout.http.weight_files import (
    MAX_UPLOADS,
    UPLOAD_TTL_SECONDS,
    SharedDir,
    Uploads,
)
from jax_agent_rl.rollout.protocol import Health, WeightUpdate
from jax_agent_rl.utils.files import make_temp_folder, remove_temp_folder
from tests.messages import raises
from tests.served import behind_server
from tests.toy_backend import ToyBackend

PAYLOADS = frozenset({"safetensors", "tensorstore"})


class Unasked(ToyBackend):
    """An engine that must not see an update."""

    async def update_weights(self, update: WeightUpdate) -> None:
        raise AssertionError(f"the engine was asked to open {update.payload}")


class Opening(ToyBackend):
    """An engine that notes which files it is to open."""

    def __init__(self, **capabilities: Any) -> None:
        super().__init__(**capabilities)
        self.opened: list[str] = []

    async def load(self, update: WeightUpdate) -> None:
        self.opened += update.payload
        await super().load(update)


async def ask(url: str, method: str, **arguments: Any) -> dict[str, Any]:
    """Call a server as a client that checks nothing would; return the last line of its answer."""
    headers = {wire.PROTOCOL_HEADER: str(wire.PROTOCOL_VERSION)}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{url}/v1/{method}", json=arguments) as response,
    ):
        text = await response.text()
    return json.loads(text.strip().splitlines()[-1])  # empty lines are heartbeats


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A weight folder, and around it what is not to be opened."""
    inside = tmp_path / "weights"
    (inside / "run").mkdir(parents=True)
    (inside / "run" / "v1.safetensors").write_text("other")
    (tmp_path / "secret.safetensors").write_text("secret")
    (inside / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    (inside / "folder").symlink_to(tmp_path)
    (inside / "run" / "notes.txt").write_text("notes")
    (inside / "run" / "d.safetensors").mkdir()
    os.mkfifo(inside / "run" / "pipe.safetensors")
    return inside


OUTSIDE = [
    "../secret.safetensors",
    "run/../../secret.safetensors",
    "link.safetensors",
    "folder/secret.safetensors",
    "run/pipe.safetensors",
    "run/d.safetensors",
    "run/notes.txt",
    "run/none.safetensors",
    "/etc/passwd",
    "/dev/zero.safetensors",
    "http://127.0.0.1:1/w.safetensors",
]


@pytest.mark.parametrize("path", OUTSIDE)
async def test_only_regular_weight_files_below_the_folder_are_opened(tree: Path, path: str):
    named = path if path.startswith(("/", "http")) else f"{tree}/{path}"
    digests = {Path(path).name: "xxh3_128:0"}
    async with behind_server(Unasked(weight_payloads=PAYLOADS), weight_dir=str(tree)) as (
        http,
        remote,
    ):
        async with asyncio.timeout(30):  # a pipe nobody writes to has no end
            files = [{"path": named, "size": 6}]
            answer = await ask(http.url, "needed_files", files=files, bases=[])
            assert answer["result"] == wire.WHOLE_FILES
            answer = await ask(
                http.url,
                "update_weights",
                version=1,
                kind="safetensors",
                paths=[named],
                digests=digests,
            )
        error = wire.decode_error(answer["error"])
        assert isinstance(error, WeightUpdateError)
        assert re.search(r"are not read|cannot be read|not a regular file", str(error))
        assert "digest" not in str(error)
        assert (await remote.health()).ok


async def test_files_of_the_folder_are_read_in_place(tree: Path):
    file = tree / "run" / "v1.safetensors"
    backend = Opening(weight_payloads=PAYLOADS)
    async with behind_server(backend, weight_dir=str(tree)) as (_, remote):
        await remote.update_weights(WeightUpdate(version=1, kind="safetensors", payload=[file]))
        assert remote.policy_version == 1
    assert backend.opened == [str(file)]


async def test_files_of_another_folder_are_uploaded_even_where_the_disk_is_shared(
    tree: Path, tmp_path: Path
):
    file = tmp_path / "elsewhere.safetensors"
    file.write_text("other")
    backend = Opening(weight_payloads=PAYLOADS)
    client = {"shares_disk": True}
    async with behind_server(backend, client=client, weight_dir=str(tree)) as (_, remote):
        await remote.update_weights(WeightUpdate(version=1, kind="safetensors", payload=[file]))
        assert remote.policy_version == 1
    (opened,) = backend.opened
    assert opened != str(file)
    assert Path(opened).name == file.name


async def test_without_a_folder_a_local_learners_memory_is_read():
    shared = SharedDir(None)
    if not Path("/dev/shm").is_dir():
        pytest.skip("no shared memory")
    for prefix, sees in (("jax_agent_rl-weights-", True), ("other-", False)):
        folder = make_temp_folder(prefix, Path("/dev/shm"))
        try:
            (folder / "v1.safetensors").write_text("other")
            assert await shared.sees({f"{folder}/v1.safetensors": 5}) is sees
        finally:
            remove_temp_folder(folder)


@pytest.mark.parametrize(
    ("folder", "address", "is_taken"),
    [
        ("gs://b/weights", "gs://b/weights/weights-0/v3/", True),
        ("gs://b/weights", "gs://b/weights2/v3/", False),
        ("gs://b/weights", "gs://other/v3/", False),
        ("gs://b/weights", "gs://b/weights/../secrets/", False),
        ("gs://b/weights", "gs://b/weights/%2e%2e/secrets/", False),
        ("gs://b/weights", "gs://b/weights/v1|zip:x", False),
        ("gs://b/weights", "s3://b/weights/v3/", False),
        ("gs://b/weights", "http://b/weights/v3/", False),
        ("gs://b/weights", "file:///b/weights/v3/", False),
        (None, "http://127.0.0.1:1/v3/", False),
        (None, "file:///etc/", False),
        ("{tree}", "file://{tree}/run/", True),
        ("{tree}", "{tree}/run", True),
        ("{tree}", "file://{tree}/folder/", False),
        ("{tree}", "{tree}/run/v1.safetensors", False),
        ("{tree}", "file:///etc/", False),
        ("{tree}", "http://127.0.0.1:1{tree}/run/", False),
    ],
)
async def test_an_address_is_below_the_configured_folder_or_bucket(
    tree: Path, folder, address, is_taken
):
    shared = SharedDir(folder and folder.format(tree=tree))
    address = address.format(tree=tree)
    if is_taken:
        assert await shared.address(address) == address
    else:
        with pytest.raises(
            WeightUpdateError, match=r"are not read: .*rollout\.weight_dir|cannot be read"
        ):
            await shared.address(address)


async def test_a_server_without_a_folder_declares_no_updates_through_one(tree: Path):
    for folder, declared in ((None, {"safetensors"}), (str(tree), PAYLOADS)):
        async with behind_server(ToyBackend(weight_payloads=PAYLOADS), weight_dir=folder) as (
            _,
            remote,
        ):
            assert remote.capabilities.weight_payloads == declared


async def test_health_is_answered_while_weights_are_loaded(tree: Path):
    loading = asyncio.Event()
    loaded = asyncio.Event()

    class Slow(ToyBackend):
        async def update_weights(self, update: WeightUpdate) -> None:
            loading.set()
            await loaded.wait()
            await super().update_weights(update)

        async def health(self) -> Health:
            if loading.is_set():
                await loaded.wait()
            return await super().health()

    async with behind_server(Slow(weight_payloads=PAYLOADS), weight_dir=str(tree)) as (_, remote):
        file = tree / "run" / "v1.safetensors"
        update = asyncio.create_task(
            remote.update_weights(WeightUpdate(version=1, kind="safetensors", payload=[str(file)]))
        )
        await loading.wait()
        async with asyncio.timeout(30):
            health = await remote.health()
        assert (health.ok, health.detail, health.policy_version) == (True, "taking weights", 0)
        loaded.set()
        await update
        assert (await remote.health()).policy_version == 1


# --- uploads --------------------------------------------------------------------------------------


async def blocks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


DIGEST = "xxh3_128:" + xxhash.xxh3_128_hexdigest(b"x")


async def test_all_uploads_together_have_a_limit_in_bytes_and_number(tmp_path: Path):
    uploads = Uploads(max_bytes=MAX_UPLOADS, folder=tmp_path)
    for number in range(MAX_UPLOADS):
        assert await uploads.receive(f"{number:016x}", "w.safetensors", DIGEST, blocks(b"x")) == 1
    with raises(WeightUpdateError, value="4 uploads"):
        await uploads.receive("f" * 16, "w.safetensors", DIGEST, blocks(b"x"))
    with raises(WeightUpdateError, value=("5 bytes", 4)):
        await uploads.receive("0" * 16, "v.safetensors", DIGEST, blocks(b"x"))
    uploads.drop(f"{1:016x}")
    assert await uploads.receive("e" * 16, "w.safetensors", DIGEST, blocks(b"x")) == 1
    uploads.close()


async def test_files_that_arrive_side_by_side_share_the_limit(tmp_path: Path):
    uploads = Uploads(max_bytes=3, folder=tmp_path)
    barrier = asyncio.Barrier(2)

    async def half() -> AsyncIterator[bytes]:
        yield b"x"
        await barrier.wait()
        yield b"x"

    results = await asyncio.gather(
        *(uploads.receive("0" * 16, f"{name}.safetensors", "", half()) for name in "ab"),
        return_exceptions=True,
    )
    assert any("more than the server's limit of 3" in str(error) for error in results)
    uploads.close()


async def test_what_nobody_uses_is_deleted_without_another_request(tmp_path: Path):
    now = [0.0]
    uploads = Uploads(max_bytes=9, folder=tmp_path, clock=lambda: now[0])
    await uploads.receive("0" * 16, "w.safetensors", DIGEST, blocks(b"x"))
    now[0] = UPLOAD_TTL_SECONDS - 1
    uploads.drop_expired()
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    now[0] = UPLOAD_TTL_SECONDS + 1
    sweeping = asyncio.create_task(uploads.sweep(every=0.0))
    async with asyncio.timeout(20):
        while list(tmp_path.rglob("*.safetensors")):
            await asyncio.sleep(0)
    sweeping.cancel()
    uploads.close()


async def test_a_sender_that_falls_silent_leaves_nothing(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(weight_files, "UPLOAD_TIMEOUT_SECONDS", 0.05)
    uploads = Uploads(max_bytes=9, folder=tmp_path)

    async def stalled() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await uploads.receive("0" * 16, "w.safetensors", DIGEST, stalled())
    assert list(tmp_path.rglob("*.safetensors")) == []
    uploads.close()


async def test_without_a_setting_uploads_leave_half_of_the_free_memory(tmp_path: Path, monkeypatch):
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(weight_files.shutil, "disk_usage", lambda _: usage)
    uploads = Uploads(folder=tmp_path)
    with raises(WeightUpdateError, value=("6 bytes", 5)):
        await uploads.receive("0" * 16, "w.safetensors", "", blocks(b"xxxxxx"))
    uploads.close()
