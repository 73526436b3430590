"""Runs of ``sft`` and ``dpo`` on a tiny model: gradients, resuming, interruptions, and other
commands' use of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from jax_agent_rl.config import LearnerConfig
from jax_agent_rl.config.commands import DpoConfig, SftConfig
from jax_agent_rl.config.loading import build_tree
from jax_agent_rl.errors import CheckpointError, ConfigError, ModelError, NonFiniteError
from jax_agent_rl.evaluate.same import compare_runs
from jax_agent_rl.learner.sequence_learner import AdamParams, SequenceLearner
from jax_agent_rl.learner.sequences import TrainingSequence
from jax_agent_rl.models.hf import load_hf, save_hf
from jax_agent_rl.observe.run_dir import read_metrics
from jax_agent_rl.runtime.policy import export_run, open_policy, resolve_model
from jax_agent_rl.runtime.policy_choice import PolicyChoice
from jax_agent_rl.runtime.resume import CHANGES
from jax_agent_rl.supervised.conversations import Pair
from jax_agent_rl.supervised.train import Dpo, Sft, train
from tests.messages import raises
from tests.tiny import TINY, tiny_params
from tests.tiny_chat import CONFIG, params, tokenizer

RECIPE = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
WORDS = ("one", "two", "three", "answer", "question", "numbers")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_hf(folder, CONFIG, jax.tree.map(lambda x: 0.3 * x, params()))
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Questions and their answers, and the wrong answers."""
    file = tmp_path / "rows.jsonl"
    pairs = [(a, b) for a in WORDS for b in WORDS if a != b]
    lines = [
        {
            "prompt": [{"role": "user", "content": f"{a} and {b}"}],
            "completion": [{"role": "assistant", "content": a}],
            "chosen": [{"role": "assistant", "content": a}],
            "rejected": [{"role": "assistant", "content": b}],
        }
        for a, b in pairs
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def settings(
    kind: type[SftConfig], folder: Path, rows: Path, tmp_path: Path, **trainer
) -> SftConfig:
    tree: dict = {"dpo": {"beta": 2.0}} if kind is DpoConfig else {}
    tree |= {
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(folder)},
        "data": {"train": str(rows), "eval": str(rows)},
        "learner": {"learning_rate": 0.01, "pack_length": 64, "remat": "none"},
        "trainer": {"batch_size": 8, "epochs": 2, **trainer},
    }
    return build_tree(kind, tree)


def run(config: SftConfig, *, resume: bool = False, accept_changes: Sequence[str] = ()) -> dict:
    return asyncio.run(
        train(
            config,
            resume=resume,
            console=Console(quiet=True),
            exit_within=lambda seconds: None,
            accept_changes=accept_changes,
        )
    )


@pytest.mark.parametrize(("kind", "epochs", "steps"), [(SftConfig, 2, 8), (DpoConfig, 5, 19)])
def test_a_run_learns_its_rows_and_others_use_its_checkpoint(
    model_folder, rows, tmp_path, kind, epochs, steps
):
    summary = run(settings(kind, model_folder, rows, tmp_path, epochs=epochs))
    assert summary["steps"] == steps  # of 8 of 30 rows each
    assert summary["heldout_after"] < 0.8 * summary["heldout_before"]
    folder = tmp_path / "run"
    assert (folder / "loss.png").stat().st_size > 1000
    counts = [
        line["trained_tokens"]
        for line in read_metrics(folder / "metrics.jsonl")
        if line["kind"] == "step"
    ]
    assert len(counts) == steps and counts[-1] < counts[0]  # the last batch holds what is left
    exported = Path(resolve_model(str(folder)))
    assert exported.name == f"step-{steps}" and resolve_model(str(folder)) == str(exported), (
        "exported once"
    )
    assert resolve_model(str(model_folder)) == str(model_folder)
    _, trained = load_hf(exported)
    _, old_params = load_hf(model_folder)
    assert not np.allclose(trained["layers"]["q"], old_params["layers"]["q"])
    again = settings(kind, folder, rows, tmp_path, steps=1)
    assert (
        run(again)["heldout_before"] == pytest.approx(summary["heldout_after"], rel=1e-4)
        or kind is DpoConfig
    )
    assert json.loads((tmp_path / "run-2" / "config.json").read_text())["model"]["path"] == str(
        exported
    )


def test_a_resumed_run_ends_where_one_without_a_break_does(model_folder, rows, tmp_path):
    unbroken = settings(SftConfig, model_folder, rows, tmp_path)
    run(unbroken)
    short = unbroken.model_copy(update={"run_dir": str(tmp_path / "short")})
    build = {"steps": 3, "checkpoint_every": 2}
    first = short.model_copy(update={"trainer": short.trainer.model_copy(update=build)})
    run(first)
    run(short, resume=True)

    def lines(name: str) -> list[tuple]:
        records = read_metrics(tmp_path / name / "metrics.jsonl")
        return [(r["step"], r["trained_tokens"]) for r in records if r["kind"] == "step"]

    assert lines("short") == lines("run")
    # the learning rate is constant, so that a run that was to be shorter went the same way
    last = list(read_metrics(tmp_path / "short" / "metrics.jsonl"))[-1]["loss"]
    expected = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))[-1]["loss"]
    assert last == expected

    comparison = compare_runs(tmp_path / "run", tmp_path / "short")
    assert comparison.is_same and comparison.steps == len(lines("run"))
    differing = {difference.where for difference in comparison.causes}
    assert not any(where.startswith("provenance") for where in differing)
    assert any("resumed 1 times" in note for note in comparison.notes)


def changed(config: SftConfig, path: str, value: object) -> SftConfig:
    """The configuration with one key set."""
    return build_tree(type(config), config.model_dump(mode="json"), [f"{path}={json.dumps(value)}"])


def other_rows(folder: Path, rows: Path, tmp_path: Path, config: SftConfig) -> SftConfig:
    rows.write_text("".join(reversed(rows.read_text().splitlines(keepends=True))))
    return config


def other_weights(folder: Path, rows: Path, tmp_path: Path, config: SftConfig) -> SftConfig:
    copy = shutil.copytree(folder, tmp_path / "other")
    (copy / "model.safetensors").unlink()
    save_hf(tmp_path / "new", CONFIG, jax.tree.map(lambda x: 0.2 * x, params()))
    shutil.copy(tmp_path / "new" / "model.safetensors", copy)
    return changed(config, "model.path", str(copy))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (other_rows, {"value": "data.train: other rows"}),
        (other_weights, {"value": "model.path: other weights"}),
        (
            lambda *_: changed(_[-1], "learner.learning_rate", 0.02),
            {"key": "learner.learning_rate", "value": ("was 0.01", "is 0.02")},
        ),
        (
            lambda *_: changed(_[-1], "learner.lora.alpha", 3.0),
            {"key": "learner.lora.alpha", "value": ("was 32.0", "is 3.0")},
        ),
        (lambda *_: changed(_[-1], "seed", 5), {"key": "seed", "value": ("was 0", "is 5")}),
    ],
)
def test_another_run_is_not_resumed_and_nothing_of_this_one_changes(
    model_folder, rows, tmp_path, change, named
):
    config = changed(
        settings(SftConfig, model_folder, rows, tmp_path, steps=2), "learner.lora", {"rank": 2}
    )
    run(config)
    folder = tmp_path / "run"
    contents = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    changed_config = change(model_folder, rows, tmp_path, changed(config, "trainer.steps", 3))
    with raises(CheckpointError, **named):
        run(changed_config, resume=True)
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == contents


def test_what_is_changed_when_a_run_resumes_is_on_record(model_folder, rows, tmp_path):
    config = settings(SftConfig, model_folder, rows, tmp_path, steps=2)
    run(config)
    longer = changed(changed(config, "trainer.steps", 3), "learner.learning_rate", 0.02)
    with raises(
        ConfigError, key="--accept-change", value="learner.learning_rat", fix="did you mean"
    ):
        run(longer, resume=True, accept_changes=["learner.learning_rat"])
    assert run(longer, resume=True, accept_changes=["learner.learning_rate"])["steps"] == 3
    records = [json.loads(line) for line in (tmp_path / "run" / CHANGES).open()]
    assert {(r["step"], r["key"], r["old"], r["new"]) for r in records} == {
        (2, "learner.learning_rate", 0.01, 0.02),
        (2, "trainer.steps", 2, 3),
    }
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())
    assert recorded["command"] == "sft"
    assert recorded["learner"]["learning_rate"] == 0.02
    run(
        changed(longer, "trainer.steps", 4), resume=True
    )  # the checkpoint of step 3 is of the accepted settings


def test_a_step_that_was_trained_again_is_exported_again(model_folder, rows, tmp_path):
    """Exports are found by content: step 2 of a run that was rewound is another one."""
    config = settings(SftConfig, model_folder, rows, tmp_path, steps=2, checkpoint_every=1)
    run(config)
    folder = tmp_path / "run"
    abandoned = Path(resolve_model(str(folder)))
    shutil.rmtree(folder / "checkpoints" / "2")
    run(
        changed(config, "learner.learning_rate", 0.3),
        resume=True,
        accept_changes=["learner.learning_rate"],
    )
    exported = Path(resolve_model(str(folder)))
    assert exported.name == abandoned.name == "step-2"
    assert exported != abandoned
    abandoned_weights = load_hf(abandoned)[1]["embed"]
    exported_weights = load_hf(exported)[1]["embed"]
    assert not np.array_equal(abandoned_weights, exported_weights)
    with open_policy(PolicyChoice(run=folder, config=RECIPE)) as subject:
        np.testing.assert_array_equal(
            load_hf(subject.config.model.path)[1]["embed"], exported_weights
        )


def test_adapters_are_exported_with_the_alpha_they_were_trained_with(model_folder, rows, tmp_path):
    folder = tmp_path / "run"
    config = settings(SftConfig, model_folder, rows, tmp_path, steps=1)
    config = changed(config, "learner.lora", {"rank": 2, "alpha": 4})
    run(config)
    first_export = Path(resolve_model(str(folder)))
    assert Path(resolve_model(str(folder))) == first_export

    # A step that changes next to nothing; every merged change is twice as large.
    for key, value in {
        "learner.lora.alpha": 8,
        "learner.learning_rate": 1e-12,
        "trainer.steps": 2,
    }.items():
        config = changed(config, key, value)
    run(config, resume=True, accept_changes=["learner.lora", "learner.learning_rate"])
    second_export = Path(resolve_model(str(folder)))
    base = load_hf(model_folder)[1]["layers"]["q"]
    first = load_hf(first_export)[1]["layers"]["q"]
    second = load_hf(second_export)[1]["layers"]["q"]
    assert np.abs(first - base).max() > 1e-6
    np.testing.assert_allclose(second - base, 2 * (first - base), atol=1e-7)


def test_an_export_does_not_replace_the_model_that_the_run_was_trained_over(
    model_folder, rows, tmp_path
):
    base = shutil.copytree(model_folder, tmp_path / "base")
    run(changed(settings(SftConfig, base, rows, tmp_path, steps=1), "learner.lora", {"rank": 2}))
    contents = {file.name: file.read_bytes() for file in base.iterdir()}
    for adapter in (True, False):
        with raises(ModelError, key="base", value="trained over"):
            export_run(tmp_path / "run", base / ".", adapter=adapter)
    assert {file.name: file.read_bytes() for file in base.iterdir()} == contents


def test_adapters_are_not_merged_into_another_model(model_folder, rows, tmp_path):
    copy = shutil.copytree(model_folder, tmp_path / "copy")
    run(changed(settings(SftConfig, copy, rows, tmp_path, steps=1), "learner.lora", {"rank": 2}))
    export_run(tmp_path / "run", tmp_path / "exported")
    (copy / "model.safetensors").unlink()
    save_hf(tmp_path / "new", CONFIG, jax.tree.map(lambda x: 0.2 * x, params()))
    shutil.copy(tmp_path / "new" / "model.safetensors", copy)
    for adapter in (True, False):
        with raises(CheckpointError, key="model.path", value=("copy", "weights differ")):
            export_run(tmp_path / "run", tmp_path / f"again-{adapter}", adapter=adapter)


def test_an_interrupted_run_saves_the_step_it_was_at(model_folder, rows, tmp_path):
    config = settings(SftConfig, model_folder, rows, tmp_path, epochs=1000, eval_every=0)

    async def interrupted() -> None:
        task = asyncio.ensure_future(
            train(
                config, resume=False, console=Console(quiet=True), exit_within=lambda seconds: None
            )
        )
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not metrics.is_file() or sum('"step_seconds"' in line for line in metrics.open()) < 3:
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(interrupted())
    steps = [
        line["step"]
        for line in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if line["kind"] == "step"
    ]
    assert Path(resolve_model(str(tmp_path / "run"))).name == f"step-{steps[-1]}"
    assert steps[-1] >= 3


def test_nonfinite_gradients_end_a_run_with_the_last_parameters(model_folder, rows, tmp_path):
    config = settings(SftConfig, model_folder, rows, tmp_path)
    learner = config.learner.model_copy(update={"learning_rate": 1e30, "max_nonfinite_steps": 2})
    with raises(NonFiniteError, key="max_nonfinite_steps", value="2 training steps"):
        run(config.model_copy(update={"learner": learner}))


def test_adapters_are_trained_and_exported_for_peft(model_folder, rows, tmp_path):
    config = settings(SftConfig, model_folder, rows, tmp_path)
    learner = build_tree(type(config.learner), {**config.learner.model_dump(), "lora": {"rank": 2}})
    summary = run(config.model_copy(update={"learner": learner}))
    assert summary["heldout_after"] < summary["heldout_before"]
    assert (
        export_run(tmp_path / "run", tmp_path / "peft", adapter=True) / "adapter_config.json"
    ).is_file()


def test_commands_that_need_agents_ask_for_a_configuration(model_folder, rows, tmp_path):
    run(settings(SftConfig, model_folder, rows, tmp_path, steps=1))
    with (
        raises(ConfigError, key="a run of sft", fix="a YAML configuration"),
        open_policy(PolicyChoice(run=tmp_path / "run")),
    ):
        pass
    with pytest.raises(CheckpointError, match="no run with"):
        run(settings(SftConfig, model_folder, rows, tmp_path / "elsewhere"), resume=True)


def test_keys_without_an_effect_are_refused(model_folder, rows, tmp_path):
    tree = {
        "run_dir": "r",
        "model": {"path": "m"},
        "data": {"train": [{"path": "a.jsonl", "weight": 2}]},
    }
    with pytest.raises(ConfigError, match="a weight to"):
        build_tree(SftConfig, tree)
    with pytest.raises(ConfigError, match="trainer.eval_every"):
        build_tree(SftConfig, tree | {"data": {"train": "a.jsonl"}, "trainer": {"eval_every": 3}})
    with raises(ConfigError, key="train_on", value="unknown key"):
        build_tree(DpoConfig, tree | {"data": {"train": "a.jsonl", "train_on": ["tool"]}})


def test_the_loss_and_gradient_of_preferences_are_those_of_pytorch(tmp_path):
    """DPO (arXiv 2305.18290, equation 7) with label smoothing, by autograd in float64."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    beta = 0.4
    smoothing = 0.1
    save_hf(tmp_path, TINY, tiny_params())
    peer = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, attn_implementation="eager"
    )
    rng = np.random.default_rng(0)

    def sequence(prompt: np.ndarray) -> TrainingSequence:
        ids = np.concatenate([prompt, rng.integers(1, TINY.vocab_size, rng.integers(2, 9))]).astype(
            np.int32
        )
        return TrainingSequence(token_ids=ids, loss_mask=np.arange(len(ids)) >= len(prompt))

    prompts = [rng.integers(1, TINY.vocab_size, 5) for _ in range(4)]
    pairs = [Pair(chosen=(sequence(p), sequence(p)), rejected=(sequence(p),)) for p in prompts]
    reference = tiny_params(3)
    save_hf(tmp_path / "reference", TINY, reference)
    peer_reference = AutoModelForCausalLM.from_pretrained(
        tmp_path / "reference", dtype=torch.float64
    )

    def logprob(model, example):
        total = torch.zeros((), dtype=torch.float64)
        for sequence in example:
            ids = torch.tensor(sequence.token_ids.astype(np.int64))
            scores = torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(
                1, ids[1:, None]
            )[:, 0]
            total = total + scores[torch.tensor(sequence.loss_mask[1:])].sum()
        return total

    losses = []
    for pair in pairs:
        ratios = [
            logprob(peer, answer) - logprob(peer_reference, answer).detach()
            for answer in (pair.chosen, pair.rejected)
        ]
        margin = beta * (ratios[0] - ratios[1])
        sigmoid = torch.nn.functional.logsigmoid
        losses.append(-(1 - smoothing) * sigmoid(margin) - smoothing * sigmoid(-margin))
    expected = torch.stack(losses).mean()
    expected.backward()
    config = LearnerConfig(pack_length=32, remat="none")
    learner = SequenceLearner(TINY, reference, config=config, reference=True).twin(tiny_params())
    metrics = Dpo(learner=learner, beta=beta, label_smoothing=smoothing).step(pairs)
    assert metrics["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert learner.gradients is not None
    gradient = peer.model.layers[1].self_attn.q_proj.weight.grad.numpy()
    np.testing.assert_allclose(
        learner.gradients["layers"]["q"][1], gradient, atol=1e-4 * np.abs(gradient).max()
    )


TRL_LOSSES = {
    "sft": [6.0261430740, 5.9821386337, 5.9396667480, 5.8989105225, 5.8600759506],
    "dpo": [0.6931471825, 0.5871961713, 0.4984522164, 0.4248795509, 0.3642154038],
}
"""Losses before each of five updates of TRL 1.16's SFTTrainer and DPOTrainer on the rows of
:func:`given_rows`, by ``benchmarks/peers/trl_supervised.py``: float32, AdamW at 1e-3 (betas 0.9,
0.999), gradient clipped to 1, beta 0.5."""


def given_rows() -> dict[str, list]:
    """Six random prompts with a chosen and a rejected completion each."""
    rng = np.random.default_rng(7)

    def ids(low: int, high: int) -> list[int]:
        return rng.integers(3, CONFIG.vocab_size, rng.integers(low, high)).tolist()

    prompts = [ids(3, 9) for _ in range(6)]
    chosen, rejected = ([ids(2, 12) for _ in prompts] for _ in range(2))

    def example(prompt: list[int], completion: list[int]) -> tuple[TrainingSequence]:
        ids = np.array(prompt + completion, np.int32)
        return (TrainingSequence(token_ids=ids, loss_mask=np.arange(len(ids)) >= len(prompt)),)

    examples = [example(*parts) for parts in zip(prompts, chosen, strict=True)]
    worse = [example(*parts) for parts in zip(prompts, rejected, strict=True)]
    return {
        "sft": examples,
        "dpo": [Pair(chosen=c, rejected=r) for c, r in zip(examples, worse, strict=True)],
    }


@pytest.mark.parametrize("method", TRL_LOSSES)
def test_losses_over_five_updates_are_those_of_trl(model_folder, method):
    model, initial = load_hf(model_folder)
    learner = SequenceLearner(
        model, initial, config=LearnerConfig(pack_length=64, remat="none"), reference=True
    )
    trainer = {
        "sft": Sft(learner=learner),
        "dpo": Dpo(learner=learner, beta=0.5, label_smoothing=0.0),
    }[method]
    losses = []
    for _ in range(5):
        losses.append(trainer.step(given_rows()[method])["loss"])
        learner.optim_step(AdamParams(learning_rate=1e-3, beta2=0.999, grad_clip_norm=1.0))
    np.testing.assert_allclose(losses, TRL_LOSSES[method], atol=1e-5)
