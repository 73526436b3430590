"""How close engine and learner have to be, and that the page says the same."""

from pathlib import Path

import pytest

from jax_agent_rl.agreement.report import JAX_ENGINE, OTHER_ENGINE, Cause, Tolerance, tolerance
from jax_agent_rl.config import build
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.learner.comparison import Comparison
from tests.messages import raises

PAGE = (Path(__file__).parents[3] / "docs" / "agreement.md").read_text()


@pytest.mark.parametrize(
    ("precisions", "platform", "row"),
    [
        (["float32", "float32"], "cpu", "float32"),
        (["float32", "bfloat16"], "cpu", "bfloat16"),
        (["int8", "bfloat16"], "cpu", "int8"),
        (["float32"], "gpu", "tf32"),
        (["float32"], "tpu", "bfloat16"),
        (["mxfp4", "float32"], "cpu", "bfloat16"),  # one that is not known
    ],
)
def test_the_coarsest_precision_decides_and_what_the_platform_makes_of_it(
    precisions, platform, row
):
    assert tolerance(precisions, jax_engine=True, platform=platform) == JAX_ENGINE[row]


def test_float32_on_a_cpu_is_held_to_a_mean_gap_below_1e_4():
    """A healthy SmolLM2-135M had 1.1e-5 on average and 6.7e-5 at most."""
    for jax_engine in (True, False):
        allowed = tolerance(["float32", "float32"], jax_engine=jax_engine, platform="cpu")
        assert 3 * 1.1e-5 < allowed.mean <= 1e-4
        assert 3 * 6.7e-5 < allowed.token <= 1e-3


@pytest.mark.parametrize(
    ("tokens", "mean", "largest", "holds"),
    [
        (5, 0.01, 0.1, True),
        (5, 0.02, 0.05, False),
        (5, 0.001, 0.2, False),
        (5, float("nan"), 0.0, False),
        (0, 9, 9, True),
    ],
)
def test_both_bounds_have_to_hold_and_nothing_compared_is_no_breach(tokens, mean, largest, holds):
    assert (
        Tolerance(token=0.1, mean=0.01).holds(Comparison(tokens=tokens, mean=mean, largest=largest))
        is holds
    )


def test_the_page_lists_every_tolerance_and_every_cause_with_its_advice():
    for name, jax_tolerance in JAX_ENGINE.items():
        other_tolerance = OTHER_ENGINE[name]
        cells = [
            f"`{name}`",
            f"{jax_tolerance.token:g}",
            f"{jax_tolerance.mean:g}",
            f"{other_tolerance.token:g}",
            f"{other_tolerance.mean:g}",
        ]
        assert f"| {' | '.join(cells)} |" in PAGE
    for cause in Cause:
        assert f"| {cause} |" in PAGE
        assert cause.advice in PAGE


def test_gaps_that_the_page_measured_in_one_precision_are_within_its_tolerance():
    table = PAGE.partition("| Model | Both in float32 |")[2].partition("\n\n")[0]
    rows = table.splitlines()[2:]
    assert len(rows) >= 3
    for row in rows:
        _, name, float32, _, bfloat16, _ = row.split("|")
        for cell, precision in ((float32, "float32"), (bfloat16, "bfloat16")):
            mean, largest = map(float, cell.split(","))
            allowed = JAX_ENGINE[precision]
            assert mean <= allowed.mean and largest <= allowed.token, name


@pytest.mark.parametrize("wrong", [[0.1, 0.2], [0.0, 0.0], [0.1, -1.0]])
def test_a_tolerance_that_cannot_be_is_refused(wrong):
    with raises(ConfigError, key="agreement_tolerance"):
        build(
            {
                "run_dir": "r",
                "model": {"path": "m"},
                "data": {"train": "t"},
                "trainer": {"agreement_tolerance": wrong},
            }
        )
