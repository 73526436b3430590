"""Starts SGLang's server, sees it end, and explains why it does not start.

::

    this process ──stdin──► watchdog ──► sglang.launch_server ──► scheduler, one per device
                                              │
                                              └──► log file

The server is a process of another Python: SGLang pins other versions than this package. The
watchdog kills the server's process group once its standard input is closed, also where this process
was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpu_backend.launch import Log, explain_cause, root_cause
from gpu_backend.sglang.settings import SglangSettings, check_python, has_package
from jax_agent_rl.errors import BackendError, EngineDiedError
from jax_agent_rl.utils.files import make_temp_folder, remove_temp_folder
from jax_agent_rl.utils.network import listen_on
from jax_agent_rl.utils.services import ENGINE_START_SECONDS

CPU_KERNELS = Path(__file__).parent / "cpu_kernels"
"""A folder with what stands for SGLang's CPU kernels, see ``sgl_kernel`` in it."""
_WATCHDOG = "jax_agent_rl.deploy.launch.ray_process"
_POLL_SECONDS = 0.25
_END_SECONDS = 10.0
"""Time for a server to end by itself; then it is killed."""


@dataclass(kw_only=True)
class ServerProcess:
    """A server that this process started.

    Attributes:
        url: where it listens, or will.
        token: what its clients send.
        log: what it writes.
    """

    url: str
    token: str
    log: Log
    _process: subprocess.Popen[bytes]
    _folder: Path

    @classmethod
    def start(cls, settings: SglangSettings, *, version: int) -> ServerProcess:
        """Start a server; it listens once the model is loaded, see :meth:`wait_until`.

        Raises:
            ConfigError: there is no Python with SGLang.
        """
        check_python(settings.python)
        with listen_on("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
        # In a file that others cannot read: a command line is shown to all users of the machine.
        # In hexadecimal: SGLang would take one that begins with a dash for an option.
        token = secrets.token_hex(32)
        folder = make_temp_folder("jax_agent_rl-sglang-")
        arguments_file = folder / "arguments.yaml"
        arguments_file.touch(mode=0o600)
        arguments = settings.arguments(port=port, version=version, token=token)
        arguments_file.write_text(json.dumps(arguments))

        log = _open_log(settings.log_file)
        command = [sys.executable, "-m", _WATCHDOG, str(Path(settings.python).expanduser())]
        command += ["-m", "sglang.launch_server", "--config", str(arguments_file)]
        with log.file.open("ab") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=_environment(settings),
                start_new_session=True,
            )
        return cls(
            url=f"http://127.0.0.1:{port}",
            token=token,
            log=log,
            _process=process,
            _folder=folder,
        )

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    async def wait_until(self, is_ready: Callable[[], Awaitable[bool]]) -> None:
        """Wait until the server answers.

        Args:
            is_ready: asks it.

        Raises:
            ConfigError: it ended, and why names a setting.
            BackendError: it ended for another reason, or does not answer.
        """
        try:
            async with asyncio.timeout(ENGINE_START_SECONDS):
                while not await is_ready():
                    if self.has_ended:
                        raise explain_cause("SGLang", root_cause(self.log), self.log)
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise BackendError(
                f"SGLang's server did not answer within {ENGINE_START_SECONDS:g} seconds; see its"
                f" log: {self.log.file}"
            ) from None

    def death(self) -> EngineDiedError:
        """Return the error of requests once the server is gone."""
        cause = root_cause(self.log)
        if cause is None:
            cause = "its process ended without a message (killed? out of memory?)"
        return EngineDiedError(
            f"the SGLang server died: {cause}; start a new one (its log: {self.log.file})"
        )

    def stop(self) -> None:
        """End the server, and wait for it; idempotent. It blocks for seconds at most."""
        if not self.has_ended:
            self._process.terminate()  # the watchdog tells the server
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
        assert self._process.stdin is not None
        self._process.stdin.close()  # the watchdog kills what is left
        self._process.wait()
        remove_temp_folder(self._folder)


def _open_log(file: str | None) -> Log:
    """Return the log from its present end on, in a temporary folder if no file is given."""
    log_file = Path(file) if file else Path(tempfile.mkdtemp(prefix="sglang-")) / "sglang.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    begin = 0
    if log_file.exists():
        begin = log_file.stat().st_size
    return Log(log_file.absolute(), begin=begin)


def _environment(settings: SglangSettings) -> Mapping[str, str]:
    """Return the server's environment: this one, and what the arguments cannot say."""
    environment = dict(os.environ)
    environment.setdefault("HF_HUB_OFFLINE", "1")  # the model is a folder
    # Of the margin alone: no request is longer than the model's own limit allows.
    environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    if settings.on_cpu:
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
        if not has_package(settings.python, "sgl_kernel"):
            search_path = [str(CPU_KERNELS)]
            if "PYTHONPATH" in environment:
                search_path.append(environment["PYTHONPATH"])
            environment["PYTHONPATH"] = os.pathsep.join(search_path)
    return environment
