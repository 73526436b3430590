"""Drafts from what was drawn before and from the prompt, against brute-force searches and the
engine's own draws.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.jetstream.drafting import (
    CHANCES,
    MATCHES,
    PROMPT_MATCHES,
    Draw,
    SuffixIndex,
    look_up,
    predict,
)
from jax_agent_rl.jetstream.sampling import sample, uniform

NUMBERS = st.floats(0, 1, exclude_max=True)
IDS = st.lists(st.integers(0, 2), max_size=20)  # few ids, so that much repeats
DRAWS = st.lists(
    st.builds(Draw, NUMBERS, st.integers(0, 2), st.floats(0.01, 1)), min_size=1, max_size=8
)
PARTS = st.lists(st.tuples(IDS, DRAWS), max_size=6)


def earlier(
    parts: list[tuple[list[int], list[Draw]]], context: list[int]
) -> tuple[int, list[Draw]]:
    """Return the length of the longest known suffix, and what was drawn after it."""
    for match in MATCHES:
        following = []
        for context_ids, draws in parts:
            ids = context_ids + [draw.token for draw in draws]
            for place, draw in enumerate(draws, len(context_ids)):
                if place >= match and ids[place - match : place] == context[-match:]:
                    following.append(draw)
        if following:
            return match, sorted(following)
    return 0, []


@given(PARTS, IDS, st.integers(1, 30), st.lists(NUMBERS, min_size=4, max_size=4))
def test_the_index_drafts_by_what_was_drawn_after_the_longest_suffix(
    parts, context, max_draws, numbers
):
    index = SuffixIndex(max_draws)
    for context_ids, draws in parts:
        index.add(context_ids + [draw.token for draw in draws], draws)
    while sum(len(draws) for _, draws in parts) > max_draws:
        parts = parts[1:]
    draft = index.draft(context, numbers)
    for number, token, evidence in zip(numbers, draft.ids, draft.evidence, strict=False):
        match, following = earlier(parts, context)
        wanted, chance = predict(following, number)
        assert token == wanted
        assert evidence == f"{match} {sum(chance >= bound for bound in CHANCES)}"
        context = [*context, token]
    assert len(draft.ids) == 4 or not earlier(parts, context)[0]


def test_an_index_keeps_no_more_than_it_may():
    index = SuffixIndex(max_ids=50)
    for start in range(0, 4000, 10):
        ids = list(range(start, start + 50))
        index.add(ids, [Draw(0.5, token, 1.0) for token in ids[-10:]])
    assert len(index) == 50 * len(MATCHES)
    assert index.draft(list(range(100, 110)), [0.5] * 3).ids == []
    assert index.draft(list(range(4000, 4020)), [0.1, 0.5, 0.9]).ids == [4020, 4021, 4022]


@pytest.mark.parametrize(
    ("draws", "number", "wanted"),
    [
        ([Draw(0.2, 7, 0.5)], 0.3, (7, 1.0)),  # it begins between 0 and 0.2, so 0.3 is always in it
        ([Draw(0.2, 7, 0.5)], 0.6, (7, 0.5)),  # if it begins after 0.1
        ([Draw(0.2, 7, 0.5)], 0.9, (7, 0.0)),
        ([Draw(0.5, 7, 0.2)], 0.4, (7, 0.5)),  # if it begins before 0.4, of 0.3 to 0.5
        ([Draw(0.2, 7, 0.9), Draw(0.8, 7, 0.9)], 0.5, (7, 1.0)),
        (
            [Draw(0.2, 7, 0.4), Draw(0.8, 9, 0.6)],
            0.5,
            (9, 1.0),
        ),  # 9 begins before 0.4: not between 0.5 and 0.8
        (
            [Draw(0.2, 7, 0.6), Draw(0.7, 9, 0.1)],
            0.5,
            (7, 1.0),
        ),  # 7 ends before 0.7, so it begins before 0.1
    ],
)
def test_the_chance_of_a_prediction(draws: list[Draw], number: float, wanted: tuple[int, float]):
    token, chance = predict(draws, number)
    assert (token, pytest.approx(chance, abs=1e-9)) == wanted


def test_the_engines_draws_are_predicted_where_the_most_frequent_id_is_wrong():
    count = 400
    position = 17
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=300) * 2, jnp.float32)
    seeds = np.arange(count, dtype=np.uint32)
    positions = np.full(count, position, np.int32)
    ids, log_probs, _ = sample(
        jnp.repeat(logits[:, None], count, axis=1),
        temperature=jnp.full(count, 0.7),
        seed=seeds,
        position=positions,
    )
    draws = [
        *map(Draw, uniform(seeds, positions).tolist(), ids.tolist(), np.exp(log_probs).tolist())
    ]
    assert [draw.token for draw in sorted(draws)] == sorted(
        ids.tolist()
    )  # so these are the numbers they were drawn by
    earlier_draws = sorted(draws[:200])
    later = draws[200:]
    predicted = [predict(earlier_draws, draw.uniform) for draw in later]
    right = np.array(
        [token == draw.token for (token, _), draw in zip(predicted, later, strict=True)]
    )
    sure = np.array([chance == 1.0 for _, chance in predicted])
    assert np.bincount(ids[200:]).max() / 200 < 0.5
    assert right.mean() > 0.85
    assert right[sure].all()
    assert sure.mean() > 0.6


@given(IDS, IDS)
def test_the_prompt_drafts_what_followed_the_last_of_the_longest_matches(prompt, sampled):
    ids = prompt + sampled
    wanted = []
    for match in reversed(PROMPT_MATCHES):
        for end in range(match, len(prompt)):
            if prompt[end - match : end] == ids[-match:]:
                wanted = prompt[end : end + 3]
    assert look_up(prompt, ids, 3).ids == wanted
