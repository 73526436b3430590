"""What two runs that should be the same are compared by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jax_agent_rl.evaluate.step_comparison import depends_on_time
from jax_agent_rl.observe.run_dir import read_records


def final_state(run: Path) -> dict[str, np.ndarray]:
    """Every array of the last checkpoint: parameters, optimizer moments, critic, KL coefficient,
    counters.
    """
    step = max(int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdigit())
    tree = ocp.PyTreeCheckpointer().restore(run / "checkpoints" / str(step) / "state")
    return {
        jax.tree_util.keystr(path): np.asarray(x)
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def records(run: Path, file: str) -> list[dict[str, Any]]:
    """The records of ``metrics.jsonl`` or ``trajectories.jsonl`` without what depends on time."""
    return [_without_times(record) for record in read_records(run / file)]


def _without_times(record: dict[str, Any]) -> dict[str, Any]:
    return {
        k: v for k, v in record.items() if not depends_on_time(k) and k not in ("metrics", "turns")
    }


def require_same(first: Path, second: Path) -> None:
    """Asserts that two runs ended with the same bits and wrote the same records."""
    expected = final_state(first)
    got = final_state(second)
    assert expected.keys() == got.keys() and len(expected) > 20
    assert [name for name in expected if expected[name].tobytes() != got[name].tobytes()] == []
    for file in ("metrics.jsonl", "trajectories.jsonl"):
        assert records(first, file) == records(second, file), file
