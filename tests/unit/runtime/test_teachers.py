"""Teachers on the learner's devices: which are refused, and what rows need when only they are
learned from.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from jax_agent_rl.config import Config, build
from jax_agent_rl.errors import ConfigError, ModelError
from jax_agent_rl.models.hf import save_hf
from jax_agent_rl.rewards import registry
from jax_agent_rl.runtime.build import make_learner
from jax_agent_rl.runtime.policy import with_resolved_model
from jax_agent_rl.runtime.scoring import needed_services, open_scorer
from jax_agent_rl.runtime.teachers import check_teachers, require_teachers
from jax_agent_rl.types import Group
from tests.messages import raises
from tests.tiny import TINY, logprobs_of, tiny_params
from tests.trajectories import trajectory

WORDS = {f"w{i}": i for i in range(TINY.vocab_size)}


def model_folder(folder: Path, *, seed: int = 0, words: dict[str, int] = WORDS) -> Path:
    folder.mkdir()
    save_hf(folder, TINY, tiny_params(seed))
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


def settings(folder: Path, **distill) -> Config:
    student = folder / "student"
    if not student.exists():
        model_folder(student)
    tree = {"run_dir": "r", "model": {"path": str(student)}, "data": {"train": "t.jsonl"}}
    return build(tree | {"learner": {"pack_length": 1024}, "distill": distill})


def test_a_teacher_of_another_tokenizer_is_refused_with_a_token_that_differs(tmp_path: Path):
    swapped = WORDS | {"w5": 6, "w6": 5}
    teacher = model_folder(tmp_path / "teacher", words=swapped)
    with raises(ConfigError, value=("2 of 97 tokens", "'w5'", "5 here", "6 there")):
        check_teachers(settings(tmp_path, teachers=str(teacher)))


def test_a_teacher_may_have_more_tokens_but_not_fewer(tmp_path: Path):
    larger = model_folder(tmp_path / "more", words=WORDS | {"w97": 97})
    assert check_teachers(settings(tmp_path, teachers=str(larger))) == [
        f"distill.teachers: {larger}: llama, reads the policy's ids"
    ]
    fewer = model_folder(tmp_path / "fewer", words={word: i for word, i in WORDS.items() if i < 90})
    with raises(ConfigError, value=("'w90'", "90 here", "none there")):
        check_teachers(settings(tmp_path, teachers=str(fewer)))


def test_of_a_served_teacher_only_the_tokenizer_is_read(tmp_path: Path):
    teacher = model_folder(tmp_path / "teacher")
    (teacher / "model.safetensors").unlink()
    with pytest.raises(ModelError):
        check_teachers(settings(tmp_path, teachers=str(teacher)))
    served = settings(tmp_path, teachers=[{"path": str(teacher), "url": "http://there:8100"}])
    assert "served at http://there:8100" in check_teachers(served)[0]


def test_rows_without_a_teacher_are_named(tmp_path: Path):
    config = settings(tmp_path, teachers=[{"path": "a", "data_sources": ["math*"]}])
    require_teachers(config, [{"data_source": "math/1"}])
    with raises(ConfigError, key="data_source", value="['code', 'shop']"):
        require_teachers(
            config, [{"data_source": "shop"}, {"data_source": "math"}, {"data_source": "code"}]
        )


def test_a_learner_scores_by_the_teachers_in_their_folders(tmp_path: Path):
    teacher = model_folder(tmp_path / "teacher", seed=7)
    config = settings(tmp_path, teachers=str(teacher))
    sample = replace(trajectory([5, 6, 7], [8, 9, 10]), row={"data_source": "any"})
    difference = logprobs_of(tiny_params(7), [5, 6, 7], [8, 9, 10]) - logprobs_of(
        tiny_params(), [5, 6, 7], [8, 9, 10]
    )
    result = make_learner(config, TINY).update([Group(group_id="g", trajectories=(sample,))])
    assert result.metrics["kl_reference"] == pytest.approx(-np.mean(difference), abs=1e-4)
    assert result.metrics["advantage_mean"] == pytest.approx(np.mean(difference), abs=1e-4)


def test_a_teacher_may_be_a_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "jax_agent_rl.runtime.policy.resolve_model", lambda path: f"{path}/exports/step-3"
    )
    teachers = [{"path": "runs/a", "data_sources": ["math"]}, "runs/b"]
    config = with_resolved_model(settings(tmp_path, teachers=teachers))
    assert config.distill is not None
    assert [teacher.path for teacher in config.distill.teachers] == [
        "runs/a/exports/step-3",
        "runs/b/exports/step-3",
    ]


async def test_rows_need_no_reward_function_if_only_the_teacher_is_learned_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(registry, "REWARDS", dict(registry.REWARDS))
    rows = [
        {"data_source": "chats of ours"},
        {"data_source": "calculator", "reward_model": {"ground_truth": "4"}},
    ]
    with_rewards = build(
        json.loads(settings(tmp_path, teachers="t").model_dump_json()),
        ["algorithm.adv_estimator=grpo"],
    )
    with raises(ConfigError, key="data_source", value="'chats of ours'"):
        needed_services(with_rewards, rows)
    config = settings(tmp_path, teachers="t")
    assert needed_services(config, rows) == set()
    scorer = open_scorer(config, set())
    async with scorer as score:
        assert (await score(replace(trajectory([5], [6]), row=rows[0]))).reward == 0.0
