"""The plain pass of a diagnosis computes what the learner's model does, and what it reuses changes
no number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jax_agent_rl.agreement import forward
from jax_agent_rl.agreement.hypotheses import Trial, tensors_of_one_layer
from jax_agent_rl.agreement.report import Cause, Tolerance
from jax_agent_rl.agreement.search import Search, TimeLimit, examine
from jax_agent_rl.agreement.subject import Context, DiagnosisSubject, Row
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.decoder import Decoder
from tests.agreement_testbed import GEMMA, LLAMA, MOE
from tests.examples import examples
from tests.tiny import logprobs_of, tiny_params

assert MOE.experts is not None
DENSE_FIRST = replace(MOE, experts=replace(MOE.experts, first_dense_layers=1))
SINKS = replace(LLAMA, attention_sinks=True, qkv_bias=True, o_bias=True)
TOLERANCE = Tolerance(token=5e-4, mean=5e-5)
IDS = tuple(np.random.default_rng(0).integers(3, 97, 60).tolist())


def subject(model: DecoderConfig = LLAMA, length: int = 60) -> DiagnosisSubject:
    at = np.arange(20, length)
    context = Context(
        name="t",
        token_ids=IDS[:length],
        prompt=20,
        at=at,
        rollout=np.zeros(len(at)),
        starts=(20, 30, 36, 44),
    )
    return DiagnosisSubject(
        model=model,
        params=tiny_params(1, model),
        dtype="float32",
        temperature=1.0,
        contexts=[context],
    )


@pytest.mark.parametrize(
    "model",
    [LLAMA, GEMMA, MOE, DENSE_FIRST, SINKS],
    ids=["llama", "gemma", "moe", "dense first", "sinks"],
)
def test_the_pass_is_the_decoders(model: DecoderConfig):
    tested = subject(model)
    expected = Decoder.from_params(model, tested.params)(jnp.asarray(IDS)[None])[0][0, 19:-1]
    np.testing.assert_allclose(tested.hidden(), expected, atol=3e-6)


def test_log_probs_are_those_of_one_full_pass_in_numpy():
    tested = subject()
    expected = logprobs_of(tested.params, IDS[:20], IDS[20:])
    np.testing.assert_allclose(tested.tokens(tested.hidden()).plain, expected, atol=2e-5)


def test_other_numbers_of_the_config_compile_nothing():
    tested = subject(GEMMA)
    expected = tested.hidden()
    for changed in (
        {"rms_norm_eps": 1e-3},
        {"attention_scale": 0.1},
        {"embed_scale": 2.0},
        {"sliding_window": 7},
        {"windowed_layers": (False, True, True)},
        {"rope": replace(GEMMA.rope, theta=123.0)},
        {"local_rope": GEMMA.rope},
    ):
        with compilations() as compiled:
            hidden = tested.hidden(model=replace(GEMMA, **changed))
        assert not np.allclose(hidden, expected, atol=1e-4), changed
        assert compiled == [], changed


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Collect what jax says of the programs that it compiles."""
    compiled: list[str] = []

    def listen(event: str, seconds: float, **about: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(f"{about}")

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_a_hidden_id_is_as_if_it_had_never_been_there():
    """The others keep their positions: hidden from later ids, id 25 has no effect on them."""
    tested = subject()
    row = tested.rows[0]
    until = row.visible_until.copy()
    until[25] = 26
    hidden = tested.hidden([replace(row, visible_until=until)])
    dropped = replace(row.drop(25, 26), at=row.at[7:] - 1)
    positions = np.delete(row.positions, 25)
    np.testing.assert_allclose(
        hidden[7:], tested.hidden([replace(dropped, positions=positions)]), atol=2e-5
    )


@settings(max_examples=examples(25))
@given(
    first=st.integers(1, 58),
    offset=st.integers(-3, 5),
    inserted=st.lists(st.integers(3, 96), max_size=3),
    hidden=st.tuples(st.integers(0, 57), st.integers(1, 59)),
)
def test_computing_only_what_comes_after_a_change_gives_the_same_scores(
    first: int, offset: int, inserted: list[int], hidden: tuple[int, int]
):
    tested = subject()
    plain = tested.split(tested.tokens(tested.hidden()).plain)

    def edit_row(context: Context, row: Row) -> Row:
        index = np.arange(len(row.token_ids))
        until = np.where(index == hidden[0], max(hidden[1], hidden[0] + 1), row.visible_until)
        positions = np.where(index >= first, row.positions + offset, row.positions)
        return replace(row, visible_until=until, positions=positions).insert(first, inserted)

    trial = Trial(cause=Cause.POSITION, label="", edit_row=edit_row)
    activations = forward.activations(tested.model, tested.weights(), tested.inputs(tested.rows))
    (full_scores,) = trial.scores(tested, plain)
    (part_scores,) = trial.scores(tested, plain, activations)
    np.testing.assert_allclose(part_scores, full_scores, atol=2e-5)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_computing_only_the_layers_after_a_change_gives_the_same_scores(layer: int):
    tested = subject()
    plain = tested.split(tested.tokens(tested.hidden()).plain)
    layers = tested.params["layers"]
    pair = [layer, min(layer + 1, 2)]
    changed = {name: x[jnp.asarray(pair)] for name, x in layers.items()}
    changed["up"] = changed["up"].at[0].multiply(2.0)
    params = tested.params | {"layers": layers | {"up": layers["up"].at[layer].multiply(2.0)}}
    trial = Trial(
        cause=Cause.WRONG_TENSOR, label="", params=lambda: params, change=lambda: (layer, changed)
    )
    activations = forward.activations(tested.model, tested.weights(), tested.inputs(tested.rows))
    (full_scores,) = trial.scores(tested, plain)
    (part_scores,) = trial.scores(tested, plain, activations)
    np.testing.assert_allclose(part_scores, full_scores, atol=2e-5)
    assert np.abs(part_scores - plain[0]).max() > 0.01


def test_trials_of_one_layer_change_the_tensors_of_its_kind_alone():
    """Layer 0 is dense, layer 1 has experts; only what both have can be exchanged."""
    tested = subject(DENSE_FIRST)
    plain = tested.split(tested.tokens(tested.hidden()).plain)
    activations = forward.activations(tested.model, tested.weights(), tested.inputs(tested.rows))
    trials = {trial.label: trial for trial in tensors_of_one_layer([0, 1])(tested)}
    q, up, router = (
        f"model.layers.{layer}.{module}.weight"
        for layer, module in ((0, "self_attn.q_proj"), (0, "mlp.up_proj"), (1, "mlp.gate"))
    )
    next_q = q.replace("layers.0", "layers.1")
    next_up = up.replace("layers.0", "layers.1")
    assert not any(next_up in label for label in trials)
    for label in (
        f"has no {up}",
        f"has no {router}",
        f"holds {q} and {next_q} in each other's place",
        "leaves out layer 0",
        "leaves out layer 1",
    ):
        trial = trials[label]
        (part_scores,) = trial.scores(tested, plain, activations)
        (full_scores,) = replace(trial, change=None).scores(tested, plain)
        np.testing.assert_allclose(part_scores, full_scores, atol=2e-5, err_msg=label)
        assert np.abs(part_scores - plain[0]).max() > 0.01, label


def test_a_model_that_remembers_more_than_keys_is_scored_by_its_decoder(
    monkeypatch: pytest.MonkeyPatch,
):
    """Its rows cannot be edited but for their ids; a wrong tensor is found all the same."""
    tested = subject()
    expected = tested.hidden()
    layers = tested.params["layers"]
    exchanged = {
        "gate": layers["gate"].at[1].set(layers["up"][1]),
        "up": layers["up"].at[1].set(layers["gate"][1]),
    }
    wrong = tested.params | {"layers": layers | exchanged}
    rollout = tested.tokens(tested.hidden(weights=wrong), wrong).plain
    context = replace(tested.contexts[0], rollout=rollout)
    tested = replace(tested, contexts=[context])

    monkeypatch.setattr(forward, "remembers_ids_apart", lambda config: False)
    np.testing.assert_allclose(tested.hidden(), expected, atol=3e-6)

    def move(context: Context, row: Row) -> Row:
        return replace(row, positions=row.positions + 1)

    def repeat_first_id(context: Context, row: Row) -> Row:
        return row.insert(1, row.token_ids[:1].tolist())

    moved = Trial(cause=Cause.POSITION, label="", edit_row=move)
    repeated = Trial(cause=Cause.TOKEN_DRIFT, label="", edit_row=repeat_first_id)
    assert not moved.can_be_computed(tested)
    assert repeated.can_be_computed(tested)

    limit = TimeLimit(1.0, lambda: 0.0)
    examined = examine(tested, TOLERANCE, limit)
    search = Search(examined=examined, tolerance=TOLERANCE, limit=limit)
    search.try_family("moved", lambda subject: (trial for trial in [moved]))
    search.try_family("a tensor", tensors_of_one_layer([1]))
    assert [finding.verdict for finding in search.findings] == ["not tested", "explains"]
    assert search.best is not None
    gate, up = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))
    assert search.best.label == f"holds {gate} and {up} in each other's place"
