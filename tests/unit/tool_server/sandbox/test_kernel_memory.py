"""Memory that the kernel holds for a program counts, too, or cannot be had."""

import os
import socket

import pytest

from jax_agent_rl.tool_server.sandbox import SandboxLimits, StopCause, open_sandbox
from jax_agent_rl.tool_server.sandbox.limits import socket_memory
from tests.capabilities import needs_bwrap

pytestmark = needs_bwrap
LIMITS = SandboxLimits(
    wall_seconds=30, cpu_seconds=20, memory_bytes=128 << 20, processes=16, files=500
)


@pytest.fixture(params=["as_started", "user_namespace"])
async def run(request, monkeypatch):
    if request.param == "user_namespace":
        monkeypatch.setattr(
            "jax_agent_rl.tool_server.sandbox.isolation.maps_every_user", lambda: False
        )
    sandbox = await open_sandbox(limits=LIMITS)

    async def run(source):
        return await sandbox.run([sandbox.python, "main.py"], files={"main.py": source.encode()})

    return run


# Eight processes with all the sockets they can have, each filled until it would block.
UNIX_SOCKETS = """
import os, socket, time
for _ in range(8):
    if os.fork() == 0:
        pairs = []
        try:
            while True: pairs.append(socket.socketpair())
        except OSError: pass
        for one in [one for pair in pairs for one in pair]:
            one.setblocking(False)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
            try:
                while True: one.send(bytes(1 << 16))
            except OSError: pass
        time.sleep(600)
time.sleep(600)
"""
TCP_CONNECTIONS = """
import socket, time
server = socket.create_server(("127.0.0.1", 0))
pairs = []
while len(pairs) < 40:
    client = socket.create_connection(server.getsockname())
    pairs.append((client, server.accept()[0]))
    for one in pairs[-1]:
        one.setblocking(False)
        try:
            while True: one.send(bytes(1 << 16))
        except OSError: pass
time.sleep(600)
"""


@pytest.mark.parametrize("source", [UNIX_SOCKETS, TCP_CONNECTIONS], ids=["unix", "tcp"])
async def test_what_sockets_hold_counts_as_memory(run, source):
    result = await run(source)
    assert result.stopped is StopCause.MEMORY, result


async def test_sockets_on_their_way_between_processes_are_counted(run):
    """The kernel's count, of which the sandbox's is made, has those that are in no table of
    descriptors.
    """
    source = """
import socket
left, right = socket.socketpair()
for _ in range(50):
    one, other = socket.socketpair()
    socket.send_fds(left, [b"x"], [one.fileno(), other.fileno()])
    one.close(); other.close()
print(open("/proc/net/sockstat").readline())
"""
    assert (await run(source)).stdout.strip() == "sockets: used 102"


async def test_buffers_of_sockets_keep_their_size(run):
    source = """
import socket
for kind in (socket.SO_SNDBUF, socket.SO_RCVBUF):
    one = socket.socket()
    before = one.getsockopt(socket.SOL_SOCKET, kind)
    one.setsockopt(socket.SOL_SOCKET, kind, 1 << 22)
    print(one.getsockopt(socket.SOL_SOCKET, kind) == before)
one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
print(one.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR))
"""
    assert (await run(source)).stdout == "True\nTrue\n1\n"


async def test_files_in_shared_memory_count(run):
    source = (
        "import time\nfor n in range(5000): open(f'/dev/shm/{n}', 'w').close()\ntime.sleep(600)"
    )
    assert (await run(source)).stopped is StopCause.FILES


@pytest.mark.parametrize(
    "attempt",
    ["os.openpty()", "os.open('/dev/ptmx', os.O_RDWR)", "os.open('/dev/pts/probe', os.O_CREAT)"]
    + [
        f"exit(ctypes.CDLL(None).{call} == -1)"
        for call in ("inotify_init()", "inotify_init1(0)", "mq_open(b'/q', 66)")
    ],
)
async def test_other_stores_of_the_kernel_are_refused(run, attempt):
    assert (await run(f"import ctypes, os\n{attempt}")).exit_code == 1


def test_the_sockets_of_this_process_are_not_the_sandboxs():
    with socket.socket():
        assert socket_memory(os.getpid()) == 0
