"""One program on meshes: whatever mesh samples and whatever mesh scores, log-probs are the bits of
one device.
"""

import json

import pytest

from tests.examples import examples
from tests.simulated import run_on_devices

SETUP = """
import asyncio, json, sys
from dataclasses import replace
import jax, numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax_agent_rl.config import MeshConfig
from jax_agent_rl.config.engines import EngineMeshConfig
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.jetstream.data_parallel import make_backend
from jax_agent_rl.jetstream.deterministic_scorer import DeterministicScorer
from jax_agent_rl.jetstream.engine import EngineShapes, JaxEngine
from jax_agent_rl.jetstream.programs import ProgramTable
from jax_agent_rl.jetstream.sharding import make_engine_mesh
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.sharding import make_mesh, parameter_shardings, place
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.types import SamplingParams
from tests.tiny import DELTA_NETS, TINY, tiny_params

MODEL = DecoderConfig(
    vocab_size=520, hidden_size=96, intermediate_size=160, num_layers=2, num_heads=8,
    num_kv_heads=4, head_dim=16, tie_word_embeddings=True, eos_token_ids=(2,),
)
SHAPES = EngineShapes(
    max_model_len=48, max_concurrent_decodes=4, kv_cache_tokens=384, decode_steps=4,
    prefill_buckets=(16,),
)
TEMPERATURE = 0.7
MESHES = {
    "one device": {}, "tensor=2": {"tensor": 2}, "tensor=4": {"tensor": 4},
    "data=2, tensor=2": {"data": 2, "tensor": 2},
}

def engine_mesh(name):
    return make_engine_mesh(EngineMeshConfig(**MESHES[name]))

def learner_params(model, **axes):
    "The learner's parameters on its own mesh."
    places = parameter_shardings(make_mesh(MeshConfig(**axes)), model.parameter_shapes())
    return jax.tree.map(place, tiny_params(3, model), places)

def scorers_of(model, table):
    return {name: DeterministicScorer(model, SHAPES, dtype="float32", program_table=table,
            temperature=TEMPERATURE, mesh=engine_mesh(name)) for name in MESHES}

def bits(log_probs):
    return np.concatenate([np.asarray(x, np.float32) for x in log_probs]).view(np.uint32)
"""

SAMPLED_AND_SCORED = (
    SETUP
    + """
TABLE = ProgramTable()
LEARNERS = {str(axes): learner_params(MODEL, **axes)
            for axes in ({"fsdp": 2}, {"tensor": 2}, {"fsdp": 2, "tensor": 2}, {"fsdp": 8})}
SCORERS = scorers_of(MODEL, TABLE)
numbers = iter(range(10**6))

async def start(name, table):
    backend = make_backend(MODEL, LEARNERS["{'fsdp': 2, 'tensor': 2}"], SHAPES,
                           mesh=engine_mesh(name), deterministic=table)
    await backend.start()
    return backend

async def converse(backend, talks):
    "Concurrent conversations; returns their ids, and the sampled ids' places and log-probs."
    async def one(prompt, turns):
        ids, sampled, session = list(prompt), [], str(next(numbers))
        for count, appended in turns:
            sampling = SamplingParams(max_tokens=count, temperature=TEMPERATURE, seed=count)
            output = await backend.generate(GenerateRequest(
                request_id=str(next(numbers)), prompt_ids=tuple(ids), sampling=sampling,
                session_id=session))
            sampled += [(len(ids) + i, x) for i, x in enumerate(output.log_probs)]
            ids += [*output.token_ids, *appended]
        return ids, sampled
    return await asyncio.gather(*(one(*talk) for talk in talks))

def differing(results, scores):
    pairs = [(x, of_context[at - 1]) for (_, sampled), of_context in zip(results, scores)
             for at, x in sampled]
    assert pairs
    return sum(np.float32(x).tobytes() != np.float32(y).tobytes() for x, y in pairs)

IDS = st.lists(st.integers(3, MODEL.vocab_size - 1), min_size=1, max_size=5)
SHARED = [7, 8, 9, 10, 11, 12]  # some prompts begin alike, so pages are shared
PROMPT = st.tuples(st.sampled_from([0, 3, 6]), IDS).map(lambda x: SHARED[: x[0]] + x[1])
TALKS = st.lists(
    st.tuples(PROMPT, st.lists(st.tuples(st.integers(1, 6), IDS), min_size=1, max_size=2)),
    min_size=1, max_size=9,
)

with asyncio.Runner() as runner:
    BACKENDS = {name: runner.run(start(name, TABLE)) for name in MESHES}

    @settings(max_examples=int(sys.argv[1]), deadline=None, database=None)
    @given(TALKS, st.sampled_from(list(MESHES)), st.sampled_from(list(MESHES)),
           st.sampled_from(list(LEARNERS)))
    def bits_agree(talks, sampling, scoring, learner):
        results = runner.run(converse(BACKENDS[sampling], talks))
        contexts = [ids for ids, _ in results]
        assert differing(results, SCORERS[scoring](LEARNERS[learner], contexts)) == 0
        alone = SCORERS["one device"](LEARNERS[learner], contexts[:1])
        assert differing(results[:1], alone) == 0, "alone, on one device"

    bits_agree()

    # What is drawn is the same as well.
    rng = np.random.default_rng(0)
    talks = [(rng.integers(3, 500, 3 + i).tolist(), [(6, [5]), (4, [6])]) for i in range(6)]
    drawn = [runner.run(converse(BACKENDS[name], talks)) for name in MESHES]
    assert all(each == drawn[0] for each in drawn)

    # The fast engine is not equal to the bit: what is asserted above could fail.
    fast = runner.run(start("tensor=2", None))
    results = runner.run(converse(fast, talks))
    contexts = [ids for ids, _ in results]
    scores = SCORERS["tensor=2"](LEARNERS["{'fsdp': 2}"], contexts)
    print(json.dumps(differing(results, scores)))
    for backend in (*BACKENDS.values(), fast):
        runner.run(backend.close())
"""
)

MODELS = (
    SETUP
    + """
models = {
    "windows, biases, norms of heads": replace(
        MODEL, tie_word_embeddings=False, qkv_bias=True, qk_norm=True, sliding_window=8,
        windowed_layers=(True, False),
    ),
    "delta nets": replace(
        DELTA_NETS, vocab_size=96, num_heads=8, num_kv_heads=4,
        delta_net=replace(DELTA_NETS.delta_net, key_heads=4, value_heads=8),
    ),
}
del MESHES["data=2, tensor=2"]
for name, model in models.items():
    params = tiny_params(3, model)
    rng = np.random.default_rng(0)
    contexts = [rng.integers(3, 90, rng.integers(2, 20)).tolist() for _ in range(7)]
    scores = {}
    for mesh, scorer in scorers_of(model, ProgramTable()).items():
        scores[mesh] = bits(scorer(params, contexts))
    equal = [mesh for mesh in MESHES if np.array_equal(scores[mesh], scores["one device"])]
    print(json.dumps([name, equal]))
"""
)

REFUSALS = (
    SETUP
    + """
from tests.tiny import LATENT, OLMO3
for model, size in ((OLMO3, 2), (LATENT, 2), (replace(MODEL, num_kv_heads=2), 4),
                    (replace(MODEL, hidden_size=90), 4)):
    try:
        JaxEngine(model, SHAPES, deterministic=True,
                  mesh=make_engine_mesh(EngineMeshConfig(tensor=size)))
        print(json.dumps("accepted"))
    except ConfigError as error:
        print(json.dumps(str(error)))
"""
)


def test_logprobs_are_equal_to_the_bit_whatever_mesh_samples_and_whatever_mesh_scores():
    lines = run_on_devices(SAMPLED_AND_SCORED, str(examples(10)))
    assert json.loads(lines[-1]) > 0


def test_other_layers_and_compilers_at_full_optimization_give_the_bits_of_one_device():
    for line in run_on_devices(MODELS, flags=""):
        name, equal = json.loads(line)
        assert len(equal) == 3, (name, equal)


@pytest.mark.parametrize("number", range(4))
def test_what_a_mesh_would_compute_in_another_order_is_refused(refusals: list[str], number: int):
    assert "rollout.deterministic" in refusals[number]
    assert "rollout.jetstream.mesh.tensor" in refusals[number]


@pytest.fixture(scope="module")
def refusals() -> list[str]:
    lines = run_on_devices(REFUSALS, devices=4)
    assert len(lines) == 4
    return [json.loads(line) for line in lines]
