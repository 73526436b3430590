"""Runs one command in the sandbox or in a container, or one after another.

It reads a job and prints the result. It needs the standard library alone.

::

    command ──HTTP──► 127.0.0.1:PORT ──(this relay)──► endpoint.sock ──► endpoint

There is no network, so loopback reaches nothing but this relay. The socket is bound into the
sandbox.

The job is a line of JSON on standard input:

``argv``, ``env``, ``seconds``, ``workdir``
``token``       what begins the result
``remove``      paths to remove first
``trees``       files with what to write then, each with the folder to write it to
``port``        of the relay (None: there is none), and ``socket`` of the endpoint
``verifies``    whether the command is a verifier: its interpreters load nothing of ``workdir`` and
                find its modules in ``tests``; ``bytecode`` is the only folder of their compiled
                modules, if set
``read_back``   a file below ``root`` to return, or None
``pack``        how many bytes and entries ``workdir`` may have to be returned, or None
``path_inside`` the path by which the command knows ``workdir``
``cpu_seconds`` of each process, where nothing else limits it
``control``     a socket of the host; if set, there is no command yet: requests come from there, and
                nothing is printed (:class:`Service`)

A tree is a line of JSON, a list of entries, and the contents of its files one after another. An
entry is ``["folder", name, mode]``, ``["file", name, mode, size]`` or ``["link", name, target]``;
folders come before what is in them.

The result is a line: the token and JSON: ``exit_code`` (None after a timeout), ``stdout``,
``stderr`` (their last characters), ``file`` (text of ``read_back``), ``file_problem``, ``entries``
of the working folder as in a tree, ``left_out`` of them, ``pack_problem``. The second line is the
contents in base64. The command cannot print such a result: the token is only in the memory of this
process, which no other may read. What the command left is read when all of its processes are gone.
"""

import asyncio
import base64
import contextlib
import ctypes
import io
import json
import os
import resource
import shutil
import signal
import stat
import sys
import tempfile
import time

OUTPUT_CHARACTERS = 16_000
SERVICE_CHARACTERS = 100_000  # of each output of a command that was requested
REQUEST_BYTES = 1 << 22  # of a request's line: a command with its variables
FILE_BYTES = 4096  # of the file that is returned
MAX_CONNECTIONS = 40  # of the command to the endpoint at the same time; further ones are closed
CHUNK = 1 << 16
ENTRY_BYTES = 512  # that an entry counts besides its name and its contents
MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 2048
MAX_DEPTH = 64
SHOWN_NAMES = 5

_NOT_DUMPABLE = 4  # PR_SET_DUMPABLE
_KILL_SECONDS = 5.0
_NOT_ENDED = "processes that it left kept starting others"
# Variables that make an interpreter, the loader or a test runner load files or options.
_START_VARIABLES = (
    "BASH_ENV", "ENV", "GCONV_PATH", "LD_AUDIT", "LD_PRELOAD", "NODE_OPTIONS", "OPENSSL_CONF",
    "PERL5OPT", "PROMPT_COMMAND", "PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTHONBREAKPOINT",
    "PYTHONHOME", "PYTHONINSPECT", "PYTHONSTARTUP", "PYTHONWARNINGS", "RUBYOPT", "ZDOTDIR",
)  # fmt: skip
_SEARCH_PATHS = ("PATH", "LD_LIBRARY_PATH", "NODE_PATH", "PERL5LIB", "PYTHONPATH", "RUBYLIB")


# --- the endpoint ---------------------------------------------------------------------------------


class Relay:
    """Forwards the clients of one socket to another, which ``connect`` opens a connection to."""

    def __init__(self, connect):
        self._connect = connect
        self._writers = set()

    async def serve(self, reader, writer):
        """Serve one client."""
        if len(self._writers) >= MAX_CONNECTIONS:
            writer.close()
            return
        self._writers.add(writer)
        try:
            try:
                up_reader, up_writer = await self._connect()
            except OSError:
                writer.close()
                return
            await asyncio.gather(self._copy(reader, up_writer), self._copy(up_reader, writer))
        finally:
            self._writers.discard(writer)

    def abort(self):
        """Close all connections."""
        for writer in self._writers:
            writer.transport.abort()

    async def _copy(self, reader, writer):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(CHUNK):
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(OSError, ConnectionError):
            writer.close()


# --- the command ----------------------------------------------------------------------------------


async def start_relay(job):
    """Start the relay to the endpoint, if there is one."""
    if job["port"] is not None:
        socket = job.get("socket", os.path.abspath("endpoint.sock"))
        relay = Relay(lambda: asyncio.open_unix_connection(socket))
        await asyncio.start_server(relay.serve, "127.0.0.1", job["port"])


async def run_once(job, out, err):
    """Run the job's only command; return its exit status, None after a timeout."""
    await start_relay(job)
    return await run(job, out, err)


async def run(job, out, err):
    """Run a command to its end; return its exit status, None after a timeout.

    What it left in the background goes on.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *job["argv"],
            cwd=job.get("cwd") or job["workdir"],
            env=environment(job),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:  # no such program, or what no argument may hold
        err.write(f"{error}\n".encode())
        err.flush()
        return 127
    try:
        return await asyncio.wait_for(process.wait(), job["seconds"])
    except asyncio.TimeoutError:  # noqa: UP041  # not yet TimeoutError in the Python of some images
        return None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def environment(job):
    """Return the command's variables.

    A verifier's variables name nothing that the program could have written.
    """
    variables = {**os.environ, **job["env"]}
    if not job["verifies"]:
        return variables
    for name in _START_VARIABLES:
        variables.pop(name, None)
    for name in _SEARCH_PATHS:
        if name in variables:
            paths = _outside(variables[name].split(os.pathsep), job["workdir"])
            variables[name] = os.pathsep.join(paths)

    # Tests find modules in their own folder. Safe paths leave out the folder of a script and the
    # working folder.
    python_path = [job["tests"]]
    if variables.get("PYTHONPATH"):
        python_path.append(variables["PYTHONPATH"])
    variables["PYTHONPATH"] = os.pathsep.join(python_path)
    variables["PYTHONSAFEPATH"] = "1"
    variables["PYTHONNOUSERSITE"] = "1"
    if "bytecode" in job:  # compiled modules are read from, and written to, there alone
        variables["PYTHONPYCACHEPREFIX"] = job["bytecode"]
    return variables


def _outside(paths, folder):
    """Return those paths that are absolute and not below a folder."""
    real_folder = os.path.realpath(folder)
    outside = []
    for path in paths:
        real_path = os.path.realpath(path)
        is_inside = real_path == real_folder or real_path.startswith(real_folder.rstrip("/") + "/")
        if os.path.isabs(path) and not is_inside:
            outside.append(path)
    return outside


def end_all_processes():
    """Kill every other process of this process namespace; return whether all are gone.

    A process that left its session would otherwise go on writing while its files are read.
    """
    deadline = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < deadline:
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # one of them is another user's; it may end yet
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)
    return False


# --- what it left ---------------------------------------------------------------------------------


def tail(file, characters=OUTPUT_CHARACTERS):
    """Return the end of an open file as text."""
    size = os.fstat(file.fileno()).st_size
    length = min(size, 4 * characters)  # a character has at most four bytes
    text = os.pread(file.fileno(), length, size - length).decode("utf-8", "replace")
    return text[-characters:]


def read_regular(name, limit, folder=None):
    """Return the contents of a regular file; no link is followed, and nothing is waited for.

    Args:
        name: its name in ``folder``.
        limit: bytes it may have.
        folder: descriptor of the folder; None: ``name`` is a path.

    Raises:
        OSError: there is no such file.
        ValueError: it is not a regular file, or is larger.
    """
    descriptor = os.open(
        name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder
    )
    with open(descriptor, "rb", buffering=0) as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if status.st_size > limit:
            raise ValueError(f"it has {status.st_size} bytes, more than {limit}")

        # Never more than the size that was checked, even if the file grows meanwhile.
        pieces = []
        missing = status.st_size
        while missing:
            piece = file.read(missing)
            if not piece:
                break
            pieces.append(piece)
            missing -= len(piece)
        return b"".join(pieces)


def read_back(root, name):
    """Return the text of a file below ``root`` and what is wrong with it.

    Both are None if the file is missing.
    """
    *folders, last = name.strip("/").split("/")
    opened = [os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
    try:
        for folder in folders:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            opened.append(os.open(folder, flags, dir_fd=opened[-1]))
        return read_regular(last, FILE_BYTES, opened[-1]).decode("ascii"), None
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError) as error:
        return None, f"{name}: {error}"
    finally:
        for descriptor in opened:
            os.close(descriptor)


class Packer:
    """The working folder as a tree.

    Args:
        path_inside: absolute path by which the program knew the folder.
        max_bytes: maximum size of all files, names and entries together.
    """

    def __init__(self, path_inside, max_bytes, max_entries):
        self._path_inside = path_inside
        self.entries = []
        self.contents = []
        self.left_out = []
        self._bytes_left = max_bytes
        self._entries_left = max_entries

    def add_folder(self, folder):
        """Add what is in a folder, which is not a link.

        Raises:
            OSError: it cannot be read.
            ValueError: it is too large.
        """
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            raise ValueError("the working folder is not a folder any more")
        unread = [""]
        while unread:
            subfolder = unread.pop()
            path = os.path.join(folder, subfolder)
            if not os.access(path, os.R_OK | os.X_OK):
                os.chmod(path, 0o700)
            with os.scandir(path) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    name = os.path.join(subfolder, entry.name)
                    if self._add(name, entry):
                        unread.append(name)

    def _add(self, name, entry):
        """Add one entry; return whether it is a folder to read."""
        status = entry.stat(follow_symlinks=False)
        if not is_plain_name(name):
            self.left_out.append(name)
            return False

        mode = stat.S_IMODE(status.st_mode) & 0o777
        if stat.S_ISDIR(status.st_mode):
            self._count(name, 0)
            self.entries.append(["folder", name, mode])
            return True

        if stat.S_ISREG(status.st_mode):
            self._count(name, status.st_size)
            if not os.access(entry.path, os.R_OK):
                os.chmod(entry.path, 0o600)
            contents = read_regular(entry.path, status.st_size)
            self.entries.append(["file", name, mode, len(contents)])
            self.contents.append(contents)
            return False

        if stat.S_ISLNK(status.st_mode):
            target = os.readlink(entry.path)
            if is_inner_link(name, target, self._path_inside):
                self._count(name, len(os.fsencode(target)))
                self.entries.append(["link", name, target])
                return False

        self.left_out.append(name)  # a device, a socket or a pipe, or a link that leads elsewhere
        return False

    def _count(self, name, size):
        self._entries_left -= 1
        self._bytes_left -= ENTRY_BYTES + len(os.fsencode(name)) + size
        if self._entries_left < 0 or self._bytes_left < 0:
            raise ValueError("the working folder is too large")


def pack_folder(result, folder, path_inside, limits):
    """Add a folder's entries to a result, or why there are none; return the contents."""
    packer = Packer(path_inside, **limits)
    contents = b""
    try:
        packer.add_folder(folder)
        result["entries"] = packer.entries
        contents = b"".join(packer.contents)
    except (OSError, ValueError) as error:
        result["pack_problem"] = str(error)
    result["left_out"] = len(packer.left_out)
    result["left_out_names"] = [ascii(name)[:200] for name in packer.left_out[:SHOWN_NAMES]]
    return contents


def is_plain_name(name):
    """Return whether a path below a folder is relative, leads nowhere else, and is not too long.

    Control characters are refused. Bytes that are not UTF-8 are kept, as Python writes them.
    """
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:
        return False
    if os.fsdecode(encoded) != name or len(encoded) > MAX_PATH_BYTES:
        return False
    if any(byte < 32 or byte == 127 for byte in encoded):
        return False

    parts = encoded.split(b"/")
    if len(parts) > MAX_DEPTH:
        return False
    for part in parts:
        if part in (b"", b".", b"..") or len(part) > MAX_NAME_BYTES:
            return False
    return True


def is_inner_link(name, target, path_inside):
    """Return whether a link leads to a path below the folder, whatever other such links it passes.

    Args:
        name: path of the link below the folder; all its parents are folders, not links.
        target: the path in the link.
        path_inside: absolute path of the folder.
    """
    if target.startswith("/"):
        if target != path_inside and not target.startswith(path_inside.rstrip("/") + "/"):
            return False
        parts = target[len(path_inside) :].split("/")
        levels = 0
    else:
        parts = target.split("/")
        levels = name.count("/")

    parts = [part for part in parts if part not in ("", ".")]
    while parts and parts[0] == ".." and levels:
        levels -= 1
        parts = parts[1:]
    # Behind a name, ".." would leave the folder where that name is a link.
    return not parts or is_plain_name("/".join(parts))


# --- what it starts with --------------------------------------------------------------------------


def remove(path):
    """Remove a path; raise RuntimeError if it is still there."""
    if os.path.islink(path) or not os.path.isdir(path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    else:
        shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        raise RuntimeError(f"{path} could not be removed")


def write_tree(path, folder):
    """Write a tree's folders, files and links into a folder; files replace those already there."""
    with open(path, "rb") as tree:
        write_entries(tree, folder)


def write_entries(tree, folder):
    """Write an open tree, see :func:`write_tree`."""
    modes = []
    for kind, name, *details in json.loads(tree.readline()):
        path_in_folder = os.path.join(folder, name)
        if kind == "folder":
            (mode,) = details
            if not os.path.isdir(path_in_folder):
                os.mkdir(path_in_folder, 0o700)
                modes.append((path_in_folder, mode))
            continue

        if os.path.lexists(path_in_folder):
            os.unlink(path_in_folder)
        if kind == "link":
            (target,) = details
            os.symlink(target, path_in_folder)
            continue

        mode, size = details
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path_in_folder, flags, 0o600), "wb") as file:
            file.write(tree.read(size))
            os.fchmod(file.fileno(), mode)

    for path_in_folder, mode in reversed(modes):  # a folder may be read-only once it is complete
        os.chmod(path_in_folder, mode)


# --- one command after another --------------------------------------------------------------------


async def serve(job):
    """Connect to the host and do what it asks for, until it asks for the end or is gone."""
    reader, writer = await asyncio.open_unix_connection(
        os.path.abspath(job["control"]), limit=REQUEST_BYTES
    )
    writer.write(job["token"].encode() + b"\n")
    await start_relay(job)
    await Service(job, reader, writer).run()


class Service:
    """Does what the host asks for.

    A request is a line of JSON with its ``number``, what to ``do``, and the ``size`` of the bytes
    that follow. So is an answer: ``number``, ``size``, and the fields of a result. What is done:

    ``run``     ``argv`` with ``env`` in ``cwd`` for ``seconds``; several commands run side by side,
                but of a verifier, whose processes all end with each command
    ``write``   the tree that follows into ``folder``
    ``read``    the file or folder ``path``, within ``limits``
    ``cancel``  the command of that number, which gets no answer
    ``end``     all processes; the working folder is returned, and nothing more is done
    """

    def __init__(self, job, reader, writer):
        self._job = job
        self._reader = reader
        self._writer = writer
        self._commands = {}

    async def run(self):
        """Serve the host."""
        actions = {"write": self._write, "read": self._read}
        while line := await self._reader.readline():
            request = json.loads(line)
            number = request["number"]
            data = await self._reader.readexactly(request["size"])
            if request["do"] == "run":
                command = asyncio.ensure_future(self._command(request))
                self._commands[number] = command
                command.add_done_callback(lambda _, number=number: self._commands.pop(number))
            elif request["do"] == "cancel":
                if number in self._commands:
                    self._commands[number].cancel()
            elif request["do"] == "end":
                await self._end(number)
                return
            else:
                try:
                    result, contents = actions[request["do"]](request, data)
                except (OSError, ValueError) as error:
                    result = {"pack_problem": str(error)}
                    contents = b""
                await self._answer(number, result, contents)

    async def _answer(self, number, result, contents=b""):
        line = json.dumps({"number": number, "size": len(contents), "result": result})
        self._writer.write(line.encode() + b"\n" + contents)
        await self._writer.drain()

    async def _command(self, request):
        job = {
            **self._job,
            "argv": request["argv"],
            "env": {**self._job["env"], **request["env"]},
            "cwd": request["cwd"],
            "seconds": request["seconds"],
        }
        try:
            result = await self._result_of(job)
        except OSError as error:  # no room left for its outputs
            result = {"exit_code": 127, "stderr": f"{error}\n"}
        # Nothing that tests ran may change what they leave, once they have ended.
        if job["verifies"] and not end_all_processes():
            result["pack_problem"] = _NOT_ENDED
        await self._answer(request["number"], result)

    async def _result_of(self, job):
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            exit_code = await run(job, out, err)
            return {
                "exit_code": exit_code,
                "stdout": tail(out, SERVICE_CHARACTERS),
                "stderr": tail(err, SERVICE_CHARACTERS),
            }

    def _write(self, request, data):
        os.makedirs(request["folder"], exist_ok=True)
        write_entries(io.BytesIO(data), request["folder"])
        return {}, b""

    def _read(self, request, data):
        path = request["path"]
        limits = request["limits"]
        if os.path.isdir(path):
            result = {}
            folder = os.path.realpath(path)
            return result, pack_folder(result, folder, path, limits)
        contents = read_regular(path, limits["max_bytes"])
        return {"entries": [["file", os.path.basename(path), 0o644, len(contents)]]}, contents

    async def _end(self, number):
        for command in list(self._commands.values()):
            command.cancel()
        result = {}
        contents = b""
        if not end_all_processes():
            result["pack_problem"] = _NOT_ENDED
        elif self._job["pack"]:
            job = self._job
            contents = pack_folder(result, job["workdir"], job["path_inside"], job["pack"])
        await self._answer(number, result, contents)


# --- the job --------------------------------------------------------------------------------------


def main():
    """Read the job, run it, print the result."""
    if os.getpid() > 2:
        raise RuntimeError(
            "the runner kills every process it can reach; it needs a process namespace of its own"
        )
    job = json.loads(sys.stdin.buffer.readline())
    # No process of the same user may look into this one, or open its descriptors.
    if ctypes.CDLL(None).prctl(_NOT_DUMPABLE, 0, 0, 0, 0) != 0:
        raise RuntimeError("the runner could not protect its memory")
    if "cpu_seconds" in job:
        cpu_seconds = job["cpu_seconds"]
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))

    for path in job.get("remove", ()):
        remove(path)
    os.makedirs(job["workdir"], exist_ok=True)
    for tree, folder in job["trees"]:
        write_tree(tree, folder)
    if job.get("control"):
        asyncio.run(serve(job))
        return

    with (
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):  # unnamed: nobody can put others there
        exit_code = asyncio.run(run_once(job, out, err))
        all_ended = end_all_processes()
        result = {"exit_code": exit_code, "stdout": tail(out), "stderr": tail(err)}

    contents = b""
    if not all_ended:
        result["pack_problem"] = _NOT_ENDED
        result["file_problem"] = _NOT_ENDED
    else:
        if job["read_back"]:
            result["file"], result["file_problem"] = read_back(job["root"], job["read_back"])
        if job["pack"]:
            contents = pack_folder(result, job["workdir"], job["path_inside"], job["pack"])

    encoded = base64.b64encode(contents).decode()
    sys.stdout.write(f"{job['token']}{json.dumps(result)}\n{encoded}\n")


if __name__ == "__main__":
    main()
