"""Which policy a command line names, and what it must not."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from jax_agent_rl.errors import CheckpointError, ConfigError
from jax_agent_rl.learner.checkpoint import Checkpointer
from jax_agent_rl.runtime.diagnosis import saved_versions
from jax_agent_rl.runtime.policy import ServedPolicy, open_policy, saved_run
from jax_agent_rl.runtime.policy_choice import NO_ROWS, PolicyChoice, choose
from jax_agent_rl.trainer.record import RunRecord
from tests.messages import raises

RECIPE = Path(__file__).parents[3] / "configs" / "quickstart.yaml"


def test_a_configuration_names_its_own_model():
    with open_policy(PolicyChoice(config=RECIPE, overrides=["seed=7"])) as subject:
        assert subject.config == subject.recorded
        assert subject.config.seed == 7
        assert subject.step == 0
        assert subject.name == subject.config.model.path


def test_a_folder_takes_the_models_place_and_leaves_the_rest():
    config = choose(PolicyChoice(config=RECIPE, model=Path("/models/other")))
    assert config.model.path == "/models/other"
    assert config.model_copy(update={"model": choose(PolicyChoice(config=RECIPE)).model}) == choose(
        PolicyChoice(config=RECIPE)
    )


def test_a_folder_alone_has_defaults_and_contexts_that_no_learner_limits():
    config = choose(
        PolicyChoice(
            model=Path("models/qwen"),
            overrides=["rollout.max_model_len=40000", "agent.max_response_length=32768"],
        )
    )
    assert config.run_dir == "runs/qwen"
    assert [source.path for source in config.data.train] == [NO_ROWS]
    (source,) = choose(PolicyChoice(model=Path("m"), data="rows.jsonl")).data.train
    assert source.path == "rows.jsonl"


@pytest.mark.parametrize(
    ("choice", "named"),
    [
        (PolicyChoice(), ("--config FILE", "--model FOLDER", "--run RUN")),
        (PolicyChoice(model=Path("m"), run=Path("r")), ("--model m", "--run r", "give one")),
        (PolicyChoice(config=RECIPE, step=3), ("--step 3", "give --run")),
        (
            PolicyChoice(
                config=RECIPE,
                model=Path("m"),
                overrides=["rollout.backend=remote", "rollout.urls=[http://10.0.0.5:1]"],
            ),
            ("http://10.0.0.5:1", "set rollout.backend=jetstream"),
        ),
        (PolicyChoice(config=RECIPE, overrides=["sed=1"]), "did you mean seed"),
    ],
)
def test_what_does_not_go_together_is_refused(choice: PolicyChoice, named):
    with raises(ConfigError, value=named):
        choose(choice)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    with (
        pytest.raises(CheckpointError, match="a run folder"),
        open_policy(PolicyChoice(run=tmp_path)),
    ):
        pass


def written_run(folder: Path, *, then: dict, now: dict) -> None:
    """A run whose checkpoint of step 4 was trained with other settings than it has now."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(now))
    checkpointer = Checkpointer(folder / "checkpoints", keep=1)
    identity = {"config": then, "content": {}}
    record = RunRecord(step=4, extra_versions=2, identity=identity)
    checkpointer.save(4, {"w": jnp.zeros(3)}, record.to_json())
    checkpointer.close()


def test_a_checkpoint_is_read_with_its_settings_and_the_models_present_place(tmp_path: Path):
    then = choose(
        PolicyChoice(config=RECIPE, overrides=["learner.lora.alpha=8", "model.path=/old"])
    )
    now = choose(
        PolicyChoice(config=RECIPE, overrides=["learner.lora.alpha=64", "model.path=/moved"])
    )
    written_run(
        tmp_path / "run", then=then.model_dump(mode="json"), now=now.model_dump(mode="json")
    )
    saved = saved_run(tmp_path / "run", 4)
    assert saved.config.learner.lora is not None
    assert saved.trained.learner.lora is not None
    assert saved.config.learner.lora.alpha == saved.trained.learner.lora.alpha == 8
    assert saved.config.model.path == saved.trained.model_path == "/moved"


def test_a_version_of_weights_is_found_in_the_checkpoint_of_its_step(tmp_path: Path):
    """Evaluations of an average took two versions before step 4, and two after it was saved."""
    tree = choose(
        PolicyChoice(config=RECIPE, overrides=["learner.ema_decay=0.9", "trainer.eval_every=2"])
    )
    settings = tree.model_dump(mode="json")
    written_run(tmp_path / "run", then=settings, now=settings)
    assert saved_versions(tmp_path / "run") == {0: 0, 6: 4, 8: 4}


def test_adapters_beside_a_checkpoint_make_another_policy(tmp_path: Path):
    for name, content in (("one", "1"), ("moved", "1"), ("other", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_text(content)

    def fingerprint(adapter: str, checkpoint: str = "c") -> str:
        config = choose(
            PolicyChoice(config=RECIPE, overrides=[f"rollout.adapters.a={tmp_path / adapter}"])
        )
        return ServedPolicy(
            config=config, recorded=config, name="p", step=1, checkpoint=checkpoint
        ).fingerprint()

    assert fingerprint("one") == fingerprint("moved") != fingerprint("other")
    assert fingerprint("one") != fingerprint("one", checkpoint="d")
