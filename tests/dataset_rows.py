"""Rows of a data set in memory, and the same rows as JSON Lines and as Parquet."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_agent_rl.data.dataset import open_dataset
from jax_agent_rl.data.reader import Row
from jax_agent_rl.data.rows import RowChecks


def load_rows(path: str | Path, **names: Collection[str] | None) -> list[Row]:
    """Read all rows of a source; ``names`` as in :class:`~jax_agent_rl.data.rows.RowChecks`."""
    return list(open_dataset([path], RowChecks(**names)))


def write_twins(
    folder: Path, rows: Sequence[Mapping[str, Any]], *, schema: Any = None, group: int = 1000
) -> list[Path]:
    """Write the rows to ``rows.jsonl`` and ``rows.parquet``; return both.

    Args:
        folder: where to.
        rows: each may lack columns and fields that others have.
        schema: pyarrow's, of the Parquet file; None: guessed from all rows, as converters do.
        group: rows of a row group.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    lines = folder / "rows.jsonl"
    parquet = folder / "rows.parquet"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if schema is None:
        columns = dict.fromkeys(name for row in rows for name in row)
        arrays = {}
        for name in columns:
            arrays[name] = pa.array([row.get(name) for row in rows])
        arrow_table = pa.table(arrays)
    else:
        arrow_table = pa.Table.from_pylist(list(rows), schema=schema)
    pq.write_table(arrow_table, parquet, row_group_size=group)
    return [lines, parquet]
