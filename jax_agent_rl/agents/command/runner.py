"""Runs one command in the sandbox or in a container, with the standard library alone. Reads a job, prints the result.

::

    command ──HTTP──► 127.0.0.1:PORT ──(this relay)──► endpoint.sock ──(bound into the sandbox)──► endpoint

There is no network, so loopback reaches nothing but this relay. Both are JSON. The job: ``argv``, ``env``,
``seconds``, ``workdir``; ``port`` (None: no relay); ``read_back`` (a file to return, or None); ``root``, where
``archive`` is unpacked first (default: ``job.tar``), after the paths in ``remove`` were deleted; ``socket`` of the
endpoint; ``pack``: whether to return ``workdir``; ``cpu_seconds`` of each process, where nothing else limits it. The
result: ``exit_code`` (None after a timeout), ``stdout``, ``stderr`` (their last characters), ``workspace``
(``workdir`` as tar in base64, or None if it is too large), ``read_back``.
"""

import asyncio
import base64
import contextlib
import io
import json
import os
import resource
import shutil
import signal
import sys
import tarfile

HOME = os.getcwd()
OUTPUT_CHARACTERS = 16_000
WORKSPACE_BYTES = 8 << 20
CHUNK = 1 << 16


async def pump(reader, writer):
    """Copy one direction of a connection."""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError, ConnectionError):
        writer.close()


async def relay(reader, writer, connecting):
    """Connect a client to the other end, which is awaited."""
    try:
        up_reader, up_writer = await connecting
    except OSError:
        writer.close()
        return
    await asyncio.gather(pump(reader, up_writer), pump(up_reader, writer))


async def run(job):
    """Run the command to its end; return its exit status, None after a timeout."""
    if job["port"] is not None:
        socket = job.get("socket", f"{HOME}/endpoint.sock")

        async def serve(reader, writer):
            await relay(reader, writer, asyncio.open_unix_connection(socket))

        await asyncio.start_server(serve, "127.0.0.1", job["port"])
    with open("stdout.txt", "wb") as out, open("stderr.txt", "wb") as err:
        process = await asyncio.create_subprocess_exec(
            *job["argv"],
            cwd=job["workdir"],
            env={**os.environ, **job["env"]},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            return await asyncio.wait_for(process.wait(), job["seconds"])
        except TimeoutError:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def tail(path):
    """Return the end of a text file; "" if there is none."""
    with contextlib.suppress(OSError), open(path, errors="replace") as file:
        return file.read()[-OUTPUT_CHARACTERS:]
    return ""


def pack(folder):
    """Return a folder as tar in base64; None if it is too large."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(folder, arcname=".")
    return base64.b64encode(buffer.getvalue()).decode() if buffer.tell() <= WORKSPACE_BYTES else None


def main():
    """Read the job, run it, print the result."""
    job = json.load(sys.stdin)
    if "cpu_seconds" in job:
        resource.setrlimit(resource.RLIMIT_CPU, (job["cpu_seconds"],) * 2)
    for path in job.get("remove", ()):
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.unlink(path)  # a file or a link
    with tarfile.open(job.get("archive", "job.tar")) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(job["root"], filter="data")
        else:  # an older Python in an image, where nothing in the archive is the program's
            archive.extractall(job["root"])
    os.makedirs(job["workdir"], exist_ok=True)
    try:
        exit_code = asyncio.run(run(job))
    except OSError as error:  # no such program
        exit_code = 127
        with open("stderr.txt", "a") as file:
            file.write(f"{error}\n")
    result = {"exit_code": exit_code, "stdout": tail("stdout.txt"), "stderr": tail("stderr.txt")}
    read_back = tail(job["read_back"]) if job["read_back"] else ""
    workspace = pack(job["workdir"]) if job.get("pack", True) else None
    print(json.dumps({**result, "workspace": workspace, "read_back": read_back or None}))


if __name__ == "__main__":
    main()
