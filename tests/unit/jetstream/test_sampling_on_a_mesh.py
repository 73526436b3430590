"""Devices that each hold a part of the vocabulary draw what one device draws, and exchange no
logits.
"""

import json

import pytest

from tests.simulated import run_on_devices

SCRIPT = """
import functools, json, re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax_agent_rl.config.engines import EngineMeshConfig
from jax_agent_rl.jetstream.attention import DEVICES
from jax_agent_rl.jetstream.sampling import Truncation, sample
from jax_agent_rl.jetstream.sharding import make_engine_mesh

VOCABULARY, SLOTS = 1208, 600  # parts of 302 ids: three blocks of 128, the last of them not full
rng = np.random.default_rng(0)
logits = (rng.standard_normal((VOCABULARY, SLOTS)) * 3).astype(np.float32)
logits[700:, ::3] = -np.inf  # nothing to draw on the last devices
allowed = rng.random((SLOTS, -(-VOCABULARY // 32), 32)) < 0.3
settings = dict(
    temperature=jnp.asarray(np.tile([1.0, 0.0, 0.7], SLOTS // 3), jnp.float32),
    seed=jnp.arange(SLOTS, dtype=jnp.uint32),
    position=jnp.full(SLOTS, 7, jnp.int32),
)
truncation = Truncation(
    top_p=jnp.asarray(np.tile([1.0, 1.0, 0.9, 0.5], SLOTS // 4), jnp.float32),
    top_k=jnp.asarray(np.tile([0, 0, 0, 0, 17], SLOTS // 5), jnp.int32),
    min_p=jnp.asarray(np.tile([0.0, 0.0, 0.1], SLOTS // 3), jnp.float32),
)
mesh = make_engine_mesh(EngineMeshConfig(expert=2, tensor=2))
split = jax.device_put(logits, NamedSharding(mesh, PartitionSpec(DEVICES)))
differ = []
forced = jnp.where(jnp.arange(SLOTS) % 2, 1207, -1).astype(jnp.int32)
packed = jnp.asarray(np.packbits(allowed, axis=2, bitorder="little").view(np.uint32)[..., 0])
for more in ({}, {"truncation": truncation}, {"truncation": truncation, "forced": forced},
             {"allowed": packed}):
    one = jax.jit(sample)(jnp.asarray(logits), **settings, **more)
    run = jax.jit(functools.partial(sample, mesh=mesh))
    four = run(split, **settings, **more)
    differ.append(int(np.sum(np.asarray(one[0]) != np.asarray(four[0]))))
    same = np.asarray(one[0]) == np.asarray(four[0])
    np.testing.assert_allclose(np.asarray(one[1])[same], np.asarray(four[1])[same], atol=1e-5)
    assert (one[2] is None) == (four[2] is None)
    if one[2] is not None:  # a nucleus may differ by the id at its edge
        difference = np.asarray(one[2]) ^ np.asarray(four[2])
        changed = np.unpackbits(difference.view(np.uint8), axis=1).sum(axis=1)
        assert (changed > 0).sum() <= 1 and changed.max() <= 1, changed
text = run.lower(split, **settings, truncation=truncation).compile().as_text()
exchange = r"\\w+\\[([\\d,]*)\\][^=]*? (?:all-gather|all-reduce|all-to-all)"
sizes = [np.prod([int(n) for n in found.split(",") if n] or [1])
         for found in re.findall(exchange, text)]
print(json.dumps([differ, int(max(sizes)) / (VOCABULARY * SLOTS)]))
"""


@pytest.fixture(scope="module")
def measured() -> tuple[list[int], float]:
    """Slots whose ids differ, by what is asked for; and the largest exchange as a share of the
    logits.
    """
    differ, share = json.loads(run_on_devices(SCRIPT, devices=4)[-1])
    return differ, share


def test_ids_and_logprobs_are_those_of_one_device(measured: tuple[list[int], float]):
    """Sums of parts round differently: an id whose share of [0, 1) ends at the drawn number may
    change.
    """
    differ, _ = measured
    assert max(differ) <= 1  # of 600 slots; the script compares log-probs


def test_no_exchange_is_nearly_as_large_as_the_logits(measured: tuple[list[int], float]):
    _, share = measured
    assert share < 0.15  # a block of 128 ids per slot
