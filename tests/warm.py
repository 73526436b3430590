"""A Python that starts at once: forks of a process that has imported what a run needs.

::

    test ── subprocess ──► client ── arguments, environment, ──► server ── fork ──► the program
                              │       folder, descriptors          │
                              ◄────────── exit status ─────────────┘

``*python()`` stands where ``sys.executable`` would: ``-m MODULE``, ``-c PROGRAM`` or a file
follows. Signals that the client gets go on to the program; a client that is killed takes the
program with it. No backend of JAX exists before the fork, so ``XLA_FLAGS`` counts. A program whose
variables differ from the tests' in what libraries read when they are imported
(:data:`_READ_AT_IMPORT`) gets an interpreter of its own.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

_READ_AT_IMPORT = ("HF_", "JAX_", "MPL", "RAY_", "TPU_", "TRANSFORMERS_", "VIRTUAL_ENV")
_IMPORTED = (
    "jax_agent_rl.cli",
    "jax_agent_rl.observe.report.charts",
    "jax_agent_rl.runtime.build",
    "jax_agent_rl.runtime.train",
    "matplotlib.figure",
    "mpl_toolkits.mplot3d",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.configuration_llama",
)
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_LONGEST = 1 << 18
_REAP_SECONDS = 0.2
_ENVIRONMENT = dict(os.environ)  # imports add to it


def python() -> list[str]:
    """Stands for ``sys.executable`` in a command. Output is not buffered."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), "run", _server()[0]]


def processor_seconds() -> float:
    """Return the processor time of the server and of the programs that have ended."""
    if _server.cache_info().currsize == 0:
        return 0.0
    fields = Path(f"/proc/{_server()[1]}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


@functools.cache
def _server() -> tuple[str, int]:
    """Starts this process's server; returns its socket and its number."""
    import shutil
    import subprocess
    import tempfile

    folder = tempfile.mkdtemp(prefix="warm-")
    atexit.register(shutil.rmtree, folder)
    path = os.path.join(folder, "socket")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.warm", "serve", path],
        stdin=subprocess.PIPE,  # closed when the tests end, and the server ends then, too
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    atexit.register(process.wait)
    atexit.register(process.stdin.close)
    return path, process.pid


def _client(path: str, arguments: list[str]) -> None:
    """Asks for a program, forwards signals, ends as the program does."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LONGEST)
    server.connect(path)
    signal.pthread_sigmask(
        signal.SIG_BLOCK, _FORWARDED
    )  # until there is a program to forward them to
    order = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    socket.send_fds(server, [json.dumps(order).encode()], [0, 1, 2])
    for descriptor in (0, 1, 2):  # the program has them now
        os.close(descriptor)
    for number in _FORWARDED:
        signal.signal(number, lambda number, _: server.send(bytes([number])))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    status = int(server.recv(64) or -signal.SIGKILL)
    if status < 0:
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _serve(path: str) -> None:
    """Forks for every client. Returns in the process that is to be a program."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(64)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests' own
    gc.freeze()  # else each fork copies what the collector looks at
    print("ready", flush=True)
    while True:
        readable, _, _ = select.select([listener, sys.stdin], [], [], _REAP_SECONDS)
        if sys.stdin in readable:
            os._exit(0)
        if readable:
            client, _ = listener.accept()
            if not os.fork():
                listener.close()
                return _supervise(client)
            client.close()
        _reap()


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _supervise(client: socket.socket) -> None:
    """Starts the program, watches it and its client. Returns in the process that is to be the
    program.
    """
    message, descriptors, _, _ = socket.recv_fds(client, _LONGEST, 3)
    order = json.loads(message)
    program = os.fork()
    if not program:
        client.close()
        return _become(order, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    ended = os.pidfd_open(program)
    while ended not in select.select([ended, client], [], [])[0]:
        number = client.recv(1)
        os.kill(program, number[0] if number else signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with contextlib.suppress(BrokenPipeError):  # killed
        client.send(str(status).encode())
    os._exit(0)


def _become(order: dict, descriptors: list[int]) -> None:
    """Gives the process the client's descriptors, folder, environment and arguments."""
    for to, descriptor in enumerate(descriptors):
        os.dup2(descriptor, to)
        os.close(descriptor)
    os.chdir(order["folder"])
    environment = order["environment"]
    arguments = order["arguments"]
    for number in _FORWARDED:
        signal.signal(number, signal.SIG_DFL)
    if _read_at_import(environment) != _read_at_import(_ENVIRONMENT):
        os.execve(sys.executable, [sys.executable, "-u", *arguments], environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    environment = {
        name: value for name, value in os.environ.items() if name not in _ENVIRONMENT
    } | environment
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.argv = arguments
    added = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [
        order["folder"],
        *(folder for folder in added if folder and folder not in sys.path),
    ]


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_IMPORT)}


def import_everything() -> None:
    """What a run imports, so that forks have it."""
    from jax_agent_rl.utils.startup import ignore_absent_tpus

    ignore_absent_tpus()
    for name in _IMPORTED:
        importlib.import_module(name)


def _execute() -> None:
    """What the interpreter does with ``sys.argv``."""
    kind, *program = sys.argv
    if kind == "-m":
        sys.argv = program
        sys.modules.pop(program[0], None)
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *program[1:]]
        exec(compile(program[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "run":
        _client(sys.argv[2], sys.argv[3:])
    import_everything()
    _serve(sys.argv[2])
    _execute()
