"""Executes docs/first_run.ipynb; as a program, stores what it printed in the file.

python -m tests.unit.docs.notebook
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from tests.unit.docs.pages import DOCS, ROOT

NOTEBOOK = DOCS / "first_run.ipynb"
ENVIRONMENT = {
    # On a machine with libtpu and without TPUs, and without ipywidgets, libraries print what is of
    # no use to a reader.
    "JAX_PLATFORMS": "cpu",
    "PYTHONWARNINGS": "ignore:IProgress not found",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


def execute(folder: Path) -> Any:
    """Return the notebook with the outputs of a run in ``folder``."""
    import nbclient
    import nbformat

    environment = os.environ | ENVIRONMENT | {"IPYTHONDIR": str(folder)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", coalesce_streams=True, record_timing=False
    )
    client.execute(cwd=str(folder), env=environment)
    return notebook


def main() -> None:
    import nbformat

    with tempfile.TemporaryDirectory() as folder:
        notebook = execute(Path(folder))
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
