"""No text that a model writes keeps what reads it busy."""

import subprocess
import sys

from tests.hostile_readers import READERS


def test_every_reader_of_a_models_text_takes_linear_time():
    """It runs in a process of its own: a pattern that backtracks cannot be interrupted here."""
    child = [sys.executable, "-m", "tests.hostile_readers"]
    try:
        finished = subprocess.run(
            child, stdout=subprocess.PIPE, text=True, check=True, timeout=400
        ).stdout
    except subprocess.TimeoutExpired as late:
        finished = (late.stdout or b"").decode()
    assert finished.split() == list(READERS), "the next one takes more than linear time"
