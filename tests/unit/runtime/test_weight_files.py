"""Weight files on their way to an engine: what is not what the learner wrote is refused, and the
old weights serve.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.runtime.transports import FileTransport
from jax_agent_rl.types import SamplingParams
from tests.tiny import TINY, TWO_SLOTS, greedy, tiny_params

PROMPT = (5, 6, 7)


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-64])


def swap(file: Path) -> None:
    other_file = next(f for f in file.parent.iterdir() if f != file)
    ours = file.read_bytes()
    shutil.copy(other_file, file)
    other_file.write_bytes(ours)


def leave_stale(file: Path) -> None:
    shutil.copytree(file.parent.parent / "before", file.parent, dirs_exist_ok=True)


async def test_files_the_learner_did_not_write_are_refused(
    tmp_path: Path,
):
    files = FileTransport(TINY, probe_ids=[[3, 4, 5]], folder=tmp_path, shard_bytes=20000)
    folder = next(tmp_path.iterdir())
    files.write(tiny_params(2), 1)
    shutil.copytree(folder, tmp_path / "before")
    for file in (tmp_path / "before").iterdir():  # the old weights under the new names
        file.rename(file.with_name(file.name.replace("v1-", "v2-")))
    update = files.write(tiny_params(1), 2)
    paths = update.payload
    assert len(paths) > 1 and not list(folder.glob("*.incomplete"))
    shutil.copytree(folder, tmp_path / "whole")
    backend = JetStreamBackend(TINY, tiny_params(), TWO_SLOTS)
    await backend.start()
    try:
        spoils: list[Callable[[Path], None]] = [damage, truncate, swap, leave_stale, Path.unlink]
        for spoil in spoils:
            spoil(Path(paths[0]))
            with pytest.raises(WeightUpdateError, match=r"v2-00000\.safetensors"):
                await backend.update_weights(update)
            assert await said(backend, spoil.__name__) == greedy(
                tiny_params(), PROMPT, 6, frozenset()
            )
            shutil.copytree(tmp_path / "whole", folder, dirs_exist_ok=True)
        with pytest.raises(WeightUpdateError, match="digests of"):
            await backend.update_weights(replace(update, payload=paths[1:]))
        await backend.update_weights(update)
        assert await said(backend, "new") == greedy(tiny_params(1), PROMPT, 6, frozenset())
    finally:
        await backend.close()


async def said(backend: JetStreamBackend, name: str) -> list[int]:
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    output = await backend.generate(
        GenerateRequest(request_id=name, prompt_ids=PROMPT, sampling=sampling)
    )
    return list(output.token_ids)
