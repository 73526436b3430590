"""One program: engine and learner agree on every log-prob to the bit, whatever ran together,
however it was packed.
"""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_agent_rl.config import AlgorithmConfig, LearnerConfig, build
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.deterministic_scorer import DeterministicScorer
from jax_agent_rl.jetstream.engine import EngineShapes, JaxEngine
from jax_agent_rl.jetstream.programs import ProgramTable
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.models.config import DecoderConfig, Experts
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.types import SamplingParams
from tests.examples import examples
from tests.messages import raises
from tests.tiny import TINY, logprobs_of, tiny_params
from tests.trajectories import group_of, trajectory

MODEL = (
    DecoderConfig(  # wide enough that products are blocked and vectorised as a large model's are
        vocab_size=515,
        hidden_size=192,
        intermediate_size=320,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        eos_token_ids=(2,),
    )
)
SHAPES = EngineShapes(
    max_model_len=64,
    max_concurrent_decodes=6,
    kv_cache_tokens=576,
    decode_steps=4,
    prefill_buckets=(16, 32),
)
TEMPERATURE = 0.7
PARAMS = tiny_params(3, MODEL)
TABLE = ProgramTable()
SCORER = DeterministicScorer(
    MODEL, SHAPES, dtype="float32", program_table=TABLE, temperature=TEMPERATURE
)
Talks = list[tuple[list[int], list[tuple[int, list[int]]]]]


async def converse(
    talks: Talks, *, deterministic: bool
) -> list[tuple[list[int], list[tuple[int, float]]]]:
    """Run concurrent conversations, each a prompt and turns (max new ids, ids appended then).

    Returns:
        Contexts, and for each sampled id its index and log-prob.
    """
    backend = JetStreamBackend(
        MODEL, PARAMS, SHAPES, deterministic=TABLE if deterministic else None
    )
    await backend.start()

    async def one(number: int, prompt: list[int], turns: list[tuple[int, list[int]]]):
        ids = list(prompt)
        sampled = []
        for turn, (count, appended) in enumerate(turns):
            sampling = SamplingParams(
                max_tokens=count, temperature=TEMPERATURE, seed=number * 10 + turn
            )
            request = GenerateRequest(
                request_id=f"{number}-{turn}",
                prompt_ids=tuple(ids),
                sampling=sampling,
                session_id=str(number),
            )
            output = await backend.generate(request)
            sampled += [(len(ids) + i, x) for i, x in enumerate(output.log_probs)]
            ids += [*output.token_ids, *appended]
        return ids, sampled

    try:
        return await asyncio.gather(*(one(n, *talk) for n, talk in enumerate(talks)))
    finally:
        await backend.close()


def differences(results, order: list[int]) -> int:
    """How many log-probs of the engine are not, to the bit, those of the learner's scorer, given in
    this order.
    """
    scores = SCORER(PARAMS, [results[i][0] for i in order])
    pairs = [(x, scores[n][at - 1]) for n, i in enumerate(order) for at, x in results[i][1]]
    assert pairs
    return sum(np.float32(x).tobytes() != np.float32(y).tobytes() for x, y in pairs)


IDS = st.lists(st.integers(3, MODEL.vocab_size - 1), min_size=1, max_size=5)
SHARED = [7, 8, 9, 10, 11, 12]  # some prompts begin alike, so rows are copied from one another
PROMPT = st.tuples(st.sampled_from([0, 3, 6]), IDS).map(lambda x: SHARED[: x[0]] + x[1])
TALKS = st.lists(
    st.tuples(PROMPT, st.lists(st.tuples(st.integers(1, 9), IDS), min_size=1, max_size=3)),
    min_size=1,
    max_size=11,
)


@settings(max_examples=examples(15))
@given(TALKS, st.randoms(use_true_random=False))
def test_logprobs_of_engine_and_learner_are_equal_to_the_bit_in_any_batch(talks: Talks, chance):
    results = asyncio.run(converse(talks, deterministic=True))
    order = list(range(len(results)))
    chance.shuffle(order)
    assert differences(results, order) == 0
    assert differences(results, order[:1]) == 0, "alone"


def fixed_talks() -> Talks:
    rng = np.random.default_rng(0)
    draw = lambda n: rng.integers(3, MODEL.vocab_size, n).tolist()  # noqa: E731
    return [(draw(3 + i), [(8, draw(3)), (8, draw(1))]) for i in range(9)]


def test_the_fast_engine_is_not_equal_to_the_bit():
    """This shows that the test above could fail."""
    assert (
        differences(asyncio.run(converse(fixed_talks(), deterministic=False)), list(range(9))) > 0
    )


def test_the_logprobs_are_those_of_plain_full_passes():
    scorer = DeterministicScorer(
        TINY, SHAPES, dtype="float32", program_table=ProgramTable(), temperature=TEMPERATURE
    )
    ids = np.random.default_rng(1).integers(3, 97, 20).tolist()
    (scored,) = scorer(tiny_params(), [ids])
    np.testing.assert_allclose(
        scored, logprobs_of(tiny_params(), ids[:1], ids[1:], TEMPERATURE), atol=2e-5
    )


def test_what_is_sampled_does_not_depend_on_the_company():
    talks = fixed_talks()
    together = asyncio.run(converse(talks, deterministic=True))
    (alone,) = asyncio.run(converse(talks[:1], deterministic=True))
    assert alone == together[0]


def test_the_learner_measures_a_gap_of_exactly_zero():
    results = asyncio.run(converse([(p, t[:1]) for p, t in fixed_talks()[:4]], deterministic=True))
    members = []
    for i, ((prompt, _), (ids, sampled)) in enumerate(zip(fixed_talks(), results, strict=False)):
        response = ids[len(prompt) : len(prompt) + len(sampled)]
        logprobs = [x for _, x in sampled]
        members.append(
            trajectory(prompt, response, logprobs=logprobs, reward=float(i % 2), index=i)
        )
    config = LearnerConfig(pack_length=64)
    learner = Learner(
        MODEL,
        PARAMS,
        algorithm=AlgorithmConfig(),
        config=config,
        temperature=TEMPERATURE,
        score_by=SCORER,
    )
    metrics = learner.update([group_of(members)]).metrics
    assert metrics["logprob_gap_max"] == 0.0
    assert metrics["trained_tokens"] > 8
    plain = Learner(
        MODEL, PARAMS, algorithm=AlgorithmConfig(), config=config, temperature=TEMPERATURE
    )
    assert 0 < plain.update([group_of(members)]).metrics["logprob_gap_max"] < 1e-4


def test_a_mixture_of_experts_is_refused():
    experts = Experts(count=4, per_token=2, intermediate_size=16, normalize=True)
    with raises(ConfigError, fix="rollout.deterministic=false"):
        JaxEngine(replace(TINY, experts=experts), SHAPES, deterministic=True)


@pytest.mark.parametrize(
    "settings_",
    [
        {"rollout": {"backend": "vllm"}},
        {"learner": {"mesh": {"context": 2}}},
        {"learner": {"mesh": {"expert": 2}}},
        {"rollout": {"jetstream": {"mesh": {"expert": 2}}}},
        {"rollout": {"jetstream": {"quantize": "int8"}}},
        {"algorithm": {"rollout_correction": {"bypass_mode": True}}},
    ],
    ids=str,
)
def test_what_cannot_be_deterministic_is_refused_with_the_fix(settings_: dict):
    tree = {"run_dir": "x", "model": {"path": "x"}, "data": {"train": "x"}, **settings_}
    tree["rollout"] = {**tree.get("rollout", {}), "deterministic": True}
    with raises(ConfigError, key="rollout.deterministic"):
        build(tree)
