"""Which policy a command line names, and what it must not."""

from pathlib import Path

import pytest

from jax_agent_rl.errors import CheckpointError, ConfigError
from jax_agent_rl.runtime.policy import NO_ROWS, PolicyChoice, choose, open_policy

RECIPE = Path(__file__).parents[3] / "configs" / "quickstart.yaml"


def test_a_configuration_names_its_own_model():
    with open_policy(PolicyChoice(config=RECIPE, overrides=["seed=7"])) as subject:
        assert subject.config == subject.recorded and subject.config.seed == 7 and subject.step == 0
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
            model=Path("models/qwen"), overrides=["rollout.max_model_len=40000", "agent.max_response_length=32768"]
        )
    )
    assert config.run_dir == "runs/qwen" and [source.path for source in config.data.train] == [NO_ROWS]
    (source,) = choose(PolicyChoice(model=Path("m"), data="rows.jsonl")).data.train
    assert source.path == "rows.jsonl"


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (PolicyChoice(), "give a YAML configuration, --model FOLDER or --run RUN"),
        (PolicyChoice(model=Path("m"), run=Path("r")), "both name a policy"),
        (PolicyChoice(config=RECIPE, step=3), "--step 3 is of a run's checkpoint"),
        (
            PolicyChoice(
                config=RECIPE, model=Path("m"), overrides=["rollout.backend=remote", "rollout.urls=[http://10.0.0.5:1]"]
            ),
            "http://10.0.0.5:1 serve the weights they have",
        ),
        (PolicyChoice(config=RECIPE, overrides=["sed=1"]), "did you mean seed"),
    ],
)
def test_what_does_not_go_together_is_refused(choice: PolicyChoice, message: str):
    with pytest.raises(ConfigError, match=message):
        choose(choice)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="not a run folder"), open_policy(PolicyChoice(run=tmp_path)):
        pass
