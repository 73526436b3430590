"""What a run folder holds of its training steps."""

import json
from pathlib import Path

from jax_agent_rl.evaluate.recorded_steps import later_changes
from jax_agent_rl.runtime.resume import CHANGES


def test_settings_that_were_changed_after_a_step_are_named(tmp_path: Path):
    change = {"step": 4, "key": "learner.learning_rate", "old": 0.001, "new": 0.002}
    (tmp_path / CHANGES).write_text(json.dumps(change) + "\n")
    (note,) = later_changes(tmp_path, 4)
    assert "learner.learning_rate was 0.001 in step 4" in note
    assert later_changes(tmp_path, 5) == []


def test_a_run_that_was_never_resumed_changed_nothing(tmp_path: Path):
    assert later_changes(tmp_path, 1) == []
