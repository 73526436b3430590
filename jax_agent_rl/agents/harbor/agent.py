"""The agent loop ``harbor``: a trial of Harbor per trajectory, whose verifier gives the reward.

::

    row ──► task ──► environment: harness ──HTTP──► endpoint ──► recorder ──► trajectory
                          └─ what it left ──► Harbor's verifier ──► reward in agent_output

The harness's requests are one session of the endpoint, with a key of its own. In the sandbox, the
endpoint is reached through a relay, under the same address as on this machine: harnesses that run
inside and those that run beside it are told the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import secrets
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_agent_rl.agents.command.machines import read_mounts, sandbox_limits, workspace_limits
from jax_agent_rl.agents.command.relay import UnixRelay
from jax_agent_rl.agents.context import AgentContext
from jax_agent_rl.agents.frameworks import ModelAccess, OpenAIAgentLoop
from jax_agent_rl.agents.loop import register_agent
from jax_agent_rl.agents.request import EpisodeRequest
from jax_agent_rl.config.harbor_agent import LOCAL
from jax_agent_rl.errors import ConfigError, DataError, TrajectoryError
from jax_agent_rl.tool_server.sandbox import Sandbox, open_sandbox
from jax_agent_rl.types import Trajectory
from jax_agent_rl.utils.files import make_temp_folder, remove_temp_folder
from jax_agent_rl.utils.packages import install_command, is_installed

if TYPE_CHECKING:
    from harbor.models.trial.config import TaskConfig  # pyright: ignore[reportMissingImports]

    from jax_agent_rl.agents.endpoint.sessions import Session
    from jax_agent_rl.agents.harbor.trial import HarborTrial

_FIRST_PYTHON = (3, 12)  # of Harbor


def require_harbor() -> None:
    """Check that Harbor is installed.

    Raises:
        ConfigError: it is not; says what to install, and for which Python.
    """
    if sys.version_info < _FIRST_PYTHON:
        version = ".".join(map(str, sys.version_info[:2]))
        raise ConfigError(
            f"agent 'harbor' needs the extra `harbor`, which needs Python 3.12 or 3.13; this is"
            f" {version}: make an environment with PYTHON=python3.12"
        )
    if not is_installed("harbor"):
        raise ConfigError(f"agent 'harbor' needs the extra `harbor`: {install_command('harbor')}")


@register_agent("harbor")
class HarborAgent(OpenAIAgentLoop):
    """Runs ``agent.harbor.agent`` once per trajectory; the module's docstring shows how."""

    def __init__(self, context: AgentContext) -> None:
        super().__init__(context)
        self._settings = context.limits.harbor
        self.endpoint_host = self._settings.endpoint.host
        self.endpoint_port = self._settings.endpoint.port
        self._slots = asyncio.Semaphore(self._settings.max_running)
        self._sandbox: Sandbox | None = None
        self._opening = asyncio.Lock()

    async def preflight(self) -> None:
        """Check Harbor, the names of harness and environment, and the sandbox.

        Raises:
            ConfigError: something is missing or wrong; names its key.
        """
        if self._settings.agent is None:
            raise ConfigError(
                "agent 'harbor' needs agent.harbor.agent, the harness to run, e.g. terminus-2"
            )
        require_harbor()
        from jax_agent_rl.agents.harbor.trial import check_settings

        await asyncio.to_thread(check_settings, self._settings)
        if self._settings.environment == LOCAL:
            _ = self._mounts
            await self._open_sandbox()

    async def play(self, request: EpisodeRequest) -> Trajectory:
        """See :class:`AgentLoop`.

        Raises:
            ConfigError: Harbor is not installed.
            TrajectoryError: there is no verdict: of the class that says whose failure it is.
        """
        require_harbor()
        from jax_agent_rl.agents.harbor.trial import read_task

        try:
            task = read_task(request.row)
        except DataError as error:
            raise TrajectoryError(str(error)) from error  # of this task alone

        async with self._slots:
            for retries in range(self._settings.start_attempts):
                is_last = retries + 1 == self._settings.start_attempts
                trajectory = await self._play_once(request, task, may_retry=not is_last)
                if trajectory is not None:
                    return replace(
                        trajectory,
                        metrics={**trajectory.metrics, "environment_retries": float(retries)},
                    )
        raise AssertionError("the last attempt ends with a trajectory or an error")

    async def _play_once(
        self, request: EpisodeRequest, task: TaskConfig, *, may_retry: bool
    ) -> Trajectory | None:
        """Run one trial; None if its environment failed before the model was asked anything."""
        from jax_agent_rl.agents.harbor.trial import as_error, failure_of, reward_of

        with self._session(request) as session:
            recorder = session.recorder
            async with self._trial(request, task, session) as trial:
                result = await trial.run()
                if recorder.failure is not None:
                    raise recorder.failure

                failure = failure_of(result)
                if not recorder.turns:
                    if failure is None:
                        raise TrajectoryError(
                            f"{request.trajectory_id}: the harness ended without asking the model"
                            " anything"
                        )
                    if may_retry and failure.policy.should_retry:
                        return None
                    raise as_error(failure, result)
                verdict = trial.verdict(result, is_cut=recorder.refused is not None)

        output: dict[str, Any] = {
            "harness": result.agent_info.name,
            "failure": failure.exception_type if failure is not None else None,
            "verifier": (verdict.test_output + verdict.note)[-4000:],
        }
        if verdict.rewards is not None:
            output["rewards"] = dict(verdict.rewards)
            output["reward"] = reward_of(verdict.rewards, self._settings.reward_key)
        return self._trajectory(recorder, request, output)

    @contextlib.asynccontextmanager
    async def _trial(
        self, request: EpisodeRequest, task: TaskConfig, session: Session
    ) -> AsyncIterator[HarborTrial]:
        """Yield a trial with the session as its model, with its folder and its way to it."""
        from jax_agent_rl.agents.harbor.environment import LocalMachine
        from jax_agent_rl.agents.harbor.trial import HarborTrial, trial_config

        server, _ = self._serve()
        await self._starting
        address = server.url
        if self._settings.endpoint.url is not None:
            address = self._settings.endpoint.url.replace("{port}", str(server.port)).rstrip("/")
        access = ModelAccess.of_session(session, address)
        async with contextlib.AsyncExitStack() as stack:
            if self._settings.trials_dir is not None:
                trials_dir = Path(self._settings.trials_dir).expanduser()
            else:
                # That of a run that was killed is removed by the next one.
                trials_dir = make_temp_folder("jax-agent-rl-trial-")
                stack.callback(remove_temp_folder, trials_dir)

            machine = None
            if self._settings.environment == LOCAL:
                sandbox = await self._open_sandbox()
                relay = await stack.enter_async_context(contextlib.aclosing(UnixRelay(server.port)))
                await relay.start()
                machine = LocalMachine(
                    sandbox=sandbox,
                    limits=workspace_limits(self._settings.local),
                    endpoint=relay.path,
                    port=server.port,
                    mounts=self._mounts,
                )

            config = trial_config(
                self._settings,
                task,
                access,
                name=_trial_name(request.trajectory_id),
                trials_dir=trials_dir,
                agent_seconds=self.context.limits.run_timeout,
            )
            yield await HarborTrial.create(config, machine)

    @functools.cached_property
    def _mounts(self) -> dict[str, Path]:
        """The folders that harnesses see read-only, by name."""
        return read_mounts(self._settings.mounts, key="agent.harbor.mounts")

    async def _open_sandbox(self) -> Sandbox:
        """Return the sandbox of all trials, checked on first use."""
        async with self._opening:
            if self._sandbox is None:
                self._sandbox = await open_sandbox(
                    limits=sandbox_limits(self._settings.local),
                    max_running=self._settings.max_running,
                    otherwise="or set agent.harbor.environment",
                )
            return self._sandbox


def _trial_name(trajectory_id: str) -> str:
    """Return a name that no other trial has, also of the same trajectory."""
    readable = re.sub("[^a-zA-Z0-9]+", "-", trajectory_id).strip("-")[:40]
    return f"{readable}-{secrets.token_hex(4)}"
