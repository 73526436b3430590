"""Weights with right bytes that are nevertheless wrong: found by a canary's log-probs before they
are served.

SkyRL #1816 had right bytes under wrong names; Tunix #2096 sampled from weights that were never
written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.models import stored
from jax_agent_rl.models.config import Params
from jax_agent_rl.models.decoder import score_probe
from jax_agent_rl.rollout.protocol import GenerateRequest, WeightUpdate
from jax_agent_rl.rollout.transport import from_object_store, store
from jax_agent_rl.runtime.transports import FileTransport
from jax_agent_rl.types import SamplingParams
from tests.messages import raises
from tests.served import behind_server
from tests.tiny import TINY, TWO_SLOTS, greedy, tiny_params

PROMPT = (5, 6, 7)
CANARY = [[3, 4, 5, 9, 11, 2, 40, 41]]
SERVED = 0
NEW = 1


def rename(params: Params) -> Params:
    """Two tensors of one shape under each other's names."""
    layers = params["layers"]
    return params | {"layers": layers | {"gate": layers["up"], "up": layers["gate"]}}


def move_layers(params: Params) -> Params:
    """Every layer under the name of the next."""
    return params | {"layers": jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), params["layers"])}


def forget(params: Params) -> Params:
    """Nothing was ever written."""
    return jax.tree.map(jnp.zeros_like, params)


def keep_one(params: Params) -> Params:
    """One tensor is that of the version before."""
    return params | {"layers": params["layers"] | {"o": tiny_params(SERVED)["layers"]["o"]}}


def break_one(params: Params) -> Params:
    return params | {"final_norm": params["final_norm"].at[0].set(jnp.nan)}


FAULTS = [rename, move_layers, forget, keep_one, break_one]


class Paths:
    """Each path by which an engine of another process takes weights."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def files(self, params: Params, version: int) -> WeightUpdate:
        files = FileTransport(TINY, probe_ids=CANARY, folder=self._folder)
        return replace(files.write(params, version), probe=canary())

    def tensorstore(self, params: Params, version: int) -> WeightUpdate:
        folder = stored.version_folder(str(self._folder), version)
        digests = {stored.MANIFEST: stored.store(folder, params)}
        return WeightUpdate(
            version=version, kind="tensorstore", payload=folder, digests=digests, probe=canary()
        )

    def object_store(self, params: Params, version: int) -> WeightUpdate:
        arrays = WeightUpdate(version=version, kind="arrays", payload=params, probe=canary())
        return store(arrays, lambda contents: SimpleNamespace(contents=contents))


def canary():
    return score_probe(TINY, tiny_params(NEW), CANARY)


async def get(reference: SimpleNamespace):
    return reference.contents


async def served(backend) -> list[int]:
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    output = await backend.generate(
        GenerateRequest(request_id="r", prompt_ids=PROMPT, sampling=sampling)
    )
    return list(output.token_ids)


@pytest.mark.parametrize("path", ["files", "tensorstore", "object_store"])
async def test_wrong_weights_with_right_digests_are_refused(tmp_path: Path, path: str):
    engine = JetStreamBackend(TINY, tiny_params(SERVED), TWO_SLOTS)
    make: Callable[[Params, int], WeightUpdate] = getattr(Paths(tmp_path), path)
    async with behind_server(engine, weight_dir=str(tmp_path)) as (_, remote):
        backend = from_object_store(engine, get=get) if path == "object_store" else remote
        for version, fault in enumerate(FAULTS, start=1):
            with raises(WeightUpdateError, value="the learner's log-probs"):
                await backend.update_weights(make(fault(tiny_params(NEW)), version))
            assert await served(backend) == greedy(tiny_params(SERVED), PROMPT, 6, frozenset()), (
                fault.__name__
            )
            assert engine.policy_version == 0
        await backend.update_weights(make(tiny_params(NEW), len(FAULTS)))
        assert await served(backend) == greedy(tiny_params(NEW), PROMPT, 6, frozenset())


async def test_missing_extra_and_misshapen_tensors_are_refused_by_name(tmp_path: Path):
    engine = JetStreamBackend(TINY, tiny_params(SERVED), TWO_SLOTS)
    await engine.start()
    right = WeightUpdate(version=1, kind="arrays", payload=tiny_params(NEW), probe=canary())
    new = tiny_params(NEW)
    flat = stored.named(new)  # the same parameters by the same names, in one level
    try:
        for payload, named in [
            (
                {k: v for k, v in new.items() if k != "final_norm"},
                {"key": "final_norm", "value": "missing"},
            ),
            (new | {"unknown": new["final_norm"]}, {"key": "unknown", "value": "nothing"}),
            (new | {"embed": new["embed"].T}, {"key": "embed", "value": "(32, 97)"}),
            (flat, {"value": "nested differently"}),
        ]:
            with raises(WeightUpdateError, **named):
                await engine.update_weights(replace(right, payload=payload))
        await engine.update_weights(right)
    finally:
        await engine.close()
