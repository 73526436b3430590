"""The last lines of a run say what was measured, and nothing of what was not."""

from typing import Any

from jax_agent_rl.runtime.train import describe_summary


def said(**changed: Any) -> str:
    summary: dict[str, Any] = {
        "heldout_accuracy_before": 0.25,
        "heldout_accuracy_after": 0.75,
        "steps": 6,
        "train_seconds": 75.0,
        "dropped": {},
        "started": 8,
        "trained": 8,
        "learner_idle_share": 0.1,
        "staleness_mean": 0.0,
        "staleness_max": 0,
        "token_drift": 0,
        "max_logprob_gap": 1e-5,
        "recompilations_after_warmup": 0,
        "steps_compared": 6,
        "steps_not_compared": 0,
    }
    return describe_summary(summary | changed)


def test_both_accuracies_are_shown():
    assert said().startswith("held-out accuracy: 25.0% -> 75.0% after 6 steps, 1m15s of training\n")


def test_a_run_without_held_out_rows_says_nothing_of_them():
    assert said(heldout_accuracy_before=None, heldout_accuracy_after=None).startswith(
        "after 6 steps, "
    )


def test_one_accuracy_leads_nowhere_and_one_step_is_one():
    first = said(heldout_accuracy_before=None, steps=1).splitlines()[0]
    assert first == "held-out accuracy: 75.0% after 1 step, 1m15s of training"
