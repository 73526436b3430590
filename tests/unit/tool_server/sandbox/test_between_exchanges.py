"""Between two exchanges a long-lived program uses nothing: what it started is gone, and itself
stands still.
"""

import os
from pathlib import Path

import pytest

from jax_agent_rl.tool_server.sandbox import SandboxLimits, StopCause, open_sandbox
from jax_agent_rl.tool_server.sandbox.limits import process_tree
from tests.capabilities import needs_bwrap

pytestmark = needs_bwrap
LIMITS = SandboxLimits(wall_seconds=30, cpu_seconds=20, processes=16, files=500)
READER = """
import sys
names = {}
for line in sys.stdin:
    exec(bytes.fromhex(line).decode(), names)
    print("MARK", flush=True)
"""


@pytest.fixture(params=["as_started", "user_namespace"])
async def execute(request, monkeypatch):
    """A function that has a long-lived Python execute source; that program is its attribute."""
    if request.param == "user_namespace":
        monkeypatch.setattr(
            "jax_agent_rl.tool_server.sandbox.isolation.maps_every_user", lambda: False
        )
    sandbox = await open_sandbox(limits=LIMITS)
    earlier_processes = set(process_tree(os.getpid()))
    process = await sandbox.start(
        [sandbox.python, "reader.py"], files={"reader.py": READER.encode()}
    )

    async def execute(source):
        output, _, stopped = await sandbox.exchange(
            process, source.encode().hex().encode() + b"\n", b"MARK"
        )
        survivors = {
            pid: state
            for pid in set(process_tree(os.getpid())) - earlier_processes
            if (state := states(pid))
        }
        return output.decode(), stopped, survivors

    execute.process = process
    yield execute
    await process.close()


def states(pid):
    """The states of a process's threads: none if it ended while they were read."""
    tasks = Path(f"/proc/{pid}/task")
    try:
        return {
            (tasks / task / "stat").read_text().rpartition(")")[2].split()[0]
            for task in os.listdir(tasks)
        }
    except (FileNotFoundError, ProcessLookupError):
        return set()


def at_rest(survivors):
    """Whether bubblewrap's two processes and the stopped program are all there is, but for the
    dead.
    """
    alive = [states for _, states in sorted(survivors.items()) if states != {"Z"}]
    return len(alive) == 3 and alive[-1] == {"T"}


FORKS = """
import os
parent = os.getpid()
for _ in range({count}):
    if os.fork() == 0:
        for fd in (0, 1, 2): os.close(fd)
        {act}
print("left")
"""


@pytest.mark.parametrize(
    "source",
    [
        FORKS.format(count=5, act="while True: pass"),
        FORKS.format(count=5, act="os.setsid()\n        while True: pass"),
        FORKS.format(
            count=1,
            act=(
                "import time\n"
                "        while True: time.sleep(0.01); open(f'/dev/shm/{time.time()}', 'w')"
            ),
        ),
        # Each lives for a moment, and starts the next one.
        FORKS.format(count=1, act="while True:\n            if os.fork(): os._exit(0)"),
        # They let their parent go on as soon as it is stopped.
        FORKS.format(count=2, act="while True: os.kill(parent, 18)"),
    ],
    ids=["children", "sessions", "files", "chain", "continuing"],
)
async def test_processes_left_behind_end_with_the_answer(execute, source):
    output, stopped, survivors = await execute("kept = 41\n" + source)
    assert (output, stopped) == ("left\n", None) and at_rest(survivors), survivors
    output, stopped, survivors = await execute("print(kept + 1)")
    assert (output, stopped) == ("42\n", None) and at_rest(survivors)


async def test_threads_stand_still_and_go_on(execute):
    source = """
import threading, time
counted, more = 0, threading.Event()
def count():
    global counted
    while True:
        counted += 1
        more.set()
        time.sleep(0)
threading.Thread(target=count, daemon=True).start()
more.wait()
"""
    _, stopped, survivors = await execute(source)
    assert stopped is None and at_rest(survivors), survivors
    output, _, survivors = await execute(
        "before = counted; more.clear(); more.wait(); print(counted > before)"
    )
    assert output == "True\n" and at_rest(survivors)


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm"])
async def test_a_limit_passed_just_before_the_answer_counts(execute, folder):
    _, stopped, _ = await execute(f"for n in range(501): open(f'{folder}/{{n}}', 'w').close()")
    assert stopped is StopCause.FILES and not execute.process.alive


async def test_what_cannot_be_held_is_ended(execute, monkeypatch):
    monkeypatch.setattr("jax_agent_rl.tool_server.sandbox.process.MAX_CHECKS", 0)
    _, stopped, survivors = await execute("print(1)")
    assert stopped is StopCause.BACKGROUND
    assert not execute.process.alive
    assert not survivors
    assert (
        stopped.describe(LIMITS)
        == "ended: the processes it left in the background kept starting others"
    )


async def test_while_processes_die_it_is_not_yet_quiet(execute, monkeypatch):
    """Each may have started another after it was seen, and before it died."""
    dead = [os.posix_spawn("/bin/true", ["true"], os.environ) for _ in range(2)]
    for pid in dead:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it remains in /proc
    checks = []

    def tree_with_other_dead(pid):
        checks.append(pid)
        return [*process_tree(pid), dead[min(len(checks), 12) % 2]]

    monkeypatch.setattr(
        "jax_agent_rl.tool_server.sandbox.process.process_tree", tree_with_other_dead
    )
    try:
        output, stopped, _ = await execute("print(1)")
    finally:
        for pid in dead:
            os.waitpid(pid, 0)
    assert (output, stopped) == ("1\n", None)
    assert len(checks) > 12


async def test_a_program_that_ends_with_its_answer_is_simply_gone(execute):
    output, stopped, survivors = await execute("import os\nprint('MARK', flush=True)\nos._exit(0)")
    assert (output, stopped) == ("", None)
    await execute.process.close()
    assert not set(survivors) & set(process_tree(os.getpid()))


async def test_the_line_of_the_mark_may_arrive_in_pieces():
    program = (
        "import sys, time\n"
        "sys.stdin.readline()\n"
        "for piece in ('out', 'put\\nMA', 'RK', ' 0', '\\n'):\n"
        "    print(piece, end='', flush=True)\n"
        "    time.sleep(0.1)\n"
        "sys.stdin.readline()\n"
    )
    sandbox = await open_sandbox(limits=LIMITS)
    process = await sandbox.start(
        [sandbox.python, "program.py"], files={"program.py": program.encode()}
    )
    try:
        output, status, stopped = await sandbox.exchange(process, b"go\n", b"MARK")
    finally:
        await process.close()
    assert (output, status.strip(), stopped) == (b"output\n", b"0", None)
