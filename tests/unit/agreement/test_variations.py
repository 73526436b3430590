"""Every field of a model config is tried with other values, or named as one that changes nothing;
also a new one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, fields, make_dataclass, replace
from typing import Any

import numpy as np
import pytest

from jax_agent_rl.agreement.hypotheses import settings_of
from jax_agent_rl.agreement.report import Cause
from jax_agent_rl.agreement.subject import Context, DiagnosisSubject
from jax_agent_rl.agreement.variations import UNVARIED, USUAL, config_fields, fitted_params
from jax_agent_rl.models.config import (
    DecoderConfig,
    DynamicScaling,
    Experts,
    GlobalAttention,
    LatentAttention,
    LinearScaling,
    Llama3Scaling,
    PerLayerInputs,
    ProportionalScaling,
    Rope,
    YarnScaling,
)
from tests.agreement_testbed import GEMMA, LLAMA, MOE
from tests.tiny import GEMMA4, GEMMA4_EXPERTS, GEMMA4_SMALL, LATENT, tiny_params

CLASSES = (
    DecoderConfig,
    Rope,
    Experts,
    GlobalAttention,
    PerLayerInputs,
    LatentAttention,
    LinearScaling,
    Llama3Scaling,
    YarnScaling,
    DynamicScaling,
    ProportionalScaling,
)
SCALINGS = (
    LinearScaling(factor=2.0),
    Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64.0
    ),
    YarnScaling(factor=4.0, original_max_position_embeddings=64.0),
    DynamicScaling(factor=2.0, trained_positions=64, positions=256),
    YarnScaling(factor=4.0, original_max_position_embeddings=64.0, mscale=0.7, mscale_all_dim=0.3),
)
assert MOE.experts is not None
GROUPED = replace(
    MOE,
    experts=replace(
        MOE.experts,
        count=8,
        scoring="sigmoid",
        correction=True,
        groups=4,
        groups_per_token=2,
        scale=2.5,
        shared_size=16,
        shared_gated=True,
    ),
)
MODELS = (
    LLAMA,
    MOE,
    GROUPED,
    GEMMA,
    GEMMA4,
    GEMMA4_SMALL,
    GEMMA4_EXPERTS,
    replace(LATENT, rope=Rope(scaling=SCALINGS[2], interleaved=True)),
    *(replace(LLAMA, rope=Rope(scaling=scaling)) for scaling in SCALINGS),
)


def owners(config: Any) -> Iterator[Any]:
    """The dataclasses of a config."""
    yield config
    for each in fields(config):
        value = getattr(config, each.name)
        if type(value) in CLASSES:
            yield from owners(value)


def varied_keys(model: DecoderConfig) -> set[str]:
    """Return, by class and field, what is tried with another value in a model."""
    class_names = {id(owner): type(owner).__name__ for owner in owners(model)}
    keys = set()
    for tried in config_fields(model):
        *path, name = tried.path.split(".")
        owner = model
        for part in path:
            owner = getattr(owner, part)
        if tried.usual or tried.derived:
            keys.add(f"{class_names[id(owner)]}.{name}")
    return keys


def test_every_field_is_varied_in_some_model_or_named_with_the_reason_why_not():
    known = {f"{kind.__name__}.{each.name}" for kind in CLASSES for each in fields(kind)}
    varied = set().union(*(varied_keys(model) for model in MODELS))
    assert known == varied | UNVARIED.keys()
    assert not varied & UNVARIED.keys()
    assert all(UNVARIED.values())
    assert UNVARIED.keys() | USUAL.keys() <= known, "names of fields that are gone"


def test_no_value_computes_the_same_as_the_models_own_and_none_is_tried_twice():
    for model in MODELS:
        for tried in config_fields(model):
            values = [*tried.usual, *tried.derived]
            configs = [tried.config_with(value) for value in values]
            assert model not in configs
            assert all(configs.count(config) == 1 for config in configs), tried.path


@pytest.mark.parametrize(
    ("hint", "default", "expected"),
    [
        (float, 2.0, {4.0, 1.0, 20.0, 0.2}),
        (bool, False, {True}),
        (int, 4, {5, 3, 8, 2}),
        (float | None, 3.0, {None, 6.0, 1.5, 30.0, 0.3}),
    ],
    ids=["float", "bool", "int", "optional"],
)
def test_a_new_field_is_tried_without_being_named(hint: Any, default: Any, expected: set[Any]):
    extended: Any = make_dataclass(
        "Extended",
        [("residual_multiplier", hint, field(default=default))],
        bases=(DecoderConfig,),
        frozen=True,
        kw_only=True,
    )
    model = extended(**vars(LLAMA))
    (tried,) = [each for each in config_fields(model) if each.path == "residual_multiplier"]
    assert {*tried.usual, *tried.derived} == expected
    assert all(tried.config_with(value).residual_multiplier == value for value in expected)


def test_weights_of_another_config_exist_or_are_what_an_engine_derives():
    params = tiny_params(1, GEMMA)
    without = fitted_params(GEMMA, params, replace(GEMMA, qk_norm=False))
    assert without is not None
    assert without["layers"].keys() == params["layers"].keys() - {
        "q_norm",
        "k_norm",
    }
    biased = fitted_params(LLAMA, tiny_params(1, LLAMA), replace(LLAMA, o_bias=True))
    assert biased is not None
    assert not biased["layers"]["o_bias"].any()
    assert fitted_params(LLAMA, tiny_params(1, LLAMA), replace(LLAMA, head_dim=4)) is None
    assert fitted_params(MOE, tiny_params(1, MOE), replace(MOE, experts=None)) is None


def test_a_number_is_looked_for_between_those_that_were_tried():
    """A made-up engine, whose gap grows with the distance from rms_norm_eps=3e-3."""
    contexts = [
        Context(
            name="t",
            token_ids=(5, 6, 7, 8),
            prompt=2,
            at=np.array([2, 3]),
            rollout=np.array([-5.0, -5.0]),
        )
    ]
    subject = DiagnosisSubject(
        model=LLAMA,
        params=tiny_params(1, LLAMA),
        dtype="float32",
        temperature=1.0,
        contexts=contexts,
        gap=abs(LLAMA.rms_norm_eps / 3e-3 - 1),
    )
    trials = settings_of(Cause.SETTING)(subject)
    tried = []
    gap = None
    while True:
        try:
            trial = next(trials) if gap is None else trials.send(gap)
        except StopIteration:
            break
        value = trial.model.rms_norm_eps if trial.model is not None else 0.0
        tried.append(value)
        gap = abs(value / 3e-3 - 1)
    assert min(abs(value / 3e-3 - 1) for value in tried) < 0.02
