"""Faults in a real JAX engine, kind by kind: numbers of the config, positions and masks and caches,
tensors, logits.

Each was written down before the hypotheses that find it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.agreement.report import JAX_ENGINE, Cause, Diagnosis
from jax_agent_rl.jetstream import attention, forward
from jax_agent_rl.jetstream.block_manager import BlockManager
from jax_agent_rl.jetstream.cpu import kernels as cpu_kernels
from jax_agent_rl.models.config import DecoderConfig, Params, Rope, YarnScaling
from jax_agent_rl.models.layers import Quantized, quantized
from jax_agent_rl.rollout.protocol import WeightUpdate
from jax_agent_rl.types import TokenOutput
from tests.agreement_testbed import (
    GEMMA,
    LLAMA,
    MOE,
    Between,
    as_if_asked,
    conversations,
    diagnosed_engine,
    diagnosis,
    jax_engine,
)
from tests.tiny import full_logits, tiny_params

UNTIED = replace(LLAMA, tie_word_embeddings=False)
BIASED = replace(LLAMA, qkv_bias=True, o_bias=True)
YARN = replace(
    LLAMA, rope=Rope(scaling=YarnScaling(factor=4.0, original_max_position_embeddings=32))
)
HALF = replace(LLAMA, rope=Rope(partial_rotary=0.5))
EQUAL = (21, 21, 21, 21)
SECOND = 21 + 8 + 5
"""Where the second turn begins in contexts whose prompts have 21 ids."""


def own_programs(model: DecoderConfig, number: int) -> DecoderConfig:
    """The same function, compiled anew: patched code is not what other tests have compiled."""
    return replace(model, max_position_embeddings=1000 + number)


def with_layers(params: Params, **changed: Any) -> Params:
    return {**params, "layers": {**params["layers"], **changed}}


def with_reversed_experts(stack: Any) -> Any:
    """Reverse the order of layer 1's experts."""
    return stack.at[1].set(stack[1][::-1])


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA computes decode steps, so that they can be patched."""
    monkeypatch.setattr(cpu_kernels, "kernels_digest", lambda: None)


def check(diagnosed: Diagnosis, cause: Cause, *said: str) -> None:
    lines = "\n".join(diagnosed.lines())
    assert diagnosed.cause is cause, lines
    assert all(part in diagnosed.line for part in said), lines


# --- numbers of the config ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "served", "cause", "said"),
    [
        (LLAMA, {"rms_norm_eps": 1e-2}, Cause.SETTING, "rms_norm_eps=0.01, not 1e-05"),
        (LLAMA, {"rms_norm_eps": 3e-3}, Cause.SETTING, "rms_norm_eps=0.0030"),
        (LLAMA, {"attention_scale": 1 / 8}, Cause.SETTING, "attention_scale=0.125"),
        (LLAMA, {"activation": "gelu_tanh"}, Cause.SETTING, "activation=gelu_tanh, not silu"),
        (LLAMA, {"rope": Rope(theta=27_000.0)}, Cause.ROTARY, "theta=2.69"),
        (LLAMA, {"rope": Rope(interleaved=True)}, Cause.ROTARY, "neighbouring numbers"),
        (HALF, {"rope": Rope()}, Cause.ROTARY, "partial_rotary=1, not 0.5"),
        (YARN,
         {"rope": replace(YARN.rope, scaling=replace(YARN.rope.scaling, attention_factor=1.0))},
         Cause.ROTARY, "attention_factor=1"),
        (GEMMA, {"embed_scale": 1.0}, Cause.SETTING, "embed_scale=1, not 5.66"),
        (GEMMA, {"sliding_window": 17}, Cause.WINDOW, "a window of 17, not 16"),
        (GEMMA, {"windowed_layers": (True, False, True)}, Cause.WINDOW,
         "the window in other layers"),
        (GEMMA, {"norms": "before"}, Cause.SETTING, "norms=before, not around"),
        (GEMMA, {"norm_offset": 0.0}, Cause.SETTING, "norm_offset=0, not 1"),
        (GEMMA, {"qk_norm": False}, Cause.SETTING, "qk_norm=False, not True"),
        (BIASED, {"qkv_bias": False}, Cause.SETTING, "qkv_bias=False, not True"),
    ],
    ids=["eps", "unusual eps", "attention scale", "activation", "unusual theta", "pairs",
         "partial rotary", "attention factor", "embed scale", "window", "windowed layers",
         "norms around", "norm offset", "qk norm", "biases"],
)  # fmt: skip
async def test_a_number_of_the_config_that_differs_is_named(
    model: DecoderConfig, served: dict[str, Any], cause: Cause, said: str
):
    params = tiny_params(1, model)
    served_config = replace(model, **served)
    if "norm_offset" in served:  # a norm of 0 would make everything equal
        norms = {
            name: x * 0.1 + 0.5 for name, x in params["layers"].items() if name.endswith("norm")
        }
        params = with_layers(params, **norms)
    served_names = served_config.parameter_shapes()["layers"]
    used = {name: x for name, x in params["layers"].items() if name in served_names}
    diagnosed = await diagnosed_engine(
        model, served_config, params=params, served_params={**params, "layers": used}
    )
    check(diagnosed, cause, said)


async def test_a_number_of_the_config_is_named_although_all_tensors_are_right():
    diagnosed = await diagnosed_engine(LLAMA, replace(LLAMA, rms_norm_eps=1e-2), inspected=True)
    check(diagnosed, Cause.SETTING, "rms_norm_eps=0.01, not 1e-05")
    assert any(
        finding.name == "layers" and "layer 0" in finding.detail for finding in diagnosed.findings
    )


# --- positions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "number", "said"),
    [
        (lambda at: jnp.where(at >= SECOND, at + 2, at), 20, "2 positions further from turn 2 on"),
        (lambda at: jnp.where(at >= SECOND, at - 1, at), 21, "1 position back from turn 2 on"),
        (
            lambda at: jnp.where(at >= SECOND, at - SECOND, at),
            22,
            "positions begin again at 0 at turn 2",
        ),
        (
            lambda at: jnp.where(at >= SECOND - 5, at - (SECOND - 5), at),
            23,
            "begin again at 0 at what follows turn 1",
        ),
        (
            lambda at: jnp.where(at >= SECOND, at - 5, at),
            24,
            "does not count the positions of what follows turn 1",
        ),
        (
            lambda at: jnp.where(at >= 40, at + 1, at),
            25,
            "puts ids 1 position further from id 40 on",
        ),
    ],
    ids=[
        "further",
        "back",
        "restart",
        "restart at the inserted ids",
        "stand still",
        "within a turn",
    ],
)
async def test_positions_that_are_shifted_from_a_later_turn_on_are_named(
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[jax.Array], jax.Array],
    number: int,
    said: str,
):
    prepare_mixers = forward.prepare_mixers
    monkeypatch.setattr(
        forward,
        "prepare_mixers",
        lambda config, positions, images: prepare_mixers(config, change(positions), images),
    )
    diagnosed = await diagnosed_engine(
        LLAMA, own_programs(LLAMA, number), talks=True, lengths=EQUAL
    )
    check(diagnosed, Cause.POSITION, said)


async def test_sampled_tokens_at_wrong_positions_between_right_ones_are_named(
    monkeypatch: pytest.MonkeyPatch,
):
    decode_step = forward.decode_step

    def further(config, mesh, kernels, params, cache, slots, adapters=None):
        slots = replace(slots, offsets=jnp.full_like(slots.positions, 1))
        return decode_step(config, mesh, kernels, params, cache, slots, adapters)

    without_kernels(monkeypatch)
    monkeypatch.setattr("jax_agent_rl.jetstream.programs.decode_step", further)
    diagnosed = await diagnosed_engine(LLAMA, own_programs(LLAMA, 2), talks=True)
    check(diagnosed, Cause.POSITION, "puts sampled tokens, and no others, 1 position further")


# --- masks and caches -----------------------------------------------------------------------------


def decode_with_mask(visible: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., Any]:
    """``attention.plain_decode`` that sees what ``visible(positions [B, 1], keys [S])`` says."""

    def decode(q, cached, new, positions, pages, sinks, *, window):
        def write(axis: int, old: jax.Array, new: jax.Array) -> jax.Array:
            at = (jnp.arange(len(positions)), *[slice(None)] * (axis - 1), positions)
            return old.at[at].set(jnp.squeeze(new, axis))

        cached = cached.by_position(write, attention.one_position(new, cached))
        seen = visible(positions[:, None], jnp.arange(cached.values.shape[2]))
        scores = jnp.einsum("bkgh,bkhs->bkgs", q, cached.keys, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e30), axis=-1)
        return jnp.einsum("bkgs,bksh->bkgh", weights, cached.values), cached

    return decode


def chunk_with_mask(
    visible: Callable[[jax.Array, jax.Array], jax.Array],
) -> Callable[..., jax.Array]:
    """``attention.chunk_mask`` that sees the same."""
    mask = attention.chunk_mask

    def masked(starts: jax.Array, count: int, length: int, window: int | None) -> jax.Array:
        chunk = starts[:, None] + jnp.arange(count)
        keys = jnp.concatenate(
            [jnp.broadcast_to(jnp.arange(length), (len(starts), length)), chunk], axis=1
        )
        return (
            mask(starts, count, length, window)
            & visible(chunk[:, :, None], keys[:, None])[:, None, None]
        )

    return masked


@pytest.mark.parametrize(
    ("visible", "number", "said"),
    [
        (lambda at, key: (key < at) | ((key == 0) & (at == 0)), 3,
         "sampled tokens do not attend to themselves"),
        (lambda at, key: (key <= at) & ((key != SECOND - 6) | (at < SECOND - 5)), 4,
         "the last id of turn 1 is not attended to"),
        (lambda at, key: (key <= at) & ((key >= SECOND) | (at < SECOND)), 5,
         "nothing before turn 2 is attended to"),
    ],
    ids=["not themselves", "a lost id", "a lost context"],
)  # fmt: skip
async def test_ids_that_are_not_attended_to_are_named(
    monkeypatch: pytest.MonkeyPatch,
    visible: Callable[[jax.Array, jax.Array], jax.Array],
    number: int,
    said: str,
):
    without_kernels(monkeypatch)
    monkeypatch.setattr(attention, "plain_decode", decode_with_mask(visible))
    if number != 3:
        monkeypatch.setattr(attention, "chunk_mask", chunk_with_mask(visible))
    diagnosed = await diagnosed_engine(
        LLAMA, own_programs(LLAMA, number), talks=True, lengths=EQUAL
    )
    check(diagnosed, Cause.MASK, said)


RIGHT = tiny_params(1, LLAMA)
BEFORE = with_layers(
    RIGHT,
    **{
        name: x + 0.03 * jnp.asarray(np.random.default_rng(0).standard_normal(x.shape), jnp.float32)
        for name, x in RIGHT["layers"].items()
    },
)
"""Weights of the version before."""


async def test_turns_that_older_weights_left_in_the_cache_are_named(
    monkeypatch: pytest.MonkeyPatch,
):
    backend = jax_engine(LLAMA, BEFORE)
    await backend.start()
    try:

        async def update(turn: int) -> None:
            if turn == 1:
                with monkeypatch.context() as patched:
                    patched.setattr(BlockManager, "reset", lambda self: None)
                    await backend.update_weights(
                        WeightUpdate(version=1, kind="arrays", payload=RIGHT)
                    )

        groups = await conversations(backend, LLAMA, before_turn=update)
        diagnosed = diagnosis(groups, LLAMA, RIGHT, since=1, older={"version 0": BEFORE})
    finally:
        await backend.close()
    check(diagnosed, Cause.STALE_PREFIX, "the weights of version 0 filled")


async def test_an_engine_that_took_older_weights_from_a_turn_on_is_named():
    backend = jax_engine(LLAMA, RIGHT)
    await backend.start()
    try:

        async def update(turn: int) -> None:
            if turn == 1:
                await backend.update_weights(WeightUpdate(version=1, kind="arrays", payload=BEFORE))

        groups = await conversations(backend, LLAMA, before_turn=update)
        diagnosed = diagnosis(groups, LLAMA, RIGHT, older={"version 0": BEFORE})
    finally:
        await backend.close()
    check(diagnosed, Cause.STALE_VERSION, "the weights of version 0 from turn 2 on")


# --- ids ------------------------------------------------------------------------------------------


def of_later_turns(change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Between:
    """An engine that sees other ids from the second turn on, and believes that it saw what it was
    sent.
    """

    def ask(request):
        ids = request.prompt_ids
        return replace(request, prompt_ids=change(ids)) if len(ids) >= SECOND else request

    return Between(ask=ask, answer=as_if_asked)


@pytest.mark.parametrize(
    ("change", "cause", "said"),
    [
        (lambda ids: (*ids[: SECOND - 6], *ids[SECOND - 5 :]), Cause.TOKEN_DRIFT,
         "saw no id before what follows turn 1"),
        (lambda ids: (*ids[: SECOND - 5], ids[SECOND - 6], *ids[SECOND - 5 :]), Cause.TOKEN_DRIFT,
         "saw the id before what follows turn 1 twice"),
        (lambda ids: (*ids[: SECOND - 5], 1, *ids[SECOND - 5 :]), Cause.TOKEN_DRIFT,
         "saw BOS (id 1) before what follows turn 1"),
        (lambda ids: (*ids[:SECOND], 0, 0, *ids[SECOND:]), Cause.PADDING,
         "2 padding ids (0) before turn 2"),
        (lambda ids: (*ids[: SECOND - 5], *ids[SECOND - 4 :]), Cause.TOKEN_DRIFT,
         "saw what follows turn 1 without its id 1"),
        (lambda ids: (*ids[: SECOND - 3], *ids[SECOND - 2 :]), Cause.TOKEN_DRIFT,
         "saw what follows turn 1 without its id 3"),
        (lambda ids: (*ids[: SECOND - 3], *ids[SECOND:]), Cause.TOKEN_DRIFT,
         "saw what follows turn 1 without its last 3 ids"),
        (lambda ids: (*ids[: SECOND - 5], *ids[SECOND:]), Cause.TOKEN_DRIFT,
         "did not see what follows turn 1"),
        (lambda ids: (*ids[: SECOND - 2], *ids[SECOND - 3 :]), Cause.TOKEN_DRIFT,
         "saw what follows turn 1 with its id 3 twice"),
    ],
    ids=["dropped", "twice", "BOS", "padding", "first inserted", "one inserted", "cut",
         "all inserted", "one twice"],
)  # fmt: skip
async def test_other_ids_from_a_later_turn_on_are_named(
    change: Callable[[tuple[int, ...]], tuple[int, ...]], cause: Cause, said: str
):
    diagnosed = await diagnosed_engine(
        LLAMA, between=of_later_turns(change), talks=True, lengths=EQUAL
    )
    check(diagnosed, cause, said)


# --- tensors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("inspected", [False, True], ids=["log-probs alone", "inspected"])
@pytest.mark.parametrize("how", ["dropped", "not read"])
async def test_a_head_that_is_read_from_the_embeddings_of_an_untied_model_is_named(
    monkeypatch: pytest.MonkeyPatch, how: str, inspected: bool
):
    params = tiny_params(1, UNTIED)
    served = own_programs(UNTIED, 6)
    served_params = None
    if how == "dropped":  # the engine believes the model to be tied, and loads no head
        served = replace(served, tie_word_embeddings=True)
        served_params = {name: x for name, x in params.items() if name != "lm_head"}
    else:
        without_kernels(monkeypatch)
        logits = forward.next_logits

        def headless(config: DecoderConfig, params: Any, *arguments: Any) -> Any:
            return logits(config, replace(params, head=None), *arguments)

        monkeypatch.setattr(forward, "next_logits", headless)
    diagnosed = await diagnosed_engine(
        UNTIED, served, params=params, served_params=served_params, inspected=inspected
    )
    assert "lm_head.weight" in diagnosed.line and "embed" in diagnosed.line, "\n".join(
        diagnosed.lines()
    )
    assert diagnosed.cause in (Cause.MISNAMED_TENSOR, Cause.MISSING_TENSOR)


@pytest.mark.parametrize(
    ("model", "change", "cause", "said"),
    [
        (LLAMA, lambda p: with_layers(p, gate=p["layers"]["up"], up=p["layers"]["gate"]),
         Cause.MISNAMED_TENSOR,
         "mlp.gate_proj.weight and mlp.up_proj.weight in each other's place in every layer"),
        (LLAMA, lambda p: with_layers(p, k=p["layers"]["v"], v=p["layers"]["k"]),
         Cause.MISNAMED_TENSOR,
         "self_attn.k_proj.weight and self_attn.v_proj.weight in each other's place"
         " in every layer"),
        (LLAMA, lambda p: with_layers(p, q=p["layers"]["q"].swapaxes(1, 2)),
         Cause.TRANSPOSED_TENSOR, "self_attn.q_proj.weight transposed in every layer"),
        (LLAMA, lambda p: {**p, "final_norm": p["final_norm"] * 0 + 1}, Cause.MISSING_TENSOR,
         "model.norm.weight"),
        (LLAMA,
         lambda p: with_layers(p, o=p["layers"]["o"].at[1].set(0),
                               down=p["layers"]["down"].at[1].set(0)),
         Cause.MISSING_TENSOR, "leaves out layer 1"),
        (BIASED, lambda p: with_layers(p, q_bias=p["layers"]["q_bias"] * 0), Cause.MISSING_TENSOR,
         "self_attn.q_proj.bias"),
        (MOE,
         lambda p: with_layers(p, expert_up=with_reversed_experts(p["layers"]["expert_up"])),
         Cause.MISNAMED_TENSOR, "experts of model.layers.1.mlp.experts.0.up_proj.weight"),
        (LLAMA,
         lambda p: with_layers(p, **{name: jnp.roll(x, 1, 0) for name, x in p["layers"].items()}),
         Cause.MISNAMED_TENSOR, "each layer holds the one before it"),
    ],
    ids=["gate and up", "k and v", "transposed", "final norm", "a layer", "a bias", "experts",
         "order of layers"],
)  # fmt: skip
async def test_a_tensor_that_is_used_wrongly_is_named_by_log_probs_alone(
    model: DecoderConfig, change: Callable[[Params], Params], cause: Cause, said: str
):
    params = tiny_params(1, model)
    params["final_norm"] = jnp.asarray(
        np.random.default_rng(3).uniform(0.5, 1.5, model.hidden_size), jnp.float32
    )
    check(await diagnosed_engine(model, params=params, served_params=change(params)), cause, said)


async def test_query_heads_that_share_the_wrong_keys_are_named():
    size = LLAMA.head_dim
    heads = LLAMA.num_heads
    kv_heads = LLAMA.num_kv_heads
    order = np.arange(heads).reshape(heads // kv_heads, kv_heads).T.reshape(-1)
    rows = (order[:, None] * size + np.arange(size)).reshape(-1)
    layers = RIGHT["layers"]
    served = with_layers(RIGHT, q=layers["q"][:, rows], o=layers["o"][:, :, rows])
    diagnosed = await diagnosed_engine(LLAMA, params=RIGHT, served_params=served)
    check(diagnosed, Cause.MISNAMED_TENSOR, "query heads take turns among the key/value heads")


@pytest.mark.parametrize("name", ["a bias", "two experts"])
async def test_a_tensor_that_an_engine_lacks_or_exchanges_is_read_off_it(name: str):
    if name == "a bias":
        params = tiny_params(1, BIASED)
        layers = {
            key: x
            for key, x in params["layers"].items()
            if key not in ("q_bias", "k_bias", "v_bias")
        }
        served = replace(BIASED, qkv_bias=False)
        diagnosed = await diagnosed_engine(
            BIASED,
            served,
            params=params,
            served_params={**params, "layers": layers},
            inspected=True,
        )
        check(
            diagnosed,
            Cause.MISSING_TENSOR,
            "9 of",
            "proj.bias",
            "is not among the engine's tensors",
        )
        return
    params = tiny_params(1, MOE)
    up = params["layers"]["expert_up"]
    served_params = with_layers(params, expert_up=up.at[1, 0].set(up[1, 2]).at[1, 2].set(up[1, 0]))
    diagnosed = await diagnosed_engine(
        MOE, params=params, served_params=served_params, inspected=True
    )
    wrong = (
        "model.layers.1.mlp.experts.0.up_proj.weight holds the numbers of"
        " model.layers.1.mlp.experts.2.up_proj.weight"
    )
    check(diagnosed, Cause.MISNAMED_TENSOR, wrong)


async def test_permuted_scales_of_8_bit_weights_are_named(monkeypatch: pytest.MonkeyPatch):
    def permuted(x: jax.Array, dtype: jnp.dtype, *, axis: int) -> Quantized:
        right = quantized(x, dtype, axis=axis)
        return Quantized(right.numbers, jnp.roll(right.scale, 1, axis=-2))

    params = with_layers(RIGHT, up=RIGHT["layers"]["up"] * jnp.geomspace(0.5, 2, 48)[:, None])
    monkeypatch.setattr(forward, "quantized", permuted)
    diagnosed = await diagnosed_engine(
        LLAMA, own_programs(LLAMA, 7), params=params, inspected=True, quantize="int8"
    )
    assert diagnosed.cause is Cause.WRONG_TENSOR and "proj.weight" in diagnosed.line, diagnosed.line


async def test_adapters_of_another_scale_are_named():
    change = {
        name: BEFORE["layers"][name] - x
        for name, x in RIGHT["layers"].items()
        if name in ("q", "v")
    }
    twice = {name: RIGHT["layers"][name] + 2 * change[name] for name in change}
    learner = with_layers(RIGHT, **{name: RIGHT["layers"][name] + change[name] for name in change})
    diagnosed = await diagnosed_engine(
        LLAMA,
        params=learner,
        served_params=with_layers(RIGHT, **twice),
        older={"version 0 (the model's files)": RIGHT},
        adapters=True,
    )
    check(diagnosed, Cause.ADAPTER, "2 times")


# --- logits and answers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "number", "said"),
    [
        (lambda logits: 30.0 * jnp.tanh(logits / 30.0), 8, "caps logits at 30"),
        (lambda logits: logits.at[2].set(-1e9), 9, "never samples EOS"),
    ],
    ids=["cap", "EOS"],
)
async def test_logits_that_are_changed_before_sampling_are_named(
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[jax.Array], jax.Array],
    number: int,
    said: str,
):
    without_kernels(monkeypatch)
    logits = forward.next_logits
    monkeypatch.setattr(forward, "next_logits", lambda *arguments: change(logits(*arguments)))
    params = {**RIGHT, "final_norm": RIGHT["final_norm"] * 3}
    check(
        await diagnosed_engine(LLAMA, own_programs(LLAMA, number), params=params),
        Cause.LOGITS,
        said,
    )


async def test_a_cap_of_the_logits_that_an_engine_leaves_out_is_named():
    capped = replace(LLAMA, logit_softcap=3.0)
    params = {**RIGHT, "final_norm": RIGHT["final_norm"] * 3}
    diagnosed = await diagnosed_engine(capped, LLAMA, params=params, lengths=(21, 34))
    check(diagnosed, Cause.LOGITS, "does not cap logits")


async def test_an_engine_with_the_model_s_cap_of_logits_agrees():
    capped = replace(LLAMA, logit_softcap=3.0)
    params = {**RIGHT, "final_norm": RIGHT["final_norm"] * 3}
    diagnosed = await diagnosed_engine(capped, params=params, lengths=(21, 34))
    assert JAX_ENGINE["float32"].holds(diagnosed.gap), diagnosed.gap


async def test_rows_that_pad_the_vocabulary_are_named():
    served = replace(LLAMA, vocab_size=104)
    padded = {**RIGHT, "embed": jnp.pad(RIGHT["embed"], ((0, 7), (0, 0)))}
    diagnosed = await diagnosed_engine(
        LLAMA, served, params=RIGHT, served_params=padded, lengths=(21, 34)
    )
    check(diagnosed, Cause.LOGITS, "7 rows of zeros")


def penalized(request: Any, output: TokenOutput) -> TokenOutput:
    """A repetition penalty of 1.3, as a ``generation_config.json`` may bring one."""
    ids = list(request.prompt_ids)
    reported = []
    for token in output.token_ids:
        scores = full_logits(RIGHT, ids, LLAMA)[-1].astype(np.float64)
        seen = sorted(set(ids))
        scores[seen] = np.where(scores[seen] > 0, scores[seen] / 1.3, scores[seen] * 1.3)
        reported.append(float(scores[token] - np.log(np.exp(scores).sum())))
        ids.append(token)
    return replace(output, log_probs=tuple(reported))


async def test_a_repetition_penalty_is_named():
    check(
        await diagnosed_engine(LLAMA, params=RIGHT, between=Between(answer=penalized)),
        Cause.LOGITS,
        "1.3",
    )


async def test_log_probs_of_another_request_are_named():
    log_probs: list[tuple[float, ...]] = []

    def answer(request: Any, output: TokenOutput) -> TokenOutput:
        log_probs.append(output.log_probs)
        return replace(
            output, log_probs=log_probs[-2] if len(log_probs) % 2 == 0 else output.log_probs
        )

    diagnosed = await diagnosed_engine(LLAMA, params=RIGHT, between=Between(answer=answer))
    check(diagnosed, Cause.MIXED_ANSWERS, "log-probs of another request")


async def test_min_p_is_named():
    between = Between(
        ask=lambda request: replace(request, sampling=replace(request.sampling, min_p=0.1)),
        answer=lambda request, output: replace(output, supports=()),
    )
    check(
        await diagnosed_engine(LLAMA, params=RIGHT, between=between),
        Cause.TRUNCATED_SUPPORT,
        "min_p=0.1",
    )
