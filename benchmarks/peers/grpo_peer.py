"""What TRL's and Tunix' sides of the gallery's comparison share: settings, rows, the run folder."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# As in sums.yaml.
PROMPTS = 6
GROUP = 8
STEPS = 8
EVAL_EVERY = 4
PROMPT_TOKENS = 128
RESPONSE_TOKENS = 12
OPTIMIZER: dict[str, float] = {
    "learning_rate": 1e-5,
    "b1": 0.9,
    "b2": 0.95,
    "max_grad_norm": 1.0,
}


def settings() -> dict[str, str]:
    """Return the command line's ``key=value``: seed, run_dir and model.path."""
    return dict(word.split("=", 1) for word in sys.argv[1:])


def rows(name: str) -> list[dict[str, Any]]:
    """Return the rows of a file that ``sums.py`` wrote.

    The package's reader is not in the peers' environments.
    """
    text = Path(f"data/sums/{name}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def truth(row: Mapping[str, Any]) -> str:
    """Return the right answer of a row."""
    return row["reward_model"]["ground_truth"]


class RunFolder:
    """Writes what ``gallery.py`` reads of a run: metrics.jsonl and summary.json."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = self._folder / "metrics.jsonl"
        self._file.write_text("")
        self._step_start = time.perf_counter()

    def step(self, number: int, reward: float, tokens: float) -> None:
        """Record a training step."""
        self._write(
            kind="step",
            step=number,
            reward_mean=reward,
            sampled_tokens_mean=tokens,
            finish_reasons={"answer": PROMPTS * GROUP},
            step_seconds=time.perf_counter() - self._step_start,
        )
        self._step_start = time.perf_counter()

    def evaluate(self, number: int, sample: Callable[[list[dict[str, Any]]], list[float]]) -> None:
        """Record held-out accuracy after a step, from a score for each row."""
        scores = sample(rows("heldout"))
        self._write(kind="evaluation", step=number, accuracy=sum(scores) / len(scores))
        self._step_start = time.perf_counter()  # an evaluation is no part of a step

    def close(self) -> None:
        """Write the summary, which marks the run as ended."""
        started = STEPS * PROMPTS * GROUP
        summary = {"started": started, "dropped": {}, "max_logprob_gap": None, "warnings": []}
        (self._folder / "summary.json").write_text(json.dumps(summary))

    def _write(self, **line: Any) -> None:
        print(json.dumps(line), file=sys.stderr, flush=True)
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")
