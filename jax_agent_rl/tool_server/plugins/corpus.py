"""A corpus on disk, and folders with what was made of it: an index is made once and read by every worker.

The corpus is JSON Lines of ``{"id", "contents"}``, as Search-R1's; the first line of ``contents`` is the title.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax_agent_rl.errors import ConfigError

_STAMP = "corpus.json"


def read_passages(corpus: Path) -> list[dict[str, str]]:
    """Read all passages, ``{"id", "contents"}`` each.

    Raises:
        ConfigError: a line is of another form, or there is none.
    """
    passages = []
    with corpus.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                passages.append({"id": str(row.get("id", number - 1)), "contents": str(row["contents"])})
            except (ValueError, KeyError, AttributeError) as error:
                raise ConfigError(f'{corpus}:{number}: not {{"id", "contents"}} in JSON ({error!r})') from error
    if not passages:
        raise ConfigError(f"search.corpus={str(corpus)!r} is empty")
    return passages


def index_folder(
    corpus: Path,
    folder: Path,
    *,
    made_by: dict[str, Any],
    make: Callable[[list[dict[str, str]], Path], None],
) -> Path:
    """Return the folder of a corpus's index, building it if it is missing or stale.

    Args:
        corpus: JSON Lines file.
        folder: where the index belongs.
        made_by: what the index depends on besides the corpus; JSON.
        make: writes the index of some passages into a folder. It gets one beside the place, which is moved there when
            it is complete: a half-made index is never read.

    Raises:
        ConfigError: the corpus is missing, empty or of another form.
    """
    if not corpus.is_file():
        raise ConfigError(f"search.corpus={str(corpus)!r}: no such file (relative to {os.getcwd()})")
    status = corpus.stat()
    stamp = json.dumps({"bytes": status.st_size, "modified": status.st_mtime_ns, **made_by})
    if (folder / _STAMP).is_file() and (folder / _STAMP).read_text() == stamp:
        return folder
    passages = read_passages(corpus)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    try:
        make(passages, unfinished)
        (unfinished / _STAMP).write_text(stamp)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder
