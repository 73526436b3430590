"""Training on given sequences. Expected losses, gradients and updates are PyTorch's, in float64."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import chain
from pathlib import Path

import jax
import numpy as np
import pytest

from jax_agent_rl.config import LearnerConfig, LoraConfig
from jax_agent_rl.learner.sequence_learner import LOSSES, AdamParams, SequenceLearner
from jax_agent_rl.learner.sequences import TrainingSequence
from jax_agent_rl.models.hf import save_hf
from tests.messages import raises
from tests.tiny import TINY, tiny_params

torch = pytest.importorskip("torch")

NAMES = {
    "embed": lambda peer: peer.model.embed_tokens.weight,
    "final_norm": lambda peer: peer.model.norm.weight,
    "q": lambda peer: peer.model.layers[1].self_attn.q_proj.weight,
    "down": lambda peer: peer.model.layers[0].mlp.down_proj.weight,
}


@functools.cache
def first_learner(pack_length: int, rank: int | None) -> SequenceLearner:
    lora = None if rank is None else LoraConfig(rank=rank)
    config = LearnerConfig(pack_length=pack_length, remat="none", lora=lora)
    return SequenceLearner(TINY, tiny_params(), config=config, reference=True)


def make_learner(pack_length: int = 48, rank: int | None = None) -> SequenceLearner:
    """Return a new learner; all with the same arguments run the same programs."""
    return first_learner(pack_length, rank).twin()


def named(params) -> dict[str, np.ndarray]:
    chosen = {"q": params["layers"]["q"][1], "down": params["layers"]["down"][0]}
    return {name: np.asarray(params[name] if name in params else chosen[name]) for name in NAMES}


def sequences(count: int = 5, *, scored: float = 0.6, seed: int = 0) -> list[TrainingSequence]:
    """Sequences that begin alike; some of their tokens are scored, some with weight 0 or less."""
    rng = np.random.default_rng(seed)
    masks = np.random.default_rng(seed + 100)
    common = rng.integers(1, TINY.vocab_size, 7)
    data = []
    for _ in range(count):
        ids = np.concatenate(
            [common, rng.integers(1, TINY.vocab_size, rng.integers(3, 20))]
        ).astype(np.int32)
        mask = rng.random(len(ids)) < scored
        mask[0] = False
        mask[-1] = True
        size = int(mask.sum())
        weight = rng.choice([-0.5, 0.0, 1.0, 2.0], size)
        advantage = rng.normal(size=size)
        old = np.log(1 / TINY.vocab_size) + rng.normal(scale=0.4, size=size)
        of_loss = {"weight": weight, "advantage": advantage, "old_logprob": old}
        in_ratio = np.append(masks.choice([0.0, 1.0], size - 1), 1.0)
        data.append(TrainingSequence(token_ids=ids, loss_mask=mask, **of_loss, ratio_mask=in_ratio))
    return data


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    """The same model in transformers, float64."""
    from transformers import AutoModelForCausalLM

    folder: Path = tmp_path_factory.mktemp("model")
    save_hf(folder, TINY, tiny_params())
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )


def peer_logprobs(peer, sequence: TrainingSequence):
    ids = torch.tensor(sequence.token_ids.astype(np.int64))
    logprobs = torch.log_softmax(peer(ids[None]).logits[0], -1)
    if sequence.targets is not None:
        ids = ids.clone()
        ids[torch.tensor(sequence.loss_mask)] = torch.tensor(sequence.targets.astype(np.int64))
    return logprobs[:-1].gather(1, ids[1:, None])[:, 0][torch.tensor(sequence.loss_mask[1:])]


def peer_loss(peer, loss: str, sequence: TrainingSequence):
    """The losses as Tinker's documentation defines them."""
    logprob = peer_logprobs(peer, sequence)
    weight = torch.tensor(sequence.weight)
    advantage = torch.tensor(sequence.advantage)
    old = torch.tensor(sequence.old_logprob)
    ratio = torch.exp(logprob - old)
    mean = (logprob - old)[torch.tensor(sequence.ratio_mask) != 0].mean().detach()
    of_sequence = torch.exp(mean + logprob - logprob.detach())
    per_token = {
        "cross_entropy": lambda: -logprob,
        "importance_sampling": lambda: -ratio * advantage,
        "ppo": lambda: -torch.min(ratio * advantage, ratio.clamp(0.9, 1.3) * advantage),
        "cispo": lambda: -(ratio.clamp(0.9, 1.3).detach() * logprob * advantage),
        "dro": lambda: -(logprob * advantage - 0.5 * 0.3 * (logprob - old) ** 2),
        "gspo": lambda: (
            -torch.min(of_sequence * advantage, of_sequence.clamp(0.9, 1.3) * advantage)
        ),
    }[loss]()
    return (weight * per_token).sum()


CONSTANTS = {
    name: {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3}
    for name in ("ppo", "cispo", "gspo")
} | {"dro": {"beta": 0.3}}


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradient_are_those_of_pytorch(peer, loss):
    data = sequences()
    learner = make_learner()
    parts = [
        learner.forward_backward(part, loss=loss, **CONSTANTS.get(loss, {}))
        for part in (data[:3], data[3:])
    ]
    peer.zero_grad()
    expected = torch.stack([peer_loss(peer, loss, sequence) for sequence in data]).sum()
    expected.backward()
    assert sum(part.loss for part in parts) == pytest.approx(float(expected), rel=1e-5)
    gradients = named(learner.gradients)
    for name, weight in NAMES.items():
        truth = weight(peer).grad.numpy()
        np.testing.assert_allclose(
            gradients[name], truth, atol=1e-5 * np.abs(truth).max(), err_msg=name
        )
    logprobs_of_parts = chain.from_iterable(part.logprobs for part in parts)
    for sequence, logprobs in zip(data, logprobs_of_parts, strict=True):
        np.testing.assert_allclose(
            logprobs, peer_logprobs(peer, sequence).detach().numpy(), rtol=1e-5
        )


def test_several_targets_per_token_count_as_a_sequence_for_each_of_them(peer):
    """Two sequences have one context and different targets; some targets are named twice, some
    weigh nothing.
    """
    rng = np.random.default_rng(2)
    bare = {"weight": None, "advantage": None, "old_logprob": None, "ratio_mask": None}
    data = []
    for single in [*sequences(3), sequences(1)[0]]:
        shape = (single.num_scored, 4)
        targets = rng.integers(1, TINY.vocab_size, shape).astype(np.int32)
        targets[::2, 3] = targets[::2, 0]
        data.append(
            replace(
                single,
                **(bare | {"targets": targets, "weight": rng.choice([0.0, 0.2, 1.5], shape)}),
            )
        )
    columns = []
    for sequence in data:
        columns += sequence.columns()
    learner = make_learner()
    result = learner.forward_backward(data)
    peer.zero_grad()
    expected = torch.stack([peer_loss_of_weights(peer, column) for column in columns]).sum()
    expected.backward()
    assert result.loss == pytest.approx(float(expected), rel=1e-5)
    for name, weight in NAMES.items():
        truth = weight(peer).grad.numpy()
        np.testing.assert_allclose(
            named(learner.gradients)[name], truth, atol=1e-5 * np.abs(truth).max(), err_msg=name
        )
    of_columns = iter(make_learner().forward(columns))
    for sequence, of_pass, of_forward in zip(
        data, result.logprobs, make_learner().forward(data), strict=True
    ):
        apart = np.stack([next(of_columns) for _ in range(4)], -1)
        assert of_pass.shape == sequence.targets.shape
        np.testing.assert_allclose(of_pass, apart, atol=1e-5)
        np.testing.assert_allclose(of_forward, apart, atol=1e-5)


def peer_loss_of_weights(peer, sequence: TrainingSequence):
    return -(torch.tensor(sequence.weight) * peer_logprobs(peer, sequence)).sum()


def test_sequences_of_one_batch_have_as_many_targets_per_token():
    first, second = sequences(2)
    several = replace(
        second,
        targets=np.ones((second.num_scored, 2), np.int32),
        **dict.fromkeys(("weight", "advantage", "old_logprob", "ratio_mask")),
    )
    with raises(ValueError, key="targets per token", fix="make them equal"):
        make_learner().forward([first, several])
    with raises(ValueError, key="gspo", value="one target", fix="a sequence for each"):
        make_learner().forward_backward([several], loss="gspo")


def test_targets_of_ones_own_are_scored_in_the_sequences_context(peer):
    """Some score the same context several times, with other ids; others keep their own ids."""
    data = sequences()
    rng = np.random.default_rng(1)
    drawn = []
    for sequence in data:
        for _ in "ab":
            drawn.append(rng.integers(1, TINY.vocab_size, sequence.num_scored).astype(np.int32))
    data = [replace(data[n // 2], targets=targets) for n, targets in enumerate(drawn)] + data[:2]
    learner = make_learner()
    result = learner.forward_backward(data, loss="importance_sampling")
    peer.zero_grad()
    torch.stack(
        [peer_loss(peer, "importance_sampling", sequence) for sequence in data]
    ).sum().backward()
    gradients = named(learner.gradients)
    for name, weight in NAMES.items():
        truth = weight(peer).grad.numpy()
        np.testing.assert_allclose(
            gradients[name], truth, atol=1e-5 * np.abs(truth).max(), err_msg=name
        )
    for sequence, logprobs in zip(data, result.logprobs, strict=True):
        np.testing.assert_allclose(
            logprobs, peer_logprobs(peer, sequence).detach().numpy(), rtol=1e-5
        )


def test_forward_returns_the_log_probs_that_the_gradient_pass_does():
    learner = make_learner()
    data = sequences()
    for forward, backward in zip(
        learner.forward(data), learner.forward_backward(data).logprobs, strict=True
    ):
        np.testing.assert_allclose(forward, backward, rtol=1e-5)


@pytest.mark.parametrize("pack_length", [48, 512], ids=["whole", "halved"])
def test_the_likeliest_ids_are_those_of_pytorch(peer, pack_length):
    data = sequences(9)
    for sequence, (ids, logprobs) in zip(
        data, make_learner(pack_length).top_logprobs(data, 3), strict=True
    ):
        with torch.no_grad():
            log_probs = torch.log_softmax(
                peer(torch.tensor(sequence.token_ids.astype(np.int64))[None]).logits[0, :-1], -1
            )
        expected = log_probs[torch.tensor(sequence.loss_mask[1:])].topk(3)
        np.testing.assert_array_equal(ids, expected.indices)
        np.testing.assert_allclose(logprobs, expected.values, rtol=1e-5)


def test_weights_may_be_given_in_place_of_the_current_ones():
    learner = make_learner(rank=2)
    trained = make_learner(rank=2)
    data = sequences(3)
    trained.forward_backward(data)
    trained.optim_step(AdamParams(learning_rate=0.1))
    for mine, its in zip(
        learner.forward(data, trained=trained.trained), trained.forward(data), strict=True
    ):
        np.testing.assert_array_equal(mine, its)


def test_updates_are_those_of_pytorchs_adamw_with_the_numbers_of_each_call(peer):
    learner = make_learner()
    data = sequences()
    peer.zero_grad()
    initial = {name: parameter.detach().clone() for name, parameter in peer.named_parameters()}
    decayed = [p for n, p in peer.named_parameters() if "norm" not in n]
    norms = [p for n, p in peer.named_parameters() if "norm" in n]
    try:
        optimizer = torch.optim.AdamW(
            [{"params": decayed}, {"params": norms}], betas=(0.8, 0.9), eps=1e-6
        )
        for number, rate in enumerate((1e-2, 3e-3, 1e-3)):
            learner.forward_backward(data)
            numbers = AdamParams(
                learning_rate=rate,
                beta1=0.8,
                beta2=0.9,
                eps=1e-6,
                weight_decay=0.1,
                grad_clip_norm=float(number),
            )
            applied = learner.optim_step(numbers)
            optimizer.zero_grad()
            torch.stack(
                [peer_loss(peer, "cross_entropy", sequence) for sequence in data]
            ).sum().backward()
            norm = torch.nn.utils.clip_grad_norm_(peer.parameters(), float(number) or float("inf"))
            for group, decay in zip(optimizer.param_groups, (0.1, 0.0), strict=True):
                group.update(lr=rate, weight_decay=decay)
            optimizer.step()
            assert applied.norm == pytest.approx(float(norm), rel=1e-4)
        params = named(learner.params)
        for name, weight in NAMES.items():
            np.testing.assert_allclose(
                params[name], weight(peer).detach().numpy(), atol=1e-4, err_msg=name
            )
    finally:
        with torch.no_grad():
            for name, parameter in peer.named_parameters():
                parameter.copy_(initial[name])


def test_nothing_compiles_for_another_loss_another_constant_or_another_rate():
    learner = make_learner()
    data = sequences()
    learner.forward(data)
    learner.forward_backward(data)
    learner.optim_step(AdamParams())
    warm = learner.programs_compiled
    for loss in LOSSES:
        learner.forward_backward(
            data, loss=loss, **{name: value / 2 for name, value in CONSTANTS.get(loss, {}).items()}
        )
        learner.optim_step(
            AdamParams(
                learning_rate=1e-3, grad_clip_norm=0.5, weight_decay=0.1, beta1=0.5, eps=1e-4
            )
        )
    assert learner.programs_compiled == warm


def test_rows_that_are_halved_give_the_same_log_probs():
    data = sequences(9)
    full_rows = make_learner(pack_length=64)
    halved = make_learner(pack_length=512)
    for a, b in zip(
        full_rows.forward_backward(data).logprobs,
        halved.forward_backward(data).logprobs,
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_an_update_forgets_the_gradient_and_skips_one_not_finite():
    learner = make_learner()
    data = sequences(2)
    learner.forward_backward(data)
    learner.optim_step(AdamParams(learning_rate=1e-2))
    assert learner.optim_step(AdamParams()).norm == 0
    previous_params = jax.device_get(learner.trained)
    learner.forward_backward([replace(data[0], weight=np.full(data[0].num_scored, np.inf))])
    assert not learner.optim_step(AdamParams(learning_rate=1.0)).finite
    assert jax.tree.all(
        jax.tree.map(np.array_equal, previous_params, jax.device_get(learner.trained))
    )
    assert learner.optim_step(AdamParams()).finite


@pytest.mark.parametrize("rank", [None, 2], ids=["full", "lora"])
def test_the_reference_is_the_policy_of_the_beginning(rank):
    learner = make_learner(rank=rank)
    data = sequences(3)
    first = learner.forward(data)
    learner.forward_backward(data)
    learner.optim_step(AdamParams(learning_rate=0.1))
    assert np.abs(np.concatenate(learner.forward(data)) - np.concatenate(first)).max() > 1e-3
    for now, then in zip(learner.forward(data, reference=True), first, strict=True):
        np.testing.assert_array_equal(now, then)


def test_twins_share_programs_and_frozen_parameters_but_no_update():
    learner = make_learner(rank=2)
    data = sequences(3)
    learner.forward_backward(data)
    learner.optim_step(AdamParams())
    twin = learner.twin()
    warm = learner.programs_compiled
    np.testing.assert_array_equal(
        np.concatenate(twin.forward(data)), np.concatenate(learner.forward(data))
    )
    warm = learner.programs_compiled
    twin.forward_backward(data)
    twin.optim_step(AdamParams(learning_rate=0.1))
    assert twin.programs_compiled == learner.programs_compiled == warm
    assert (
        np.abs(np.concatenate(twin.forward(data)) - np.concatenate(learner.forward(data))).max()
        > 1e-3
    )


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"loss": "pop"}, {"value": "'pop'", "fix": "cross_entropy"}),
        (
            {"loss": "ppo", "beta": 1.0},
            {"key": "ppo", "value": "beta", "fix": ("clip_low_threshold", "clip_high_threshold")},
        ),
        (
            {"loss": "ppo", "drop": "old_logprob"},
            {"key": "old_logprob", "value": "sequence 0"},
        ),
        ({"loss": "dro", "drop": "advantage"}, {"key": "advantage"}),
        ({"loss": "gspo", "drop": "ratio_mask"}, {"key": "ratio_mask"}),
        (
            {"loss": "gspo", "ratio_mask": 0.0},
            {"key": "ratio mask of sequence 0", "value": "0 everywhere"},
        ),
        ({"targets": TINY.vocab_size}, {"key": "sequence 0", "value": "id 97", "fix": "0 to 96"}),
    ],
)
def test_a_call_that_is_refused_says_why_and_keeps_the_gradient(changed, named):
    learner = make_learner()
    data = sequences(2)
    learner.forward_backward(data)
    gradients = jax.device_get(learner.gradients)
    dropped = changed.pop("drop", None)
    wrong = [replace(sequence, **({dropped: None} if dropped else {})) for sequence in data]
    for name in changed.keys() & {"targets", "ratio_mask"}:
        wrong[0] = replace(wrong[0], **{name: np.full(wrong[0].num_scored, changed.pop(name))})
    with raises(ValueError, **named):
        learner.forward_backward(wrong, **changed)
    assert jax.tree.all(jax.tree.map(np.array_equal, gradients, jax.device_get(learner.gradients)))


def test_a_sequence_is_checked_when_it_is_made():
    ids = np.arange(4, dtype=np.int32)
    for mask in ([True] * 4, [False] * 4):
        with pytest.raises(ValueError, match="needs a token"):
            TrainingSequence(token_ids=ids, loss_mask=np.array(mask))
    with raises(ValueError, value=("4 token ids", "mask of 3")):
        TrainingSequence(token_ids=ids, loss_mask=np.array([False, True, True]))
    with raises(ValueError, key="weight", value=("(2,)", "1 scored tokens")):
        TrainingSequence(
            token_ids=ids, loss_mask=np.array([False, False, False, True]), weight=np.ones(2)
        )
