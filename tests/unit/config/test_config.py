"""The configuration: every problem at once, with the nearest valid name."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from jax_agent_rl.config import Config, build, load
from jax_agent_rl.config.loading import valid_keys
from jax_agent_rl.errors import ConfigError
from tests.messages import raises

MINIMAL = {"run_dir": "runs/x", "model": {"path": "m"}, "data": {"train": "t.jsonl"}}
QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"


def problems(tree: dict, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        build(tree, overrides)
    return error.value.problems


def test_the_shipped_recipe_is_valid():
    assert load(QUICKSTART).rollout.backend == "jetstream"


def test_overrides_win_over_the_file_and_are_parsed_as_yaml():
    config = load(
        QUICKSTART,
        ["learner.learning_rate=2e-5", "rollout.jetstream.prefill_buckets=[16, 64]", "seed=7"],
    )
    assert (
        config.learner.learning_rate,
        config.rollout.jetstream.prefill_buckets,
        config.seed,
    ) == (2e-5, (16, 64), 7)


def test_all_problems_are_reported_together():
    messages = problems(
        MINIMAL | {"rollout": {"group_sise": 2}}, "learner.learning_rate=fast", "trainer.steps=0"
    )
    assert len(messages) == 3


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("rollout.group_sise=4", "rollout.group_size"),
        ("learner.temperature=1.0", "rollout.temperature"),
        ("trainr.steps=3", "did you mean trainer?"),
        ("learning_rate=1e-5", "learner.learning_rate"),
    ],
)
def test_an_unknown_key_names_the_one_that_was_meant(override: str, meant: str):
    assert any(meant in line for line in problems(MINIMAL, override))


def test_a_group_of_one_is_refused_with_the_fix():
    (line,) = problems(MINIMAL, "rollout.group_size=1")
    assert "group_size >= 2" in line


def test_budgets_that_cannot_fit_are_refused():
    messages = problems(MINIMAL, "agent.max_response_length=4000")
    assert any("max_model_len" in line for line in messages)
    assert any("pack_length" in line for line in messages)


def numeric_keys(schema: dict, root: dict, prefix: str = "") -> Iterator[str]:
    """Keys whose value is a number or a list of some, by the JSON schema."""
    for name, entry in schema["properties"].items():
        forms = entry.get("anyOf", [entry])
        for form in forms:
            if "$ref" not in form:
                continue
            section = root["$defs"][form["$ref"].rpartition("/")[2]]
            if "properties" in section:
                yield from numeric_keys(section, root, f"{prefix}{name}.")
        if any(form.get("type") in ("number", "integer") and "enum" not in form for form in forms):
            yield prefix + name


NUMERIC_KEYS = tuple(numeric_keys(Config.model_json_schema(), Config.model_json_schema()))


def test_true_is_refused_wherever_a_number_is_due():
    """All at once: one tree of nothing but true."""
    messages = problems(MINIMAL, *(f"{key}=true" for key in NUMERIC_KEYS))
    refusals = [line for line in messages if "expected a number" in line]
    refused = {line.partition("=")[0] for line in refusals}
    assert len(NUMERIC_KEYS) > 150
    assert refused == set(NUMERIC_KEYS)


def test_true_within_a_list_of_numbers_is_refused_and_a_switch_is_not():
    messages = problems(MINIMAL, "algorithm.rollout_correction.rollout_rs_threshold=[[true, 2.0]]")
    assert len(messages) == 1
    assert "expected a number" in messages[0]
    assert (
        build(MINIMAL, ["algorithm.filter_zero_variance=true"]).algorithm.filter_zero_variance
        is True
    )


def test_a_malformed_override_is_reported_with_its_text():
    assert "'steps'" in problems(MINIMAL, "steps")[0]


def test_a_missing_file_is_reported_with_its_path(tmp_path: Path):
    with raises(ConfigError, value="nowhere.yaml"):
        load(tmp_path / "nowhere.yaml")


def test_the_saved_config_loads_again_unchanged():
    config = build(MINIMAL)
    assert build(config.model_dump(mode="json")) == config


def test_a_config_cannot_be_changed():
    with pytest.raises(Exception, match="frozen"):
        build(MINIMAL).seed = 3  # type: ignore[misc]


def test_every_key_is_described():
    assert [key for key, text in valid_keys(Config).items() if not text and key != "run_dir"] == []


def test_null_is_the_default_of_a_key_that_cannot_be_null():
    tree = MINIMAL | {"trainer": {"project_name": None, "steps": 7}}
    assert build(tree).trainer.project_name == build(MINIMAL).trainer.project_name
    assert build(tree).trainer.steps == 7
    assert build(tree, ["trainer=null"]).trainer == build(MINIMAL).trainer
    assert (
        build(MINIMAL, ["algorithm.filter_zero_variance=null"]).algorithm.filter_zero_variance
        is None
    )
    assert any(
        "trainer.setps: unknown key" in line for line in problems(MINIMAL, "trainer.setps=null")
    )
    assert any("model.path: required" in line for line in problems(MINIMAL, "model.path=null"))


def test_a_rollout_server_is_named_once():
    url = "http://10.0.0.5:8100"
    (line,) = problems(MINIMAL, "rollout.backend=remote", f"rollout.urls=[{url}, {url}]")
    assert url in line
    assert "more than once" in line


def test_an_external_engine_samples_from_the_raw_logits_or_not_at_all():
    external = "rollout.jetstream.engine_factory=my.module:make"
    assert build(MINIMAL, [external]).rollout.jetstream.engine_factory == "my.module:make"
    (line,) = problems(MINIMAL, external, "rollout.temperature=0.7")
    assert "temperature=0.7" in line
    assert "set temperature to 1" in line
    assert any(
        "learner's program" in line
        for line in problems(MINIMAL, external, "rollout.deterministic=true")
    )


@pytest.mark.parametrize(("key", "value"), [("kv_dtype", "int8"), ("quantize", "fp8")])
def test_an_external_engine_has_a_precision_of_its_own(key: str, value: str):
    overrides = [
        "rollout.jetstream.engine_factory=my.module:make",
        f"rollout.jetstream.{key}={value}",
    ]
    (line,) = problems(MINIMAL, *overrides)
    assert f"{key}={value} is used only without rollout.jetstream.engine_factory" in line
    assert "rollout.jetstream.engine_factory is my.module:make" in line


def test_a_deterministic_rollout_rounds_nothing():
    (problem,) = problems(MINIMAL, "rollout.deterministic=true", "rollout.jetstream.kv_dtype=int8")
    assert "kv_dtype=int8" in problem
    assert "kv_dtype=auto" in problem


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (
            ["model.min_pixels=4"],
            {"key": ("min_pixels=4", "max_pixels=None"), "fix": "both or neither"},
        ),
        (
            ["model.min_pixels=8", "model.max_pixels=4"],
            {"value": "min_pixels=8 exceeds max_pixels=4"},
        ),
    ],
)
def test_bounds_of_pixels_come_in_pairs_and_ascend(overrides: list[str], named: dict):
    with raises(ConfigError, **named):
        build(MINIMAL, overrides)
    assert build(MINIMAL, ["model.min_pixels=4", "model.max_pixels=8"]).model.pixels == (4, 8)
