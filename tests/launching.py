"""Launchers as processes: what they say, how they end, and a stand-in for a learner."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

LEARN = """\
import signal, sys
def learn(behaviour):
    if behaviour[0] == "ends":
        sys.exit(int(behaviour[1]))
    def save(*_):
        print("saved a checkpoint", flush=True)
        sys.exit(130)
    signal.signal(signal.SIGINT, save)
    print("training", flush=True)
    while True:
        signal.pause()
"""
"""A learner that ends, or waits for Ctrl-C, for programs that stand in for ``jax-agent-rl``."""


def read_until(process: subprocess.Popen[str], text: str) -> list[str]:
    """Lines up to the first that contains the text."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"it ended before it said {text!r}:\n{''.join(lines)}")


def wait_for_end(pid: int, seconds: float = 60) -> None:
    """Waits for a process that need not be a child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(seconds * 1000), f"process {pid} is still there"
    finally:
        os.close(descriptor)


def ended_after(process: subprocess.Popen[str], number: int = signal.SIGINT) -> Iterator[str]:
    """Sends a signal and yields what it says until it has ended."""
    process.send_signal(number)
    assert process.stdout is not None
    yield from process.stdout
    process.wait()
