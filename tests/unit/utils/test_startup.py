"""Processes start without complaints of JAX, and their warnings reach the screen, even while a live
display redraws.
"""

import importlib.util
import io
import logging
import os
import platform
import subprocess
import sys
from importlib.machinery import ModuleSpec

import pytest
from rich.console import Console

from jax_agent_rl.observe.progress import Progress
from jax_agent_rl.utils.startup import (
    KEEP_MEMORY,
    ignore_absent_tpus,
    own_environment,
    quiet_logging,
)


@pytest.mark.parametrize(
    ("device", "installed", "already", "set_to"),
    [
        (None, True, None, "cpu"),
        (None, False, None, None),
        (None, True, "cuda", "cuda"),
        ("accel0", True, None, None),
        ("vfio/0", True, None, None),
        ("nvidia0", True, None, None),
        ("vfio/vfio", True, None, "cpu"),
        ("nvidiactl", True, None, "cpu"),
    ],
)
def test_jax_is_kept_from_tpus_only_where_there_are_none(
    device, installed, already, set_to, tmp_path, monkeypatch
):
    if device:
        (tmp_path / device).parent.mkdir(exist_ok=True)
        (tmp_path / device).touch()
    spec = ModuleSpec("libtpu", None, origin="libtpu/__init__.py") if installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setenv(
        "JAX_PLATFORMS", already or ""
    )  # set, so that the test's end puts back what was there
    if not already:
        monkeypatch.delenv("JAX_PLATFORMS")
    ignore_absent_tpus(tmp_path)
    assert os.environ.get("JAX_PLATFORMS") == set_to


class Stream(io.StringIO):
    def __init__(self, terminal: bool):
        super().__init__()
        self.isatty = lambda: terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_a_warning_is_printed_above_a_live_display(monkeypatch, terminal):
    live = Stream(True)
    errors = Stream(terminal)
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setattr(logging.root, "handlers", [])  # as a process begins
    quiet_logging()
    with Progress(Console(file=live, force_terminal=True, width=200), total_steps=3):
        logging.getLogger("jax_agent_rl.x").warning("meanwhile [bold]")
    logging.getLogger("jax_agent_rl.x").warning("after")
    assert ("WARNING jax_agent_rl.x: meanwhile [bold]" in live.getvalue()) is terminal
    expected = ["after"] if terminal else ["meanwhile [bold]", "after"]
    assert errors.getvalue().splitlines() == [
        f"WARNING jax_agent_rl.x: {text}" for text in expected
    ]


def test_a_library_that_logs_every_step_does_not_fill_the_screen(monkeypatch):
    errors = Stream(False)
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setattr(logging.root, "handlers", [])
    quiet_logging()
    library = logging.getLogger("a_library_that_logs_every_step")
    library.setLevel(logging.DEBUG)
    library.debug("step 1")
    library.info("step 2")
    library.warning("careful")
    assert errors.getvalue() == "WARNING a_library_that_logs_every_step: careful\n"


FORGING = """
import logging, sys
from jax_agent_rl.cli import main
from jax_agent_rl.utils.startup import quiet_logging
quiet_logging()
hostile = "t-1\\x1b[2J\\nERROR jax_agent_rl.x: forged\\r\\u2028ERROR again"
logging.getLogger("jax_agent_rl.a").warning("%s failed", hostile)
try:
    raise ValueError(hostile)
except ValueError:
    logging.getLogger("jax_agent_rl.a").exception("lost")
sys.argv = ["jax-agent-rl", "view", "no-such-run\\x1b[2J"]
main()
"""


def test_nothing_logged_forges_a_line_or_steers_the_terminal():
    child = subprocess.run([sys.executable, "-c", FORGING], capture_output=True, text=True)
    assert child.returncode == 2
    lines = child.stderr.split("\n")
    assert [line for line in lines if line.startswith(("WARNING", "ERROR"))] == [
        "WARNING jax_agent_rl.a: t-1\\x1b[2J",
        "ERROR jax_agent_rl.a: lost",
    ]
    assert "    ERROR jax_agent_rl.x: forged\\r\\u2028ERROR again failed" in lines
    assert not set(child.stderr) & set("\x1b\r\u2028")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
@pytest.mark.parametrize("setting", [None, "glibc.malloc.arena_max=2"])
def test_a_process_begins_anew_once_to_keep_freed_memory(setting):
    program = (
        "import os, sys\n"
        "from jax_agent_rl.utils.startup import keep_freed_memory\n"
        "print('begins', flush=True)\n"
        "keep_freed_memory()\n"
        "print(os.environ['GLIBC_TUNABLES'], sys.argv[1:], sys.flags.dont_write_bytecode)\n"
    )
    environment = own_environment()
    environment.pop("GLIBC_TUNABLES", None)
    if setting:
        environment["GLIBC_TUNABLES"] = setting
    command = [sys.executable, "-B", "-c", program, "an argument", "--flag"]
    printed = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    *begins, last = printed.splitlines()
    assert len(begins) == (1 if setting else 2)
    assert last == f"{setting or KEEP_MEMORY} ['an argument', '--flag'] 1"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
@pytest.mark.parametrize("setting", [KEEP_MEMORY, "glibc.malloc.arena_max=2"])
def test_memory_that_is_touched_ahead_stays_with_a_process_that_keeps_it(setting):
    program = (
        "from pathlib import Path\n"
        "from jax_agent_rl.utils.startup import touch_memory_ahead\n"
        "def resident():\n"
        "    lines = Path('/proc/self/status').read_text().splitlines()\n"
        "    (line,) = [line for line in lines if line.startswith('VmRSS:')]\n"
        "    return 1024 * int(line.split()[1])\n"
        "before = resident()\n"
        "thread = touch_memory_ahead(128 * 2**20)\n"
        "if thread is not None:\n"
        "    thread.join()\n"
        "print(thread is not None, resident() - before)\n"
    )
    environment = own_environment() | {"GLIBC_TUNABLES": setting}
    printed = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    is_touched, grown_bytes = printed.split()
    keeps_memory = setting == KEEP_MEMORY
    assert is_touched == str(keeps_memory)
    assert (int(grown_bytes) > 100 * 2**20) == keeps_memory


def test_no_garbage_is_collected_once_a_command_has_ended():
    program = (
        "import atexit, gc, sys\n"
        "from jax_agent_rl.cli import main\n"
        "atexit.register(lambda: print(gc.get_freeze_count()))\n"
        "sys.argv = ['jax-agent-rl', '--version']\n"
        "main()\n"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program],
        env=own_environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert int(printed.splitlines()[-1]) > 1000
