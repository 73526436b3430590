"""Rows of a data set in memory."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from jax_agent_rl.data.dataset import open_dataset
from jax_agent_rl.data.rows import Row, RowChecks


def load_rows(path: str | Path, **names: Collection[str] | None) -> list[Row]:
    """Read all rows of a source; ``names`` are those of :class:`~jax_agent_rl.data.rows.RowChecks`."""
    return list(open_dataset([path], RowChecks(**names)))
