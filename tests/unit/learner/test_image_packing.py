"""Pictures in packed rows: shared where they are equal, told apart where their ids are, and trained
on.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from PIL import Image

from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.learner.batch import Batch
from jax_agent_rl.learner.image_packing import ImagePacking, image_packing
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.learner.packing import pack
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.types import Group, Trajectory
from tests.gradients import policy_gradient
from tests.messages import raises
from tests.tiny import TINY, tiny_params
from tests.tiny_vision import (
    IMAGE,
    TINY_QWEN3_5,
    TINY_VL,
    VIDEO,
    picture,
    placeholders,
    seeing_trajectory,
    seen_logprobs,
    vision_processor,
)

PROMPT = [5, 6]
FIRST = picture(1)
SECOND = picture(2)
WIDE = picture(3, 12, 8)
CLIP = [picture(seed) for seed in range(4, 7)]


def packed(*trajectories: Trajectory, share: bool = True, row_patches: int = 256) -> Batch:
    rows = ImagePacking(vision_processor=vision_processor(), row_patches=row_patches)
    return pack(trajectories, pack_length=96, share_prefixes=share, image_packing=rows)


def family(*answers: tuple[Image.Image, int]) -> list[Trajectory]:
    """One trajectory per picture: the same ids but for what was sampled last."""
    return [
        seeing_trajectory(
            PROMPT, ([7, 8], {"image": [item]}), ([last], {}), index=index, reward=float(index % 2)
        )
        for index, (item, last) in enumerate(answers)
    ]


def test_equal_pictures_are_one_and_others_are_not():
    same = Image.fromarray(np.asarray(FIRST))  # another object
    batch = packed(*family((FIRST, 10), (same, 11), (SECOND, 12)))
    (image,) = batch.images.images
    assert len(image) == 2 and batch.num_rows == 1
    # Prompt, sampled ids and the start of a picture; then twice four placeholders and an end; then
    # three last ids.
    assert batch.num_nodes == 5 + 2 * 5 + 3
    arrays = next(batch.micro_batches(1))
    multimodal = arrays["feature_index"][0]
    assert sorted(multimodal[multimodal >= 0].tolist()) == list(range(8))
    np.testing.assert_array_equal(arrays["token_ids"][0][multimodal >= 0], IMAGE)


def test_one_picture_in_two_places_is_looked_at_once():
    batch = packed(seeing_trajectory(PROMPT, ([7], {"image": [FIRST, FIRST]}), ([9], {})))
    (image,) = batch.images.images
    index = batch.images.feature_index
    assert len(image) == 1
    assert index[index >= 0].tolist() == [0, 1, 2, 3] * 2


def test_rotary_positions_of_shared_nodes_fit_all_their_trajectories():
    ts = [
        seeing_trajectory(
            PROMPT, ([7], {"image": [WIDE]}), ([8], {"video": [CLIP]}), ([9], {}), index=0
        ),
        seeing_trajectory(
            PROMPT, ([7], {"image": [WIDE]}), ([8, 9], {"image": [FIRST]}), ([9], {}), index=1
        ),
        seeing_trajectory(PROMPT, ([7, 8], {}), index=2),
    ]
    batch = packed(*ts)
    for t, (place,) in zip(ts, batch.packed, strict=True):
        expected = (
            vision_processor()
            .make_context(t.prompt_ids + t.response_ids, vision_processor().read(t.multi_modal))
            .positions
        )
        np.testing.assert_array_equal(
            batch.images.rope_positions[place.row, place.path], expected[1:]
        )


def test_a_placeholder_that_was_sampled_is_text():
    batch = packed(
        seeing_trajectory(PROMPT, ([*[IMAGE] * 4, VIDEO], {"image": [FIRST]}), ([IMAGE], {}))
    )
    index = batch.images.feature_index[0]
    ids = batch.token_ids[0]
    assert np.flatnonzero(index >= 0).tolist() == [8, 9, 10, 11]
    assert ids[2:7].tolist() == [*[IMAGE] * 4, VIDEO]
    assert batch.target_id[0, :6].tolist() == [
        *[IMAGE] * 4,
        VIDEO,
        IMAGE,
    ]


def test_rows_take_no_more_patches_than_they_may():
    ts = family((FIRST, 10), (SECOND, 11), (picture(9), 12))
    batch = packed(*ts, row_patches=32)
    assert [len(row) for row in batch.images.images] == [2, 1]
    assert {arrays["patches"].shape for arrays in batch.micro_batches(1)} == {
        (1, 32, 24),
        (1, 16, 24),
    }
    with raises(
        ValueError,
        key="g-0",
        value=("16 patches", 8),
        fix="set learner.row_patches",
    ):
        packed(*ts, row_patches=8)


@pytest.mark.parametrize("length", [24, 96])
def test_by_default_a_row_takes_all_that_its_tokens_can_show(length: int):
    rows = image_packing(vision_processor(), LearnerConfig(pack_length=length))
    same_pictures = [FIRST] * ((length - 3) // 6)  # each takes 4 ids between two
    batch = pack(
        [seeing_trajectory([5], ([7], {"image": same_pictures}), ([9], {}))],
        pack_length=length,
        image_packing=rows,
    )
    new_pictures = [picture(100 + i) for i in range(len(same_pictures))]
    pack(
        [seeing_trajectory([5], ([7], {"image": new_pictures}), ([9], {}))],
        pack_length=length,
        image_packing=rows,
    )
    assert rows.sizes[-1] >= 16 * len(new_pictures)
    assert len(batch.images.images[0]) == 1


def test_rows_without_pictures_are_those_of_a_model_of_text():
    text = seeing_trajectory(PROMPT, ([7, 8], {}), index=5)
    seeing = packed(text)
    plain = pack([text], pack_length=96)
    assert next(seeing.micro_batches(1)).keys() == next(plain.micro_batches(1)).keys()


def test_a_window_of_history_shows_what_stands_in_it():
    turns = [
        ([7], {"image": [FIRST]}),
        ([8], {"image": [SECOND]}),
        ([9], {"image": [WIDE]}),
        ([10], {}),
    ]
    batch = packed(seeing_trajectory(PROMPT, *turns, history_window=1))
    multimodal = [sum(i >= 0 for i in index) for index in batch.images.feature_index]
    # prompt | 7 a 8, prompt a 7... : each context has its own pictures, of 4, 4 and 6 ids
    assert sum(multimodal) == 4 + 4 + 6
    assert batch.token_ids[batch.images.feature_index >= 0].tolist() == [IMAGE] * 14


MODELS = pytest.mark.parametrize("model", [TINY_VL, TINY_QWEN3_5], ids=["attention", "delta net"])


def make_learner(model: DecoderConfig = TINY_VL, **changes) -> Learner:
    config = LearnerConfig(
        **{"learning_rate": 1e-2, "pack_length": 96, "remat": "none", "row_patches": 128} | changes
    )
    algorithm = AlgorithmConfig(adv_estimator="dr_grpo")
    return Learner(
        model,
        tiny_params(config=model),
        algorithm=algorithm,
        config=config,
        temperature=1.0,
        vision_processor=vision_processor(model.vision),
    )


def group(model: DecoderConfig = TINY_VL) -> list[Group]:
    """Two trajectories that leave each other after images, and one of text."""
    item = {"video": [CLIP]} if "video" in model.vision.placeholders else {"image": [picture(9)]}
    ts = [
        seeing_trajectory(
            PROMPT,
            ([7, 8], {"image": [FIRST, WIDE]}),
            ([9, 11], item),
            ([12], {}),
            reward=1,
        ),
        seeing_trajectory(
            PROMPT,
            ([7, 8], {"image": [FIRST, WIDE]}),
            ([9, 13], {"image": [SECOND]}),
            ([4], {}),
            index=1,
        ),
        seeing_trajectory(PROMPT, ([7, 8], {}), index=2, reward=0.5),
    ]
    return [Group(group_id="g", trajectories=tuple(ts))]


def gradient(model: DecoderConfig, **changes) -> dict:
    gradients, _ = policy_gradient(make_learner(model, **changes), group(model))
    return gradients


@MODELS
def test_log_probs_are_those_of_plain_full_passes(model: DecoderConfig):
    learner = make_learner(model, num_minibatches=2)  # which scores before it updates
    groups = group(model)
    _, experience = learner.prepare(groups)
    assert experience.old_logprobs is not None
    processor = vision_processor(model.vision)
    for t, got in zip(groups[0].trajectories, experience.old_logprobs, strict=True):
        ids = t.prompt_ids + t.response_ids
        scores = seen_logprobs(
            tiny_params(config=model),
            processor.make_context(ids, processor.read(t.multi_modal)),
            model,
        )
        expected = scores[np.arange(len(ids) - 1), ids[1:]][len(t.prompt_ids) - 1 :]
        np.testing.assert_allclose(got, expected[np.array(t.loss_mask, bool)], atol=1e-4)


@MODELS
def test_gradients_of_tower_and_decoder_do_not_depend_on_the_layout(model: DecoderConfig):
    expected = gradient(model, share_prefixes=False, pack_length=48)
    got = gradient(model, remat="full", micro_batch_size=2)
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(expected["vision"]))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max())


@pytest.mark.parametrize("freeze", [False, True])
@MODELS
def test_an_update_changes_the_tower_unless_it_is_frozen(model: DecoderConfig, freeze: bool):
    learner = make_learner(model, freeze_vision=freeze)
    initial_params = tiny_params(config=model)
    assert not learner.update(group(model)).skipped
    for path, x in jax.tree_util.tree_leaves_with_path(learner.params):
        old = initial_params
        for key in path:
            old = old[key.key]
        assert np.array_equal(x, old) == (freeze and path[0].key == "vision"), path
    assert ("vision" in learner.state.policy.params) != freeze


def test_a_critic_sees_too_and_its_tower_is_frozen_with_the_policys():
    config = LearnerConfig(pack_length=96, row_patches=128, freeze_vision=True)
    algorithm = AlgorithmConfig(adv_estimator="gae")
    learner = Learner(
        TINY_VL,
        tiny_params(config=TINY_VL),
        algorithm=algorithm,
        config=config,
        temperature=1.0,
        vision_processor=vision_processor(),
    )
    # A value head of zeros sees nothing.
    learner.critic.state.params["value_head"] = jax.numpy.ones(TINY_VL.hidden_size)
    (mini,) = learner.packer.mini_batches(group())
    values_before = learner.scorer.values(learner.critic.weights, mini.batch)[0]
    black = group()[0].trajectories[0]
    turn = replace(black.turns[0], appended_media={"image": (Image.new("RGB", (8, 8)), WIDE)})
    other_picture = [
        replace(group()[0], trajectories=(replace(black, turns=(turn, *black.turns[1:])),))
    ]
    (mini,) = learner.packer.mini_batches(other_picture)
    values_after = learner.scorer.values(learner.critic.weights, mini.batch)[0]
    np.testing.assert_allclose(values_before[:3], values_after[:3], atol=1e-5)
    assert np.abs(values_before[-1] - values_after[-1]) > 1e-3
    assert "vision" not in learner.critic.state.params
    assert not learner.update(group()).skipped


def test_the_first_step_compiles_for_every_number_of_patches():
    learner = make_learner()
    learner.update(group())  # rows of many patches
    compiled = learner.programs_compiled
    text = seeing_trajectory(PROMPT, ([7, 8], {}), reward=1)
    one_picture = seeing_trajectory(PROMPT, ([7, 8], {"image": [FIRST]}), ([9], {}), index=1)
    for members in ((text, text), (one_picture, text)):
        learner.update([Group(group_id="g", trajectories=members)])
    assert learner.programs_compiled == compiled


@pytest.mark.parametrize(("model", "target"), [(TINY_VL, "q_proj"), (TINY_QWEN3_5, "in_proj_qkv")])
def test_adapters_leave_the_tower_alone(model: DecoderConfig, target: str):
    learner = make_learner(model, lora={"rank": 2, "targets": [target]})
    assert not learner.update(group(model)).skipped
    jax.tree.map(
        np.testing.assert_array_equal,
        learner.params["vision"],
        tiny_params(config=model)["vision"],
    )


def test_what_a_learner_cannot_do_is_said():
    fixes = ("learner.mesh.context=1", '"language_model_only": true')
    with raises(ConfigError, key="learner.mesh.context", value=2, fix=fixes):
        image_packing(vision_processor(), LearnerConfig(mesh={"context": 2}))
    assert image_packing(None, LearnerConfig(mesh={"context": 2})) is None
    with raises(ConfigError, key="learner.freeze_vision=true", value="llama"):
        Learner(
            TINY,
            tiny_params(),
            algorithm=AlgorithmConfig(),
            config=LearnerConfig(freeze_vision=True),
            temperature=1.0,
        )


def test_placeholders_that_do_not_fit_name_their_trajectory():
    wrong = seeing_trajectory(PROMPT, ([7], {"image": [FIRST]}), ([9], {}), index=3)
    turn = wrong.turns[0]
    ids = tuple(i for i in placeholders({"image": [FIRST]}) if i != IMAGE)
    broken = Trajectory.from_turns(
        prompt_ids=PROMPT,
        turns=(
            type(turn)(output=turn.output, appended_ids=ids, appended_media=turn.appended_media),
            wrong.turns[1],
        ),
        trajectory_id="g-3",
        group_id="g",
        agent_name="tool_agent",
        finish_reason=wrong.finish_reason,
    )
    with raises(ValueError, key=("g-3", "image 1 of 1"), value="4 placeholders"):
        packed(broken)
