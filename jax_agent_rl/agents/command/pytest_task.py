"""Task folders in Harbor's format whose verifier is pytest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

TASK_TOML = 'version = "1.0"\n\n[agent]\ntimeout_sec = 120.0\n\n[verifier]\ntimeout_sec = 60.0\n'
TEST_SH = """#!/bin/bash
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1  # start seven times as fast
# -P, -c and --rootdir: a pytest.py, a conftest.py or a pytest.ini in the working folder is the
# program's, not ours.
options="-q -p no:cacheprovider -c /dev/null --rootdir=/tests"
if python3 -P -m pytest $options /tests; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt
"""
"""Rewards 1 if all tests pass, otherwise 0."""


def write_pytest_task(
    folder: Path, *, instruction: str, files: Mapping[str, str], tests: Mapping[str, str]
) -> None:
    """Write a task folder, over one that is there.

    Args:
        folder: where ``task.toml`` will be; made if it is missing.
        files: texts by path in the working folder when the program starts.
        tests: texts by path below ``/tests``, shown to the verifier alone.
    """
    texts = {
        "task.toml": TASK_TOML,
        "instruction.md": instruction + "\n",
        "tests/test.sh": TEST_SH,
    }
    for name, text in files.items():
        texts[f"environment/{name}"] = text
    for name, text in tests.items():
        texts[f"tests/{name}"] = text

    for name, text in texts.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
