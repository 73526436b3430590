"""A real JAX engine with one fault each: the diagnosis names it. Without a fault there is nothing
to diagnose.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import pytest_asyncio

from jax_agent_rl.agreement.diagnosis import EngineView
from jax_agent_rl.agreement.report import JAX_ENGINE, Cause, Diagnosis
from jax_agent_rl.jetstream import programs
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.block_manager import BlockManager
from jax_agent_rl.jetstream.cpu import kernels as cpu_kernels
from jax_agent_rl.models.config import DecoderConfig, LinearScaling, Params, Rope
from jax_agent_rl.rollout.protocol import WeightUpdate
from tests.agreement_testbed import (
    GEMMA,
    LLAMA,
    MOE,
    Between,
    as_if_asked,
    diagnosis,
    jax_engine,
    rollouts,
)
from tests.tiny import tiny_params

pytestmark = pytest.mark.asyncio(loop_scope="module")

RIGHT = tiny_params(1, LLAMA)
BEFORE = {
    **RIGHT,
    "layers": {
        k: x + 0.01 * jnp.asarray(np.random.default_rng(0).standard_normal(x.shape), jnp.float32)
        for k, x in RIGHT["layers"].items()
    },
}
"""Weights of the version before: an update away."""


def with_layer(params: Params, **changed: Any) -> Params:
    """Return the parameters with other arrays of layers."""
    return {**params, "layers": {**params["layers"], **changed}}


Q, K, V, UP = (RIGHT["layers"][name] for name in ("q", "k", "v", "up"))


@dataclass
class Stage:
    """The engine that most faults are made in."""

    backend: JetStreamBackend

    async def serve(self, params: Params) -> int:
        version = self.backend.policy_version + 1
        await self.backend.update_weights(
            WeightUpdate(version=version, kind="arrays", payload=params)
        )
        return version

    async def diagnosed(
        self,
        params: Params = RIGHT,
        *,
        between: Between = Between(),  # noqa: B008
        inspected: bool = False,
        older: Mapping[str, Params] | None = None,
    ) -> Diagnosis:
        since = await self.serve(params)
        groups = await rollouts(self.backend, LLAMA, between=between)
        view = await look_into(self.backend) if inspected else None
        return await asyncio.to_thread(
            diagnosis, groups, LLAMA, RIGHT, engine=view, since=since, older=older
        )


async def look_into(backend: JetStreamBackend) -> EngineView:
    """Look into the engine as the trainer does, from a thread beside the loop."""
    loop = asyncio.get_running_loop()
    tensors = await backend.tensor_samples()

    def layers(ids):
        return asyncio.run_coroutine_threadsafe(backend.layer_outputs(ids), loop).result(timeout=60)

    return EngineView(tensors=tensors, layers=layers)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage() -> AsyncIterator[Stage]:
    backend = jax_engine(LLAMA, RIGHT)
    await backend.start()
    yield Stage(backend)
    await backend.close()


async def of_engine(
    model: DecoderConfig, served: DecoderConfig, *, inspected: bool = False, **options: Any
) -> Diagnosis:
    """Diagnose an engine that runs ``served`` where the learner has ``model``."""
    params = tiny_params(1, model)
    backend = jax_engine(served, params, **options)
    await backend.start()
    try:
        groups = await rollouts(backend, model)
        view = await look_into(backend) if inspected else None
        return await asyncio.to_thread(diagnosis, groups, model, params, engine=view)
    finally:
        await backend.close()


def found(name: str, diagnosed: Diagnosis) -> str:
    return next(finding.detail for finding in diagnosed.findings if finding.name == name)


@pytest.mark.parametrize("model", [LLAMA, MOE, GEMMA], ids=lambda model: model.family)
async def test_a_healthy_engine_agrees_to_its_tolerance_and_all_its_layers_do(model: DecoderConfig):
    params = tiny_params(1, model)
    backend = jax_engine(model, params)
    await backend.start()
    try:
        diagnosed = await asyncio.to_thread(
            diagnosis, await rollouts(backend, model), model, params
        )
        assert JAX_ENGINE["float32"].holds(diagnosed.gap), diagnosed.gap
        view = await look_into(backend)
        # A tolerance that nothing meets: what is read off the engine has to be right all the same.
        strict = replace(JAX_ENGINE["float32"], token=1e-12, mean=1e-12)
        looked = await asyncio.to_thread(
            diagnosis, await rollouts(backend, model), model, params, engine=view, tolerance=strict
        )
    finally:
        await backend.close()
    assert found("tensors", looked).endswith("tensors of the engine are the learner's")
    assert "all 3 layers agree" in found("layers", looked)


# --- requests and answers -------------------------------------------------------------------------


def resampled(**sampling: Any) -> Between:
    """An engine that samples otherwise than asked, and does not say from which ids."""
    return Between(
        ask=lambda request: replace(request, sampling=replace(request.sampling, **sampling)),
        answer=lambda request, output: replace(output, supports=()),
    )


def reworded(change: Any) -> Between:
    return Between(
        ask=lambda request: replace(request, prompt_ids=change(request.prompt_ids)),
        answer=as_if_asked,
    )


def shifted(request: Any, output: Any) -> Any:
    return replace(output, log_probs=(output.log_probs[0], *output.log_probs[:-1]))


@pytest.mark.parametrize(
    ("between", "cause", "said"),
    [
        (resampled(temperature=0.7), Cause.TEMPERATURE, "of temperature 0.7, not 1"),
        (resampled(top_k=5), Cause.TRUNCATED_SUPPORT, "top_k=5"),
        (resampled(top_p=0.8), Cause.TRUNCATED_SUPPORT, "top_p between 0."),
        (reworded(lambda ids: ids[4:]), Cause.TOKEN_DRIFT, "saw no first 4 ids"),
        (reworded(lambda ids: (ids[0], *ids)), Cause.TOKEN_DRIFT, "first id (BOS) twice"),
        (
            reworded(lambda ids: (0,) * (-len(ids) % 16) + ids),
            Cause.PADDING,
            "fill prompts up to 16 from the left",
        ),
        (Between(answer=shifted), Cause.POSITION, "the log-prob of the one before it"),
    ],
    ids=[
        "temperature",
        "top_k",
        "top_p",
        "cut context",
        "BOS twice",
        "padding",
        "shifted log-probs",
    ],
)
async def test_a_fault_between_request_and_answer_is_named(
    stage: Stage, between: Between, cause: Cause, said: str
):
    diagnosed = await stage.diagnosed(between=between)
    assert diagnosed.cause is cause and said in diagnosed.line, diagnosed.line


async def test_a_context_that_the_engine_itself_reports_as_another_is_token_drift(stage: Stage):
    diagnosed = await stage.diagnosed(
        between=Between(ask=lambda request: replace(request, prompt_ids=(1, *request.prompt_ids)))
    )
    assert diagnosed.cause is Cause.TOKEN_DRIFT
    assert "other ids than are trained on" in diagnosed.line


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("served", "cause", "said"),
    [
        (
            with_layer(RIGHT, k=K.at[2].set(0)),
            Cause.MISSING_TENSOR,
            "model.layers.2.self_attn.k_proj.weight is all zeros",
        ),
        (
            with_layer(RIGHT, up=UP.at[0].set(UP[1]).at[1].set(UP[0])),
            Cause.MISNAMED_TENSOR,
            (
                "model.layers.0.mlp.up_proj.weight holds the numbers of"
                " model.layers.1.mlp.up_proj.weight"
            ),
        ),
        (
            with_layer(RIGHT, q=Q.at[1].set(Q[1].T)),
            Cause.TRANSPOSED_TENSOR,
            "model.layers.1.self_attn.q_proj.weight is transposed",
        ),
        (
            with_layer(RIGHT, v=V.at[1].multiply(1.5)),
            Cause.WRONG_TENSOR,
            "model.layers.1.self_attn.v_proj.weight differs by",
        ),
        (
            with_layer(RIGHT, k=K.at[0].set(BEFORE["layers"]["k"][0])),
            Cause.MISSING_TENSOR,
            "model.layers.0.self_attn.k_proj.weight is still that of version 0",
        ),
        (BEFORE, Cause.STALE_VERSION, "is still that of version 0"),
    ],
    ids=["zeros", "misnamed", "transposed", "scaled", "left out", "stale"],
)
async def test_a_wrong_tensor_of_an_engine_that_can_be_looked_into_is_named(
    stage: Stage, served: Params, cause: Cause, said: str
):
    diagnosed = await stage.diagnosed(served, inspected=True, older={"version 0": BEFORE})
    assert diagnosed.cause is cause and said in diagnosed.line, diagnosed.line


async def test_the_first_layer_that_differs_is_named_with_what_differs_in_it(stage: Stage):
    diagnosed = await stage.diagnosed(with_layer(RIGHT, k=K.at[2].set(0)), inspected=True)
    said = found("layers", diagnosed)
    assert "layers 0 to 1 agree; layer 2 is the first that differs" in said
    assert "its keys differ and" in said


@pytest.mark.parametrize(
    ("served", "cause", "said"),
    [
        (
            with_layer(RIGHT, k=K.at[2].set(0)),
            Cause.MISSING_TENSOR,
            "no model.layers.2.self_attn.k_proj.weight",
        ),
        (
            with_layer(RIGHT, q=Q.at[1].set(Q[1].T)),
            Cause.TRANSPOSED_TENSOR,
            "model.layers.1.self_attn.q_proj.weight transposed",
        ),
        (BEFORE, Cause.STALE_VERSION, "the weights of version 0"),
    ],
    ids=["zeros", "transposed", "stale"],
)
async def test_a_wrong_tensor_is_named_by_what_the_engine_said_alone(
    stage: Stage, served: Params, cause: Cause, said: str
):
    diagnosed = await stage.diagnosed(served, older={"version 0": BEFORE})
    assert diagnosed.cause is cause and said in diagnosed.line, diagnosed.line


async def test_a_prefix_cache_that_outlives_its_weights_is_named(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
):
    await stage.serve(BEFORE)
    await rollouts(stage.backend, LLAMA)  # fills the cache
    with monkeypatch.context() as patched:
        patched.setattr(BlockManager, "reset", lambda self: None)
        diagnosed = await stage.diagnosed(older={"version 0": BEFORE})
    await stage.backend.reset_prefix_cache()
    assert (
        diagnosed.cause is Cause.STALE_PREFIX
        and "the weights of version 0 filled" in diagnosed.line
    ), diagnosed.line


# --- settings -------------------------------------------------------------------------------------

SCALED = replace(LLAMA, rope=Rope(scaling=LinearScaling(factor=4.0)))


@pytest.mark.parametrize(
    ("model", "served", "cause", "said"),
    [
        (LLAMA, replace(LLAMA, rope=Rope(theta=5e5)), Cause.ROTARY, "theta=5e+05"),
        (SCALED, replace(SCALED, rope=Rope()), Cause.ROTARY, "no scaling"),
        (GEMMA, replace(GEMMA, sliding_window=32), Cause.WINDOW, "a window of 32, not 16"),
        (
            GEMMA,
            replace(GEMMA, local_rope=GEMMA.rope),
            Cause.ROTARY,
            "by the full layers' settings everywhere",
        ),
        (
            MOE,
            replace(MOE, experts=replace(MOE.experts, per_token=1)),
            Cause.EXPERTS,
            "1 expert a token",
        ),
        (
            MOE,
            replace(MOE, experts=replace(MOE.experts, normalize=False)),
            Cause.EXPERTS,
            "not normalized",
        ),
    ],
    ids=[
        "rope theta",
        "rope scaling",
        "window",
        "local rope",
        "experts per token",
        "expert weights",
    ],
)
async def test_a_setting_that_differs_is_named(
    model: DecoderConfig, served: DecoderConfig, cause: Cause, said: str
):
    diagnosed = await of_engine(model, served)
    assert diagnosed.cause is cause and said in diagnosed.line, diagnosed.line


async def test_rotary_settings_change_the_first_layers_keys_and_not_its_values():
    diagnosed = await of_engine(LLAMA, replace(LLAMA, rope=Rope(theta=5e5)), inspected=True)
    assert "the embeddings agree; layer 0 is the first" in found("layers", diagnosed)
    assert "rotary settings" in found("layers", diagnosed)
    assert diagnosed.cause is Cause.ROTARY


@pytest.mark.parametrize(
    ("options", "said"),
    [({"dtype": "bfloat16"}, "bfloat16"), ({"quantize": "int8"}, "int8")],
    ids=["bfloat16", "int8"],
)
async def test_an_engine_of_a_coarser_precision_than_it_says_is_named(
    options: dict[str, Any], said: str
):
    diagnosed = await of_engine(LLAMA, LLAMA, **options)
    assert diagnosed.cause is Cause.DTYPE and said in diagnosed.line, diagnosed.line


async def test_sampled_tokens_at_other_positions_are_named(monkeypatch: pytest.MonkeyPatch):
    decode_step = programs.decode_step

    def further(config, mesh, kernels, params, cache, slots, adapters):
        slots = replace(slots, offsets=jnp.full_like(slots.positions, 2))
        return decode_step(config, mesh, kernels, params, cache, slots, adapters)

    monkeypatch.setattr(programs, "decode_step", further)
    monkeypatch.setattr(
        cpu_kernels, "kernels_digest", lambda: None
    )  # with these, prompts are decode steps, too
    longer_config = replace(LLAMA, max_position_embeddings=512)  # a program of its own
    diagnosed = await of_engine(LLAMA, longer_config)
    assert diagnosed.cause is Cause.POSITION and "2 positions further" in diagnosed.line, (
        diagnosed.line
    )
