"""``jax-agent-rl report RUN``: see :mod:`jax_agent_rl.observe.report`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.observe.records import is_number
from jax_agent_rl.observe.report.charts import charts
from jax_agent_rl.observe.report.forest import forest
from jax_agent_rl.observe.report.page import page
from jax_agent_rl.observe.report.run_data import RunData, decoder, read_run, value_at
from jax_agent_rl.observe.report.timeline import timeline
from jax_agent_rl.observe.report.tokens import COLUMNS, Prompts, Vocabulary, facts, tokens
from jax_agent_rl.utils.files import write_atomically, writing

MOST = 2000
"""Trajectories on a page, unless it is asked for others."""
_NOT_WRITTEN = "{file} could not be written ({reason}); choose another file with --out"


def write_report(run: Path, out: Path | None = None, *, most: int = MOST) -> Path:
    """Writes the report of a run folder; the run may still be going on, or have ended badly.

    Args:
        run: the run folder.
        out: the file; ``report.html`` in the run folder if None.
        most: trajectories on the page, fewer where they are long (see :mod:`~jax_agent_rl.observe.report.selection`);
            0: all.

    Returns:
        The file.

    Raises:
        ConfigError: ``most`` is negative.
        DataError: not a run folder.
        StorageError: the file cannot be written.
    """
    if most < 0:
        raise ConfigError(f"--most {most}: must be 0 (all trajectories) or more")
    text = render_report(read_run(run, most=most))
    file = out or run / "report.html"
    with writing(file, message=_NOT_WRITTEN):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text, message=_NOT_WRITTEN)
    return file


def render_report(data: RunData) -> str:
    """The page of a run, as HTML."""
    notes = list(data.notes)
    decode = decoder(data.config, notes)
    vocabulary = Vocabulary(decode)
    prompts = Prompts(vocabulary)
    trajectories = [tokens(record, vocabulary, prompts) for record in data.trajectories]
    numbers = {record["trajectory_id"]: number for number, record in enumerate(data.trajectories)}
    index = {
        "run": _overview(data),
        "notes": notes,
        "charts": charts(data.metrics),
        "timeline": timeline(data.metrics, data.traces, numbers),
        "columns": COLUMNS,
        "rows": [facts(record) for record in data.trajectories],
        "forest": forest(data.trajectories, decode),
        "prompts": prompts.rows,
        "vocabulary": {"ids": vocabulary.ids, "texts": vocabulary.texts},
    }
    return page(title=f"{data.name} · jax-agent-rl", index=index, trajectories=trajectories)


def _overview(data: RunData) -> dict[str, Any]:
    """What the head of the page says."""
    steps = [record for record in data.metrics if record["kind"] == "step"]
    evaluations = [record for record in data.metrics if record["kind"] == "evaluation"]
    rewards = [r["reward_mean"] for r in steps if is_number(r.get("reward_mean"))]
    accuracies = [r["accuracy"] for r in evaluations if is_number(r.get("accuracy"))]
    books = (steps[-1].get("accounting") or {}) if steps else {}
    wanted = value_at(data.config, "trainer", "steps")
    facts = {
        "model": Path(str(value_at(data.config, "model", "path") or "?")).name,
        "algorithm": value_at(data.config, "algorithm", "adv_estimator"),
        "trainer": value_at(data.config, "trainer", "mode"),
        "engine": value_at(data.config, "rollout", "backend"),
    }
    return {
        "name": data.name,
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "state": "finished" if data.summary else "not finished",
        "facts": {key: value for key, value in facts.items() if value},
        "step": steps[-1]["step"] if steps else 0,
        "steps": wanted if isinstance(wanted, int) else None,
        "reward": [rewards[0], rewards[-1]] if rewards else None,
        "accuracy": [accuracies[0], accuracies[-1]] if accuracies else None,
        "books": {key: books[key] for key in ("started", "trained", "dropped", "in_flight") if key in books},
        "total": data.total,
    }
