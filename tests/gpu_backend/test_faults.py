"""A real vLLM engine with one fault each: the diagnosis names it. Without a fault there is nothing
to diagnose.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from gpu_backend.backend import VllmBackend
from jax_agent_rl.agreement.diagnosis import EngineView
from jax_agent_rl.agreement.report import OTHER_ENGINE, Cause, Diagnosis
from jax_agent_rl.models.config import DecoderConfig, Params, Rope
from jax_agent_rl.models.hf import save_hf
from tests.agreement_testbed import (
    Between,
    as_gemma,
    as_if_asked,
    diagnosis,
    rollouts,
    with_experts,
)
from tests.gpu_backend.conftest import SMALL, Engine, running, small_params
from tests.tiny import tiny_params

pytestmark = pytest.mark.asyncio(loop_scope="session")

LENGTHS = (40, 50, 37, 44)
"""Of prompts: over a block of vLLM's cache."""
MOE = with_experts(SMALL, 32, tie_word_embeddings=False)
GEMMA = as_gemma(SMALL, (True, False), attention_scale=32**-0.5)
RIGHT = small_params(0)
BEFORE = {
    **RIGHT,
    "layers": {
        name: x + 0.01 * jnp.asarray(np.random.default_rng(0).standard_normal(x.shape), jnp.float32)
        for name, x in RIGHT["layers"].items()
    },
}


def with_layer(**changed: Any) -> Params:
    return {**RIGHT, "layers": {**RIGHT["layers"], **changed}}


K = RIGHT["layers"]["k"]
Q = RIGHT["layers"]["q"]
UP = RIGHT["layers"]["up"]


async def put(engine: Engine, params: Params) -> None:
    """Straight into vLLM's model, past the probe that would notice, and past everything that is
    emptied with it.
    """
    update = engine.files.write(params, engine.backend.policy_version)
    await engine.backend.updater.transfer({"paths": update.payload})


async def diagnosed(
    backend: VllmBackend,
    model: DecoderConfig,
    params: Params,
    *,
    between: Between = Between(),  # noqa: B008
    inspected: bool = False,
    temperature: float = 1.0,
    older: Mapping[str, Params] | None = None,
) -> Diagnosis:
    groups = await rollouts(
        backend, model, between=between, temperature=temperature, lengths=LENGTHS
    )
    view = EngineView(tensors=await backend.tensor_samples()) if inspected else None
    since = backend.policy_version
    allowed = OTHER_ENGINE["float32"]
    arguments = {
        "engine": view,
        "since": since,
        "temperature": temperature,
        "older": older,
        "tolerance": allowed,
    }
    return await asyncio.to_thread(diagnosis, groups, model, params, **arguments)


async def test_a_healthy_engine_agrees_and_its_tensors_are_the_learners(engine: Engine):
    await engine.backend.reset_prefix_cache()
    diagnosis = await diagnosed(engine.backend, SMALL, RIGHT)
    assert OTHER_ENGINE["float32"].holds(diagnosis.gap), diagnosis.gap
    assert engine.backend.capabilities.precision == "float32"
    samples = await engine.backend.tensor_samples()
    assert "model.layers.1.mlp.up_proj.weight" in samples
    sample = samples["model.layers.1.mlp.up_proj.weight"]
    assert sample.shape == (96, 64)
    assert sample.rms == pytest.approx(float(jnp.sqrt(jnp.mean(UP[1] ** 2))), rel=1e-5)


@pytest.mark.parametrize(
    ("between", "cause", "said"),
    [
        (
            Between(
                ask=lambda request: replace(request, sampling=replace(request.sampling, top_k=5))
            ),
            Cause.TRUNCATED_SUPPORT,
            "top_k=5",
        ),
        (
            Between(
                ask=lambda request: replace(request, prompt_ids=(0,) * 3 + request.prompt_ids),
                answer=as_if_asked,
            ),
            Cause.PADDING,
            "sees 3 padding ids (0) before the prompt",
        ),
    ],
    ids=["top_k", "padding"],
)
async def test_a_fault_between_request_and_answer_is_named(
    engine: Engine, between: Between, cause: Cause, said: str
):
    await engine.backend.reset_prefix_cache()
    diagnosis = await diagnosed(engine.backend, SMALL, RIGHT, between=between)
    assert diagnosis.cause is cause and said in diagnosis.line, diagnosis.line


@pytest.mark.parametrize(
    ("served", "cause", "said"),
    [
        (
            with_layer(k=K.at[1].set(0)),
            Cause.MISSING_TENSOR,
            "model.layers.1.self_attn.k_proj.weight is all zeros",
        ),
        (
            with_layer(up=UP.at[0].set(UP[1]).at[1].set(UP[0])),
            Cause.MISNAMED_TENSOR,
            (
                "model.layers.0.mlp.up_proj.weight holds the numbers of"
                " model.layers.1.mlp.up_proj.weight"
            ),
        ),
        (
            with_layer(q=Q.at[1].set(Q[1].T)),
            Cause.TRANSPOSED_TENSOR,
            "model.layers.1.self_attn.q_proj.weight is trans",
        ),
        (BEFORE, Cause.STALE_VERSION, "is still that of version 0"),
    ],
    ids=["zeros", "misnamed", "transposed", "stale"],
)
async def test_a_wrong_tensor_is_read_back_and_named(
    engine: Engine, served: Params, cause: Cause, said: str
):
    await put(engine, served)
    await engine.backend.reset_prefix_cache()
    diagnosis = await diagnosed(
        engine.backend, SMALL, RIGHT, inspected=True, older={"version 0": BEFORE}
    )
    assert diagnosis.cause is cause and said in diagnosis.line, diagnosis.line


async def test_a_prefix_cache_that_outlives_its_weights_is_named(engine: Engine):
    await put(engine, BEFORE)
    await engine.backend.reset_prefix_cache()
    await rollouts(engine.backend, SMALL, lengths=LENGTHS)  # fills the cache
    await put(engine, RIGHT)
    diagnosis = await diagnosed(engine.backend, SMALL, RIGHT, older={"version 0": BEFORE})
    await engine.backend.reset_prefix_cache()
    assert (
        diagnosis.cause is Cause.STALE_PREFIX
        and "the weights of version 0 filled" in diagnosis.line
    ), diagnosis.line


@pytest.mark.parametrize(
    ("model", "served", "settings", "temperature", "cause", "said"),
    [
        (SMALL, replace(SMALL, rope=Rope(theta=5e5)), {}, 1.0, Cause.ROTARY, "theta=5e+05"),
        (GEMMA, replace(GEMMA, sliding_window=32), {}, 1.0, Cause.WINDOW, "a window of 32, not 16"),
        (
            MOE,
            replace(MOE, experts=replace(MOE.experts, per_token=1)),
            {},
            1.0,
            Cause.EXPERTS,
            "1 expert a token",
        ),
        (SMALL, SMALL, {"dtype": "bfloat16"}, 1.0, Cause.DTYPE, "bfloat16"),
        (
            SMALL,
            SMALL,
            {"engine_args": {"logprobs_mode": "raw_logprobs"}},
            0.7,
            Cause.TEMPERATURE,
            "before it is applied",
        ),
    ],
    ids=["rope theta", "window", "experts per token", "bfloat16", "raw log-probs"],
)
async def test_a_setting_that_differs_is_named(
    tmp_path: Path,
    model: DecoderConfig,
    served: DecoderConfig,
    settings: dict[str, Any],
    temperature: float,
    cause: Cause,
    said: str,
):
    params = tiny_params(0, model)
    save_hf(tmp_path, served, params)
    async with running(tmp_path, **settings) as backend:
        diagnosis = await diagnosed(backend, model, params, temperature=temperature)
    assert diagnosis.cause is cause and said in diagnosis.line, diagnosis.line
