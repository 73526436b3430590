"""The worker processes: started, called, and restarted when they die.

A trajectory belongs to one worker, by a hash of its id, so that its environments are always where its actions go. When
a worker dies its environments are gone (the kernel ends their programs with it): they are counted, and the
trajectories are told so, not given a fresh environment without a word. One whose event loop is stuck, in a tool's
parser say, cannot be interrupted: it is killed after ``stuck_seconds``, and so dies like any other.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp

from jax_agent_rl.config.tool_server import ToolServerSettings
from jax_agent_rl.errors import ConfigError, JaxAgentRLError, WorkerDiedError
from jax_agent_rl.tool_server.wire import Failure, ObservationStep, ToolReply, failed

logger = logging.getLogger(__name__)
_START_SECONDS = 600.0  # making a search index may take a while
_STOP_SECONDS = 40.0  # longer than a worker needs to give up on environments that do not close
_PING_SECONDS = 2.0  # that a worker may take to say that it is there
_RETRY_SECONDS = (0.1, 1.0, 5.0, 30.0)  # before the first, second, … start in a row that fails


class Worker:
    """One worker process.

    Args:
        settings: of the server.
        number: which of them.
        folder: private, for its socket and metrics.
        died: called with the worker's name and process id after each unexpected end.
    """

    def __init__(self, settings: ToolServerSettings, number: int, folder: Path, died: Callable[[str, int], None]):
        self.name = str(number)
        self._settings = settings
        self._socket = folder / f"worker-{number}.sock"
        self._metrics = folder / "metrics"
        self._died = died
        self._process: asyncio.subprocess.Process | None = None
        self._session: aiohttp.ClientSession | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._open: set[str] = set()  # trajectories with an environment there
        self._lost: set[str] = set()  # those whose worker died with their environment

    @property
    def running(self) -> bool:
        """Whether it accepts requests."""
        return self._session is not None

    @property
    def pid(self) -> int | None:
        """Its process id."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the worker, and restart it whenever it ends.

        Raises:
            ConfigError: it says that the settings cannot be.
        """
        process = await self._launch()
        self._keeper = asyncio.create_task(self._keep(process))

    async def stop(self) -> None:
        """Let it close its environments and end; kill it if it is stuck."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        try:
            await self.environments()
        except WorkerDiedError:
            self.kill()
        await self._disconnect()
        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            logger.error("worker %s did not stop within %g s and is killed", self.name, _STOP_SECONDS)
            process.kill()
            await process.wait()

    def kill(self) -> None:
        """Kill the worker without closing its environments."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def steps(self, steps: Sequence[ObservationStep]) -> list[ToolReply]:
        """Carry out actions; never raise for a dead worker, whose replies say so."""
        replies: dict[int, ToolReply] = {}
        for index, step in enumerate(steps):
            if step.trajectory_id in self._lost:
                self._lost.discard(step.trajectory_id)
                replies[index] = _lost(step)
        asked = [index for index in range(len(steps)) if index not in replies]
        if asked:
            try:
                answers = await self._post("/steps", [asdict(steps[index]) for index in asked])
                replies |= {i: ToolReply(**answer) for i, answer in zip(asked, answers, strict=True)}
            except WorkerDiedError:
                replies |= {index: _lost(steps[index]) for index in asked}
                self._lost -= {steps[index].trajectory_id for index in asked}  # told now
        for index, step in enumerate(steps):
            (self._open.add if replies[index].open else self._open.discard)(step.trajectory_id)
        return [replies[index] for index in range(len(steps))]

    async def retrieve(self, queries: list[str], topk: int) -> list[list[dict[str, Any]]]:
        """Search the corpus; raise :class:`WorkerDiedError` if the worker is gone."""
        return await self._post("/retrieve", {"queries": queries, "topk": topk})

    async def environments(self, *, within: float = _PING_SECONDS) -> int:
        """Count open environments; raise :class:`WorkerDiedError` without an answer ``within`` seconds."""
        try:
            async with asyncio.timeout(within):
                return (await self._ask("GET", "/health"))["environments"]
        except TimeoutError:
            raise WorkerDiedError(f"worker {self.name} did not answer within {within:g} s") from None

    async def _post(self, path: str, body: Any) -> Any:
        return await self._ask("POST", path, json=body)

    async def _ask(self, method: str, path: str, **more: Any) -> Any:
        if self._session is None:
            raise WorkerDiedError(f"worker {self.name} is not running")
        try:
            async with self._session.request(method, f"http://worker{path}", **more) as response:
                response.raise_for_status()
                return await response.json()
        except (aiohttp.ClientError, OSError) as error:
            raise WorkerDiedError(f"worker {self.name} did not answer: {error!r}") from error

    # --- its process ------------------------------------------------------------------------------------------

    async def _keep(self, process: asyncio.subprocess.Process) -> None:
        """Restart the worker whenever it ends."""
        while True:
            watch = asyncio.create_task(self._watch(process))
            try:
                code = await process.wait()
            finally:
                watch.cancel()
            logger.error("tool worker %s ended with code %s; starting another", self.name, code)
            await self._disconnect()
            self._lost |= self._open
            self._open.clear()
            self._died(self.name, process.pid)
            process = await self._launch_again()

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Kill the worker when it is stuck."""
        seconds = self._settings.stuck_seconds
        try:
            while True:
                await asyncio.sleep(seconds / 4)
                await self.environments(within=seconds)
        except WorkerDiedError as error:
            if process.returncode is None:
                logger.error("%s and is killed; an action is stuck in it", error)
                process.kill()

    async def _launch_again(self) -> asyncio.subprocess.Process:
        attempt = 0
        while True:
            await asyncio.sleep(_RETRY_SECONDS[min(attempt, len(_RETRY_SECONDS) - 1)])
            try:
                return await self._launch()
            except (JaxAgentRLError, OSError) as error:
                attempt += 1
                logger.error("tool worker %s could not be started: %s", self.name, error)

    async def _launch(self) -> asyncio.subprocess.Process:
        self._socket.unlink(missing_ok=True)
        pipe = asyncio.subprocess.PIPE
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "jax_agent_rl.tool_server.worker",
            stdin=pipe,
            stdout=pipe,
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(self._metrics)},
            process_group=0,  # Ctrl-C reaches the front's, also while a worker still imports; the front decides
        )
        try:
            async with asyncio.timeout(_START_SECONDS):
                await self._greet(process)
        except BaseException:
            if process.returncode is None:
                process.kill()
                await process.wait()
            raise
        connector = aiohttp.UnixConnector(path=str(self._socket), limit=0)
        # No time limit of its own: a worker ends every action in time, and a dead one breaks the connection.
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return process

    async def _greet(self, process: asyncio.subprocess.Process) -> None:
        """Send the settings and wait until it is ready."""
        assert process.stdin is not None and process.stdout is not None
        settings = self._settings.model_dump(mode="json")
        hello = {"settings": settings, "socket": str(self._socket), "name": self.name}
        process.stdin.write(json.dumps(hello).encode() + b"\n")
        line = await process.stdout.readline()
        try:
            answer = json.loads(line)
        except ValueError:
            code = await process.wait()
            raise WorkerDiedError(f"it ended with code {code} before it was ready; its messages are above") from None
        if "error" in answer:
            raise ConfigError(answer["error"].removeprefix("configuration error:\n  - "))

    async def _disconnect(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _lost(step: ObservationStep) -> ToolReply:
    """Return the reply of a dead worker."""
    if step.finish:
        return ToolReply(observation="", done=True, valid=True, tool="finish", error=None, open=False)
    text = "Error: the process that held this trajectory's tools ended"
    return failed(Failure.WORKER, text, done=True)


def worker_of(trajectory_id: str, workers: int) -> int:
    """Return the number of the worker that owns a trajectory."""
    return zlib.crc32(trajectory_id.encode("utf-8", "surrogatepass")) % workers
