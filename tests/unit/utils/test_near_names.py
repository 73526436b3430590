"""Guesses at misspelt names: what a slip of the hand makes is guessed, what is far off is not."""

import ast
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.config import Config, build
from jax_agent_rl.config.loading import valid_keys
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.utils.near_names import did_you_mean, nearest, nearest_keys
from tests.messages import raises

PACKAGE = Path(__file__).parents[3] / "jax_agent_rl"
KEYS = sorted({*valid_keys(Config), *(key.rpartition(".")[0] for key in valid_keys(Config))} - {""})
"""Of the configuration, with its sections."""
NAMES = st.text("abcdeilmnorst_", min_size=1, max_size=14)


@cache
def edits(first: str, second: str) -> int:
    """Insertions, deletions, replacements and swaps of neighbours, by the definition (optimal
    string alignment).
    """
    if not first or not second:
        return len(first) + len(second)
    distances = [
        edits(first[1:], second) + 1,
        edits(first, second[1:]) + 1,
        edits(first[1:], second[1:]) + (first[0] != second[0]),
    ]
    if len(first) > 1 and len(second) > 1 and first[0] == second[1] and first[1] == second[0]:
        distances.append(edits(first[2:], second[2:]) + 1)
    return min(distances)


@st.composite
def slips(draw, names: list[str]) -> tuple[str, str]:
    """A name of at least four letters, and what one slip of the hand makes of it."""
    name = draw(st.sampled_from([name for name in names if len(name) >= 4]))
    at = draw(st.integers(0, len(name) - 2))
    letter = draw(st.sampled_from("aeimnrt"))
    slip = draw(
        st.sampled_from(
            [
                name[:at] + name[at + 1 :],
                name[:at] + letter + name[at:],
                name[:at] + letter + name[at + 1 :],
                name[:at] + name[at + 1] + name[at] + name[at + 2 :],
            ]
        )
    )
    return name, slip


LEAVES = sorted({key.rpartition(".")[2] for key in KEYS})


@given(slip=slips(LEAVES))
def test_one_slip_of_the_hand_is_guessed(slip: tuple[str, str]):
    name, written = slip
    assert (
        written in LEAVES or name in nearest(written, LEAVES) or len(nearest(written, LEAVES)) == 3
    )


@given(written=NAMES, names=st.lists(NAMES, max_size=8))
def test_what_is_guessed_is_near_and_what_is_nearer_comes_first(written: str, names: list[str]):
    guesses = nearest(written, names)
    distances = [edits(written, guess) for guess in guesses]
    for guess, distance in zip(guesses, distances, strict=True):
        words = set(written.split("_"))
        its_words = set(guess.split("_"))
        shares_words = words < its_words or its_words < words
        assert distance <= 3 and distance < max(len(written), len(guess)) or shares_words
    one_edit = [
        name for name in names if edits(written, name) <= 1 and max(len(name), len(written)) > 2
    ]
    assert len(guesses) == 3 or set(one_edit) <= set(guesses)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("trainr", "trainer"),
        ("sed", "seed"),
        ("trainer.step", "trainer.steps"),
        ("agent.response_length", "agent.max_response_length"),
        ("agent.max-response-length", "agent.max_response_length"),
        ("learner.group_size", "rollout.group_size"),
        ("group_size", "rollout.group_size"),
        ("rollout.max_concurrent_decodes", "rollout.jetstream.max_concurrent_decodes"),
        ("reward.judge.modle", "reward.judge.model"),
        ("rolout.jetstraem.dtype", "rollout.jetstream.dtype"),
    ],
)
def test_a_key_that_is_near_is_guessed(written: str, meant: str):
    assert nearest_keys(written, KEYS)[:1] == [meant]
    leaf = written.rpartition(".")[2]
    if "." in written and written.partition(".")[0] in {key.partition(".")[0] for key in KEYS}:
        with raises(ConfigError, key=leaf, fix=meant):
            build({}, [f"{written}=1"])


@pytest.mark.parametrize(
    "written",
    [
        "agent.max_tokens",
        "agent.reward_function",
        "learner.betas",
        "learner.scheduler_name",
        "model.attention_implementation",
        "rollout.engine_kwargs",
        "rollout.vllm.swap_space",
        "trainer.report_to",
        "trainer.bf16",
        "algorithm.lambda_return",
        "data.columns",
    ],
)
def test_a_key_that_is_far_off_is_not(written: str):
    assert nearest_keys(written, KEYS) == []
    with pytest.raises(ConfigError) as refused:
        build({}, [f"{written}=1"])
    assert f"{written}: unknown key" in str(refused.value)
    assert "did you mean" not in str(refused.value).split(written)[1].splitlines()[0]


def test_letters_that_do_not_count():
    assert did_you_mean("Tool-Agent", ["tool_agent"]) == "did you mean 'tool_agent'? "
    assert did_you_mean("n", ["k", "m"]) == did_you_mean("", ["a"]) == ""


def test_nothing_else_compares_names():
    """One threshold: no other module uses difflib's."""
    using = []
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import) and "difflib" in [name.name for name in node.names]:
                using.append(str(file.relative_to(PACKAGE)))
    assert using == []
