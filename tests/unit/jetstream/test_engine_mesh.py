"""An engine on eight simulated devices says what an engine on one does, and each device keeps its
part of it.
"""

import json

import pytest

from jax_agent_rl.config.engines import EngineMeshConfig
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.jetstream.sharding import engine_config, make_engine_mesh
from tests.messages import raises
from tests.simulated import run_on_devices
from tests.tiny import TINY

ENGINES = """
import asyncio, json, sys
from dataclasses import replace
import jax, numpy as np
from jax_agent_rl.config.engines import EngineMeshConfig
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.engine import EngineShapes
from jax_agent_rl.jetstream.sharding import make_engine_mesh
from jax_agent_rl.models.config import DeltaNet, Experts, GlobalAttention, LatentAttention, Rope
from jax_agent_rl.rollout.protocol import GenerateRequest, WeightUpdate
from jax_agent_rl.types import SamplingParams
from tests.tiny import GEMMA4_EXPERTS, TINY, tiny_adapter, tiny_params

base = replace(TINY, vocab_size=96, num_layers=2, num_heads=8, num_kv_heads=8)
MODELS = {
    "dense": replace(base, qkv_bias=True, tie_word_embeddings=False),
    "few KV heads": replace(
        base, num_kv_heads=2, qk_norm=True, qk_norm_over="heads", norms="around",
        sliding_window=4, windowed_layers=(True, False), local_rope=Rope(theta=100.0),
    ),
    "experts": replace(
        base, num_kv_heads=2, attention_sinks=True, o_bias=True, activation="clamped_swiglu",
        rope=Rope(partial_rotary=0.5, interleaved=True),
        experts=Experts(
            count=8, per_token=2, intermediate_size=16, normalize=True, bias=True,
            scoring="sigmoid", correction=True, shared_size=16, shared_gated=True,
        ),
    ),
    "experts beside dense": replace(
        GEMMA4_EXPERTS, vocab_size=96, num_layers=2, num_heads=8, num_kv_heads=4,
        windowed_layers=(True, False),
        global_attention=GlobalAttention(num_kv_heads=1, head_dim=16, keys_as_values=True),
    ),
    "latents": replace(
        base, head_dim=12, rope=Rope(interleaved=True),
        latent=LatentAttention(q_rank=12, kv_rank=16, nope_dim=8, rope_dim=4, value_dim=6),
    ),
    "delta nets": replace(
        base, qk_norm=True, attention_gate=True,
        delta_net=DeltaNet(
            layers=(True, False), key_heads=8, value_heads=16, key_dim=8, value_dim=4
        ),
    ),
}
model = MODELS[sys.argv[1]]
mesh = EngineMeshConfig(**json.loads(sys.argv[2]))
options = json.loads(sys.argv[3])
shapes = EngineShapes(
    max_model_len=60, max_concurrent_decodes=3, kv_cache_tokens=256, decode_steps=4,
    prefill_buckets=(8,),
)

def request(name, prompt, *, count=12, session=None, lora=None, **sampling):
    sampling = SamplingParams(max_tokens=count, ignore_eos=True, **{"temperature": 0.0} | sampling)
    return GenerateRequest(
        request_id=name, prompt_ids=tuple(prompt), sampling=sampling, session_id=session,
        lora=lora,
    )

async def outputs(mesh):
    backend = JetStreamBackend(model, tiny_params(config=model), shapes, mesh=mesh, **options,
                               adapters={"a": tiny_adapter(model)})
    await backend.start()
    try:
        prompts = []
        for seed, length in enumerate((4, 11, 23)):
            prompts.append(np.random.default_rng(seed).integers(3, 96, length).tolist())
        first = await asyncio.gather(*(backend.generate(request(f"g{i}", p, session=f"s{i}"))
                                       for i, p in enumerate(prompts)))
        prompt = [*prompts[0], *first[0].token_ids, 7, 8]
        second = await backend.generate(
            request("next turn", prompt, session="s0", temperature=0.8, top_p=0.9, seed=5)
        )
        assert second.cached_tokens == len(prompt) - 3, second
        adapted = await backend.generate(request("adapted", prompts[2], lora="a"))
        assert adapted.log_probs != first[2].log_probs
        update = WeightUpdate(version=1, kind="arrays", payload=tiny_params(1, model))
        await backend.update_weights(update)
        changed = await backend.generate(request("changed", prompts[2]))
        assert changed.cached_tokens == 0 and changed.policy_versions == (1,) * 12
        assert (await backend.metrics()).recompilations == 0
        params, cache = backend.core.scheduler.params, backend.core.scheduler.cache
        stored = {"embed": params.embed, "cache": cache.entries[0], **params.layers[0]}
        part = {}
        for name, tree in stored.items():
            for x in jax.tree.leaves(tree)[:1]:
                if x.ndim > 1:
                    part[name] = x.addressable_shards[0].data.size / x.size
    finally:
        await backend.close()
    return [*first, second, adapted, changed, in_flight(backend.core.scheduler, prompts[1])], part

def in_flight(scheduler, prompt):
    "Change weights in the middle of a generation, by hand: the engine's thread does not wait."
    scheduler.submit(request("in flight", prompt, count=20))
    scheduler.step()
    scheduler.set_weights(scheduler.engine.load_params(tiny_params(2, model), scheduler.params), 2)
    output = None
    while output is None:
        ((_, chunk),) = scheduler.step()
        output = chunk.final
    assert set(output.policy_versions) == {1, 2}, output
    return output

expected, _ = asyncio.run(outputs(None))
found, part = asyncio.run(outputs(make_engine_mesh(mesh)))
for a, b in zip(expected, found, strict=True):
    assert a.token_ids == b.token_ids, (a, b)
    np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-4)
    assert (a.routed_experts is None) == (model.experts is None)
    assert a.routed_experts == b.routed_experts
print(json.dumps(part))
"""


@pytest.mark.parametrize(
    ("model", "mesh", "options"),
    [
        ("dense", {"tensor": 8}, {"quantize": "int8"}),
        ("few KV heads", {"tensor": 8}, {}),
        ("experts", {"expert": 2, "tensor": 4}, {"quantize": "int8"}),
        ("experts beside dense", {"expert": 2, "tensor": 4}, {}),
        ("latents", {"tensor": 8}, {}),
        ("delta nets", {"tensor": 8}, {}),
    ],
)
def test_tokens_and_logprobs_are_those_of_one_device_over_turns_and_updates(
    model: str, mesh: dict, options: dict
):
    (line,) = run_on_devices(ENGINES, model, json.dumps(mesh), json.dumps(options))
    parts = json.loads(line)
    for name in ("router", "router_correction", "shared_router"):
        assert parts.pop(name, 1) == 1, "every token is routed on every device"
    for name in ("shared_gate_up", "shared_down"):
        assert parts.pop(name, 1 / 4) == 1 / 4, "a dense network is split over tensor alone"
    if model == "experts beside dense":
        for name in ("gate_up", "down"):
            assert parts.pop(name) == 1 / 4, "the dense network beside experts, in the same way"
    if model == "latents":
        for name in ("q_a", "kv_a", "cache"):
            assert parts.pop(name) == 1, "all heads read the same latents"
    assert parts.pop("expert_down_bias", 1 / 2) == 1 / 2, (
        "added on one of the devices that add up an expert's output"
    )
    assert set(parts.values()) == {1 / 8}, parts


PUBLISH = """
import functools, gc, json, weakref
import jax, jax.numpy as jnp, numpy as np
from dataclasses import replace
from jax_agent_rl.config import MeshConfig
from jax_agent_rl.config.engines import EngineMeshConfig
from jax_agent_rl.jetstream.engine import EngineShapes, JaxEngine
from jax_agent_rl.jetstream.forward import engine_params
from jax_agent_rl.jetstream.sharding import make_engine_mesh
from jax_agent_rl.models.sharding import make_mesh, parameter_shardings, place
from tests.tiny import TINY, tiny_params

model = replace(
    TINY, vocab_size=96, num_layers=2, num_heads=8, num_kv_heads=2, tie_word_embeddings=False
)
shapes = EngineShapes(
    max_model_len=48, max_concurrent_decodes=2, kv_cache_tokens=128, decode_steps=2,
    prefill_buckets=(8,),
)

def bytes_on(device, tree):
    total = 0
    for x in jax.tree.leaves(tree):
        total += sum(s.data.nbytes for s in x.addressable_shards if s.device == device)
    return total

def pointer_of(params):
    return params.layers[0]["down"].addressable_shards[0].data.unsafe_buffer_pointer()

def require_equal(left, right):
    np.testing.assert_array_equal(np.asarray(left), np.asarray(right))

CASES = [  # learner's mesh, engine's mesh, its first device
    ({"fsdp": 4, "tensor": 2}, {"tensor": 8}, 0),
    ({"fsdp": 4, "tensor": 2}, {"tensor": 4}, 0),
    ({"fsdp": 2, "tensor": 2}, {"tensor": 4}, 4),
    ({"fsdp": 2}, {"tensor": 4}, 4),
    ({"tensor": 4}, {"tensor": 2}, 5),
    ({}, {}, 7),
]
for learner, mesh, first in CASES:
    places = parameter_shardings(make_mesh(MeshConfig(**learner)), model.parameter_shapes())
    theirs = [jax.tree.map(place, tiny_params(seed, model), places) for seed in (1, 0)]
    references = [weakref.ref(x) for x in jax.tree.leaves(theirs)]
    engine_mesh = make_engine_mesh(EngineMeshConfig(**mesh), device_offset=first)
    engine = JaxEngine(model, shapes, dtype=jnp.bfloat16, mesh=engine_mesh)
    old = engine.load_params(theirs[0])
    at = pointer_of(old)
    engine.program_table.end_warm_up()
    params = engine.load_params(theirs[1], old)
    assert all(x.is_deleted() for x in jax.tree.leaves(old)), "two sets of weights"
    for x in jax.tree.leaves(theirs):
        x.delete()  # as the next optimizer step does
    del theirs, x
    gc.collect()
    assert not any(reference() for reference in references), "the learner's arrays are kept"
    convert = jax.jit(functools.partial(engine_params, engine.config, dtype=jnp.bfloat16))
    expected = convert(tiny_params(config=model))
    jax.tree.map(require_equal, params, expected)
    programs = {key[:2]: program for key, program in engine.program_table._programs.items()}
    programs.pop(("no weights",), None)  # it makes the room that the first weights take
    (name,) = {key[0] for key in programs}
    assert {key[1] for key in programs} == {"layer", "others"} and len(programs) == 2
    whole = sum(x.nbytes for x in jax.tree.leaves(params))
    expected_bytes = sum(x.nbytes for x in jax.tree.leaves(expected))
    print(json.dumps({
        "learner": learner,
        "devices": engine_mesh.size,
        "program": name,
        "recompilations": engine.program_table.recompilations,
        "largest part": max(bytes_on(d, params) for d in engine_mesh.devices.flat) / whole,
        "in place": at == pointer_of(params),
    }), flush=True)
"""


def test_weights_go_between_meshes_in_parts_into_the_old_ones_memory():
    cases = [json.loads(line) for line in run_on_devices(PUBLISH)]
    assert [case["program"] for case in cases] == ["weights"] + ["staged weights"] * 5
    assert cases[0]["in place"], "on the same devices one program writes over the old weights"
    for case in cases:
        assert case["recompilations"] == 0
        norms = 0.02  # the only arrays that are whole everywhere
        assert case["largest part"] < 1 / case["devices"] + norms, case


class Mesh:
    """What of a mesh is read before any device is."""

    def __init__(self, **axes: int) -> None:
        self.shape = {"data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1} | axes
        self.size = self.shape["expert"] * self.shape["tensor"]


@pytest.mark.parametrize(
    ("axes", "named"),
    [
        (
            {"expert": 2},
            {
                "key": "mesh.expert",
                "value": (2, "no experts"),
                "fix": "set rollout.jetstream.mesh.tensor",
            },
        ),
        (
            {"tensor": 3},
            {"value": ("4 query heads", "2 key/value heads"), "fix": "[1, 2, 4] devices"},
        ),
        (
            {"tensor": 2},
            {"key": ("'embed'", "rollout.jetstream.mesh.tensor"), "value": (97, 2)},
        ),
    ],
)
def test_a_mesh_that_does_not_divide_the_model_is_refused_with_what_does(axes: dict, named: dict):
    with raises(ConfigError, **named):
        engine_config(TINY, Mesh(**axes))  # type: ignore[arg-type]


def test_more_devices_than_this_process_has_are_refused():
    with raises(ConfigError, value=("2 devices", "number 3", "has 1")):
        make_engine_mesh(EngineMeshConfig(tensor=2), device_offset=3)
