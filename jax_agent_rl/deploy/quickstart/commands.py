"""``jax-agent-rl quickstart`` and ``jax-agent-rl init``: the first run, and the first own task."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from jax_agent_rl.data.tasks import prepare_shop
from jax_agent_rl.deploy.quickstart.model import fetch_quickstart_model
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.utils.files import replacing_folder, writing

RECIPE = "quickstart"
DATA = Path("data/shop")
TASK = Path(__file__).parent / "task"
"""What ``init`` writes."""
_ROWS_SECONDS = 60


def prepare_quickstart() -> None:
    """Fetch the model, and write the rows unless they are there.

    They are in :data:`DATA` of the working directory.

    Raises:
        ModelError: the model cannot be fetched.
    """
    print("model: SmolLM2-135M-Instruct", flush=True)
    fetch_quickstart_model()
    if not (DATA / "train.jsonl").is_file():
        print(f"data: questions about a shop, in {DATA}", flush=True)
        prepare_shop(DATA)


def write_task(folder: Path) -> list[Path]:
    """Write the files of a task into a new or empty folder, its rows among them, and return them.

    Raises:
        ConfigError: the folder is not empty.
        StorageError: it cannot be written.
    """
    with replacing_folder(folder, error=ConfigError) as unfinished:
        with writing(
            folder,
            message="{file} could not be written ({reason}); make space, or name another folder",
        ):
            shutil.copytree(
                TASK, unfinished, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
            )
        # As users do when they have changed the questions.
        subprocess.run(
            [sys.executable, "-B", "make_rows.py"],
            cwd=unfinished,
            check=True,
            timeout=_ROWS_SECONDS,
        )
    return sorted(file for file in folder.iterdir() if file.is_file())
