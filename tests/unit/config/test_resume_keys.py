"""Every key defines what is trained, names what does, or may change when a run resumes."""

import itertools
from typing import Any

import pytest

from jax_agent_rl.config import Config
from jax_agent_rl.config.base import Section
from jax_agent_rl.config.commands import DpoConfig, SftConfig, TinkerServerSettings
from jax_agent_rl.config.reference import list_keys
from jax_agent_rl.config.resume import (
    BY_CONTENT,
    DEFINES,
    MAY_CHANGE,
    is_named,
    require_known_keys,
    unclassified,
    value_differences,
)
from jax_agent_rl.errors import ConfigError
from tests.config_values import keys, other_value, replaced
from tests.messages import raises

TREES: dict[str, tuple[type[Section], dict[str, Any]]] = {
    "train": (Config, {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t.jsonl"}}),
    "sft": (SftConfig, {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t.jsonl"}}),
    "dpo": (DpoConfig, {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t.jsonl"}}),
    "tinker-server": (TinkerServerSettings, {"model": {"path": "m"}}),
}
ALLOWED = frozenset[str]().union(*MAY_CHANGE.values())


@pytest.mark.parametrize("name", TREES)
def test_every_key_is_in_one_set(name: str):
    """A new key is added to ``config/resume.py``.

    Does it define what is trained, or may it change?
    """
    assert list(unclassified(TREES[name][0])) == []


def test_no_set_names_a_key_that_is_gone():
    known = set()
    for tree, _ in TREES.values():
        known |= {key.path for key in list_keys(tree).values() if not key.is_section}
    assert (DEFINES | BY_CONTENT | ALLOWED) - known == set()


def dumped(config: Section) -> dict[str, Any]:
    return config.model_dump(mode="json")


@pytest.mark.parametrize("name", TREES)
def test_another_value_of_any_key_is_found_in_its_set_and_in_no_other(name: str):
    model, tree = TREES[name]
    config = model.model_validate(tree)
    for path, section, field in keys(model):
        if path in BY_CONTENT:
            continue
        changed = replaced(config, path, other_value(section.model_fields[field]))
        differences = {}
        for may_change in (False, True):
            listed = value_differences(
                model, dumped(config), dumped(changed), may_change=may_change
            )
            differences[may_change] = [difference.key for difference in listed]
        kind = path in ALLOWED
        # A section that is null on one side is one difference, and may hold keys of both kinds.
        assert any(path == key or path.startswith(f"{key}.") for key in differences[kind]), path
        if differences[kind] == [path]:
            assert differences[not kind] == [], path
        assert value_differences(model, dumped(changed), dumped(changed), may_change=kind) == []


def test_a_key_that_is_newer_than_a_record_had_its_default():
    model, tree = TREES["train"]
    new = dumped(model.model_validate(tree))
    old = {name: section for name, section in new.items() if name not in ("algorithm", "trace")}
    old["learner"] = {
        name: value for name, value in new["learner"].items() if name not in ("adam_eps", "mesh")
    }
    for may_change in (False, True):
        assert value_differences(model, old, new, may_change=may_change) == []
    changed = dumped(model.model_validate(tree | {"learner": {"adam_eps": 1e-5}}))
    (difference,) = value_differences(model, old, changed, may_change=False)
    assert (difference.key, difference.old, difference.new) == ("learner.adam_eps", 1e-8, 1e-5)


def test_a_section_that_comes_or_goes_is_one_difference():
    model, tree = TREES["train"]
    plain, lora = (
        dumped(model.model_validate(tree | learner_tree))
        for learner_tree in ({}, {"learner": {"lora": {"rank": 4}}})
    )
    for old, new in itertools.permutations((plain, lora)):
        (difference,) = value_differences(model, old, new, may_change=False)
        assert difference.key == "learner.lora"
        assert {str(difference.old), str(difference.new)} > {"None"}


def test_a_change_is_named_by_its_key_or_its_section():
    assert is_named("learner.lora.alpha", ["learner.lora"])
    assert is_named("seed", ["seed"])
    assert not is_named("learner.lora", ["learner.lora.alpha"])
    assert not is_named("search.topk", ["sea"])
    require_known_keys(Config, ["learner.lora", "algorithm.kl.coef"])
    with raises(
        ConfigError, key="--accept-change", value="learner.lora.alpa", fix="learner.lora.alpha"
    ):
        require_known_keys(Config, ["learner.lora.alpa"])
