"""Run folders for tests of the report, and a browser to look at it."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jax_agent_rl.config import TraceConfig
from jax_agent_rl.observe.run_dir import RunDir
from jax_agent_rl.observe.sinks.traces import TraceFileSink
from jax_agent_rl.types import FinishReason, Fork, Trajectory
from tests.trajectories import EPOCH, SECOND, a_trace, call, trajectory

TEXTS: dict[int, str] = {
    1: "<|im_start|>",
    2: "<|im_end|>",
    3: "question ",
    4: "hello ",
    5: "world ",
}
"""Ids whose text is not ``word<id>``."""
HOSTILE = (
    "</script><script>window.owned=1</script>",
    "<img src=x onerror=window.owned=1>",
    "--><!-- <script>window.owned=1</script>",
    '"};window.owned=1;//',
    "\u202eevil\u0000\u2028",
    "{{SCRIPT}}",
)
"""What a model might write to break out of the page."""


def decode(ids: Sequence[int]) -> str:
    """Stands in for a tokenizer: ids over 1000 are the hostile texts, 900 and 901 two halves of a
    letter.
    """
    parts: list[str] = []
    for at, i in enumerate(ids):
        if i in (900, 901):
            ends_pair = i == 901 and ids[at - 1 : at] == [900]
            parts = [*parts[:-1], "é"] if ends_pair else [*parts, "\ufffd"]
        else:
            parts.append(HOSTILE[i - 1000] if i >= 1000 else TEXTS.get(i, f"word{i} "))
    return "".join(parts)


def members(step: int, *, group: str = "g") -> list[Trajectory]:
    """A group: a good answer, a branch of it, a failed call, one cut off."""
    good = trajectory(
        [1, 3], [4, 2, 7, 5, 2], mask=[1, 1, 0, 1, 1], reward=1.0, index=0, group=group
    )
    branch = trajectory(
        [1, 3], [4, 2, 7, 6, 2], mask=[1, 1, 0, 1, 1], reward=0.0, index=1, group=group
    )
    branch = replace(branch, fork=Fork(tree_id=f"{group}-0", parent_id=f"{group}-0", turns=1))
    failed = trajectory(
        [1, 3],
        [8, 2, 9, 2],
        mask=[1, 1, 0, 1],
        reward=-1.0,
        index=2,
        group=group,
        calls=[[call(error="timeout")]],
    )
    cut = trajectory(
        [1, 3],
        [900, 901, 5],
        reward=0.25,
        index=3,
        group=group,
        finish=FinishReason.RESPONSE_LENGTH,
    )
    return [good, branch, failed, cut]


def step_line(step: int, **fields: Any) -> dict[str, Any]:
    """A record of ``metrics.jsonl`` with what the charts read."""
    began = EPOCH / SECOND + 10 * step
    return {
        "kind": "step",
        "step": step,
        "reward_mean": 0.1 * step,
        "reward_min": -1.0,
        "reward_max": 1.0,
        "entropy": 1.0 / step,
        "logprob_gap_mean": 1e-6,
        "logprob_gap_max": 1e-5,
        "engine_busy_share": 0.75,
        "own_metric": float(step),
        "tool_errors_by_kind": {"timeout": 1},
        "finish_reasons": {"answer": 3, "response_length": 1},
        "accounting": {
            "started": 4 * step,
            "trained": 3 * step,
            "dropped": step,
            "dropped/zero_variance": step,
        },
        "phase_seconds": [
            ["engine", began, began + 4],
            ["rollout", began, began + 4],
            ["learn", began + 4, began + 9],
            ["publish", began + 9, began + 10],
        ],
    } | fields


def make_run(path: Path, *, steps: int = 3, hostile: bool = False) -> Path:
    """A run folder with ``steps`` steps of four trajectories, an evaluation and two traces; no
    tokenizer.
    """
    run_dir = RunDir(path)
    run_dir.write_json(
        run_dir.config, {"model": {"path": "nowhere"}, "trainer": {"steps": 5, "mode": "sync"}}
    )
    run_dir.add_metrics({"kind": "evaluation", "step": 0, "accuracy": 0.25})
    for step in range(1, steps + 1):
        group = f"train-{step}-0"
        trajectories = members(step, group=group)
        if hostile:
            ids = [*range(1000, 1000 + len(HOSTILE)), 2]
            bad = [[replace(call(error=HOSTILE[0]), name=HOSTILE[1])]]
            trajectories.append(
                trajectory(
                    [1, 1000],
                    [*ids, 1001, 2],
                    mask=[1] * 7 + [0, 1],
                    calls=bad,
                    index=4,
                    group=group,
                )
            )
        token_values = {
            t.trajectory_id: {
                "advantages": [t.reward] * t.num_sampled,
                "old_logprobs": [-1.5] * t.num_sampled,
            }
            for t in trajectories[:3]
        }
        run_dir.add_trajectories(step, "train", trajectories, token_values=token_values)
        run_dir.add_metrics(step_line(step))
    for number in range(2):
        TraceFileSink(TraceConfig(), run_dir).write(a_trace(f"train-1-0-{number}", step=1))
    return path


class CountedRecords:
    """Recorded trajectories that know how many of them somebody holds; a ``RecordSource``.

    Attributes:
        most: the largest number held at a time.
    """

    notes: Sequence[str] = ()

    class Record(dict):
        def __hash__(self) -> int:  # so that it can be a member of a weak set
            return id(self)

    def __init__(self, records: Sequence[dict[str, Any]]) -> None:
        self.most = 0
        self._records = records
        self._held = weakref.WeakSet[CountedRecords.Record]()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self.read(range(len(self._records)))

    def read(self, numbers: Iterable[int]) -> Iterator[dict[str, Any]]:
        for number in numbers:
            record = self.Record(self._records[number])
            self._held.add(record)
            self.most = max(self.most, len(self._held))
            yield record
            del record


BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@contextmanager
def open_browser() -> Iterator[Any]:
    """A headless browser of the machine; skips the test where there is none."""
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (extra dev)"
    )
    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser_path is None:
        pytest.skip(
            f"no browser on this machine: none of {', '.join(BROWSERS)} (apt-get install"
            f" {BROWSERS[0]})"
        )
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path)
        try:
            yield browser
        finally:
            browser.close()
