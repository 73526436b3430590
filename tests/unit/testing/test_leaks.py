"""What counts as left behind: own children do, Python's own resource tracker does not, however long
its command is.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from jax_agent_rl.testing.leaks import Footprint

_WAIT = "import sys; print(flush=True); sys.stdin.read()"


@pytest.mark.parametrize(
    ("label", "counted"),
    [("worker", True), ("multiprocessing.resource_tracker", False)],
)
def test_children_are_counted_except_the_resource_tracker(label: str, counted: bool) -> None:
    footprint = Footprint.now()
    command = [sys.executable, "-c", _WAIT, "a-long-path/" * 20, label]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout
        child.stdout.readline()
        added = footprint.added()
        child.communicate()
    ours = [line for line in added if line.startswith(f"process {child.pid} ")]
    assert bool(ours) is counted, added
    assert all(len(line) < 110 for line in ours), "a command is cut where it is shown"
    assert not any(line.startswith(f"process {child.pid} ") for line in footprint.added())
