"""What is read off an engine: every tensor, whether both sides have it or one; every replica; the
first layer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.agreement.diagnosis import EngineView
from jax_agent_rl.agreement.inspection import (
    LayerDifference,
    first_difference,
    sample_tensors,
    tensor_faults,
)
from jax_agent_rl.agreement.report import Cause, Tolerance
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.hf import HEAD
from jax_agent_rl.models.tensors import LayerOutput, TensorSample
from tests.agreement_testbed import (
    GEMMA,
    LLAMA,
    MOE,
    diagnosed_engine,
    diagnosis,
    jax_engine,
    rollouts,
)
from tests.tiny import DELTA_NETS, LATENT, tiny_params

UNTIED = replace(LLAMA, tie_word_embeddings=False)
EMBED = "model.embed_tokens.weight"
NORM = "model.layers.1.input_layernorm.weight"


def faults(
    engine: Mapping[str, TensorSample],
    learner: Mapping[str, TensorSample],
    older: Params | None = None,
):
    older_samples = {} if older is None else {"version 0": lambda: sample_tensors(LLAMA, older)}
    named = tensor_faults(
        engine, learner, precision="float32", transposed=lambda name: None, older=older_samples
    )
    return [(fault.name, fault.cause, fault.detail) for fault in named]


def without(samples: Mapping[str, TensorSample], name: str) -> dict[str, TensorSample]:
    return {key: sample for key, sample in samples.items() if key != name}


def test_a_tensor_that_the_engine_lacks_is_named():
    samples = sample_tensors(LLAMA, tiny_params(1, LLAMA))
    assert faults(samples, samples) == []
    assert faults(without(samples, NORM), samples) == [
        (NORM, Cause.MISSING_TENSOR, "is not among the engine's tensors")
    ]


def test_a_head_that_the_engine_lacks_is_named_unless_the_model_is_tied():
    tied = sample_tensors(LLAMA, tiny_params(1, LLAMA))
    assert faults(without(tied, HEAD), tied) == []
    untied = sample_tensors(UNTIED, tiny_params(1, UNTIED))
    ((name, cause, detail),) = faults(without(untied, HEAD), untied)
    assert (name, cause) == (
        HEAD,
        Cause.MISSING_TENSOR,
    )
    assert "reads logits from its embeddings" in detail


def test_a_tied_models_separate_head_is_compared_with_the_embeddings():
    params = tiny_params(1, LLAMA)
    older_params = tiny_params(2, LLAMA)
    learner = sample_tensors(LLAMA, params)
    stale = dict(learner) | {HEAD: sample_tensors(LLAMA, older_params)[EMBED]}
    ((name, _, detail),) = faults(stale, learner, older=older_params)
    assert name == HEAD
    assert "is still that of version 0" in detail


def test_a_tensor_that_only_the_engine_has_is_named():
    samples = sample_tensors(LLAMA, tiny_params(1, LLAMA))
    extra = dict(samples) | {
        "model.layers.0.self_attn.q_proj.bias": TensorSample.of(np.ones(32, np.float32))
    }
    ((name, cause, _),) = faults(extra, samples)
    assert name == "model.layers.0.self_attn.q_proj.bias"
    assert cause is Cause.WRONG_TENSOR


@pytest.mark.parametrize(
    "model", [LLAMA, UNTIED, GEMMA, MOE], ids=["tied", "untied", "gemma", "moe"]
)
async def test_an_engine_reports_the_learners_tensors_and_the_head_it_reads(model: DecoderConfig):
    params = tiny_params(1, model)
    backend = jax_engine(model, params)
    await backend.start()
    try:
        samples = await backend.tensor_samples()
    finally:
        await backend.close()
    assert samples.keys() == sample_tensors(model, params).keys()
    head = params.get("lm_head", params["embed"])
    assert np.array_equal(samples[HEAD].values, TensorSample.of(np.asarray(head)).values)


async def test_the_replica_that_was_not_updated_is_named():
    right = tiny_params(1, LLAMA)
    older_params = tiny_params(2, LLAMA)
    backend = jax_engine(LLAMA, right)
    await backend.start()
    try:
        groups = await rollouts(backend, LLAMA)
        tensors = await backend.tensor_samples()
        assert await backend.replica_samples() == ()
    finally:
        await backend.close()
    strict = Tolerance(
        token=1e-12, mean=1e-12
    )  # nothing meets it: what is read off the engine counts all the same
    healthy = EngineView(tensors=tensors, replicas=[tensors])
    diagnosed = await asyncio.to_thread(
        diagnosis, groups, LLAMA, right, engine=healthy, tolerance=strict
    )
    assert "all 30 tensors of each of 2 engines are the learner's" in [
        finding.detail for finding in diagnosed.findings
    ]
    stale = replace(healthy, replicas=[tensors, sample_tensors(LLAMA, older_params)])
    older = {"version 0": older_params}
    diagnosed = await asyncio.to_thread(
        diagnosis, groups, LLAMA, right, engine=stale, tolerance=strict, older=older
    )
    assert diagnosed.cause is Cause.STALE_VERSION
    assert "(of engine 3 of 3)" in diagnosed.line


def output(*, hidden: float = 1.0, keys: float = 1.0, values: float = 1.0) -> LayerOutput:
    return LayerOutput(
        hidden=np.full((3, 4), hidden),
        keys=np.full((3, 2, 2), keys),
        values=np.full((3, 2, 2), values),
    )


@pytest.mark.parametrize(
    ("changed", "parts", "first"),
    [
        ({"hidden": 2.0}, ("hidden",), Cause.SETTING),
        ({"keys": 3.0}, ("keys",), Cause.ROTARY),
        ({"keys": 3.0, "values": 2.0}, ("keys", "values"), Cause.SETTING),
    ],
    ids=["output", "keys", "keys and values"],
)
def test_the_first_layer_that_differs_speaks_for_causes(
    changed, parts: tuple[str, ...], first: Cause
):
    embedded = LayerOutput(hidden=np.ones((3, 4)))
    learner_layers = [embedded, output(), output()]
    engine_layers = [embedded, output(), output(**changed)]
    assert first_difference(learner_layers, learner_layers, precision="float32") is None
    difference = first_difference(engine_layers, learner_layers, precision="float32")
    largest = max(changed.values()) - 1
    assert difference == LayerDifference(layer=1, parts=parts, difference=largest, begin=0)
    assert difference.causes[0] is first


@pytest.mark.parametrize(("part", "first"), [("keys", Cause.POSITION), ("hidden", Cause.WINDOW)])
def test_a_layer_that_differs_from_a_later_id_on_speaks_for_what_begins_there(
    part: str, first: Cause
):
    arrays = {
        "hidden": np.ones((40, 4)),
        "keys": np.ones((40, 2, 2)),
        "values": np.ones((40, 2, 2)),
    }
    changed = arrays[part].copy()
    changed[30:] = 1.5
    learner_layers = [LayerOutput(**arrays)]
    engine_layers = [LayerOutput(**arrays | {part: changed})]
    difference = first_difference(
        [output(), *engine_layers], [output(), *learner_layers], precision="float32"
    )
    assert difference is not None
    assert (difference.begin, difference.causes[0]) == (30, first)
    assert "from id 30 on" in difference.describe()


def test_a_difference_is_measured_at_each_position_by_its_size():
    """The first position of real models is a hundred times as large as the others."""
    learner_output = np.ones((40, 4))
    learner_output[0] = 1000.0
    theirs = learner_output.copy()
    theirs[20] = 1.5
    difference = first_difference(
        [LayerOutput(hidden=theirs)], [LayerOutput(hidden=learner_output)], precision="float32"
    )
    assert difference is not None
    assert difference.difference == pytest.approx(0.5)


def test_a_position_may_differ_by_a_few_times_its_precisions_cost():
    """Attention that nearly cancels at one position of a real model costs 8 % there in bfloat16, 1
    % elsewhere.
    """
    learner_output = np.ones((40, 4))
    rounded = learner_output.copy()
    rounded[20] = 1.08
    theirs = learner_output.copy()
    theirs[20] = 1.13

    def found(engine: np.ndarray, measured: np.ndarray | None) -> LayerDifference | None:
        return first_difference(
            [LayerOutput(hidden=engine)],
            [LayerOutput(hidden=learner_output)],
            precision="bfloat16",
            rounded=None if measured is None else [LayerOutput(hidden=measured)],
        )

    assert found(theirs, rounded) is None
    assert found(theirs, None) is not None, "without a measurement a constant decides"
    theirs[30] = 1.13
    wrong = found(theirs, rounded)
    assert wrong is not None
    assert wrong.begin == 30
    assert wrong.difference == pytest.approx(0.13)


def test_embeddings_that_differ_speak_for_their_scale():
    learner_layers = [LayerOutput(hidden=jnp.ones((3, 4)))]
    engine_layers = [LayerOutput(hidden=2 * jnp.ones((3, 4)))]
    difference = first_difference(engine_layers, learner_layers, precision="float32")
    assert difference is not None
    assert difference.layer == -1
    assert "the embeddings differ already" in difference.describe()


@pytest.mark.parametrize(
    ("model", "first"),
    [
        pytest.param(replace(LATENT, family="deepseek_v3"), 0, id="latent attention"),
        pytest.param(replace(DELTA_NETS, family="qwen3_next"), 1, id="delta nets"),
    ],
)
async def test_the_first_layer_that_differs_is_named_without_keys_and_values(
    model: DecoderConfig, first: int
):
    """Nothing rotates in the delta net, which is layer 0."""
    served = replace(model, rope=replace(model.rope, theta=1e6))
    diagnosed = await diagnosed_engine(model, served, inspected=True)
    (layers,) = (finding for finding in diagnosed.findings if finding.name == "layers")
    assert layers.verdict == "found"
    assert f"layer {first} is the first that differs" in layers.detail
    assert layers.detail.endswith("what mixes its ids, or what follows")
    assert diagnosed.cause is Cause.ROTARY
