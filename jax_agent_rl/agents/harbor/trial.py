"""One trial of Harbor: what it is configured with, and what its result says of the trajectory.

::

    row, agent.harbor ──► TrialConfig ──► Trial.run ──► TrialResult ──► Verdict
                                             │                      └─► a TrajectoryError
                                  harness ──HTTP──► endpoint

Harbor's own failures become the errors of this project, so that each is counted under its reason:

==================================================  ================================
Harbor says                                         the trajectory is lost with
==================================================  ================================
the environment did not start, its build failed     ``EnvironmentFailedError``
the sandbox of the tests did not start              ``EnvironmentFailedError``
it ended while the harness ran                      ``EnvironmentFailedError``
it did not start in time                            ``EnvironmentTimeoutError``
the harness, or its setup, ran past its limit       ``AgentTimeoutError``
the harness failed                                  ``TrajectoryError``
tests could not be brought there, or read back      ``RewardError``
==================================================  ================================

A verifier that did not end in time, or left no number, is reward 0 with a note: a program that the
tests run could be the cause.
"""

# pyright: reportMissingImports=false
# Harbor is in an environment of its own (launch/harbor_environment.sh).

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harbor.agents.factory import AgentFactory
from harbor.environments.factory import EnvironmentFactory
from harbor.models.task.task import Task
from harbor.models.task.verifier_mode import task_has_any_separate_verifier
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.models.trial.error_policy import ErrorPolicyOverride
from harbor.models.trial.result import ExceptionInfo, TrialResult
from harbor.tasks.client import TaskClient
from harbor.trial.hooks import TrialEvent, TrialHookEvent
from harbor.trial.trial import Trial
from pydantic import ValidationError

from jax_agent_rl.agents.frameworks import ModelAccess
from jax_agent_rl.agents.harbor.environment import LocalEnvironment, LocalMachine
from jax_agent_rl.checks import as_score
from jax_agent_rl.config.harbor_agent import LOCAL, HarborConfig
from jax_agent_rl.data.task_folder import task_folder
from jax_agent_rl.errors import (
    AgentTimeoutError,
    ConfigError,
    DataError,
    EnvironmentFailedError,
    EnvironmentTimeoutError,
    RewardError,
    TrajectoryError,
)

_LOCAL_CLASS = f"{LocalEnvironment.__module__}:{LocalEnvironment.__name__}"
_OUTPUT_BYTES = 16_000
_CHECK_SECONDS = 60.0
"""For a command that does nothing, after a harness failed."""
_NO_REWARD = frozenset(
    {
        "RewardFileEmptyError",
        "RewardFileNotFoundError",
        "VerifierOutputParseError",
        "VerifierTimeoutError",
    }
)
"""Failures of the verifier that a program which the tests run could cause."""
_ENVIRONMENT_ENDED = frozenset(
    {
        "GKEExecStreamClosedError",
        "GKEPodNotFoundError",
        "MemoryLimitExceededError",
        "SSHAccessError",
        "SandboxLikelyOutOfMemoryError",
    }
)
"""Failures by which Harbor says that the environment has ended; it runs no tests after them."""
_NEED_TERMINALS = frozenset({"terminus", "terminus-1", "terminus-2"})
_TIMEOUTS: Mapping[str, type[TrajectoryError]] = {
    "AgentSetupTimeoutError": AgentTimeoutError,
    "AgentTimeoutError": AgentTimeoutError,
    "EnvironmentStartTimeoutError": EnvironmentTimeoutError,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What Harbor's verifier said.

    Attributes:
        rewards: by name; None: the task has no verifier.
        note: why the reward is 0, where the tests' output does not say it, and what the tests did
            not see.
        test_output: the end of what the tests printed.
    """

    rewards: Mapping[str, float] | None
    note: str = ""
    test_output: str = ""


# --- configuration --------------------------------------------------------------------------------


def check_settings(settings: HarborConfig) -> None:
    """Check the names of harness and environment, and their options.

    Raises:
        ConfigError: one of them is wrong; names its key.
    """
    access = ModelAccess(host_url="http://127.0.0.1:1", api_key="key")
    try:
        AgentFactory.run_preflight(_agent_config(settings, access, 1.0))
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"agent.harbor.agent={settings.agent!r}: {error}") from error
    if settings.environment == LOCAL and settings.agent in _NEED_TERMINALS:
        raise ConfigError(
            f"agent.harbor.agent={settings.agent!r} works in a terminal of tmux, and programs in"
            " the sandbox can open no terminal; set agent.harbor.environment"
        )

    key = f"agent.harbor.environment={settings.environment!r}"
    try:
        environment = _environment_config(settings)
        EnvironmentFactory.run_preflight(
            environment.type, environment.import_path, kwargs=environment.kwargs
        )
    except (ImportError, TypeError, ValueError) as error:
        names = ", ".join([LOCAL, *EnvironmentFactory.registered_names()])
        raise ConfigError(f"{key}: {error}; there are {names}, and module:Class") from error
    except SystemExit as error:  # as Harbor's environments report missing credentials
        raise ConfigError(f"{key}: {error}") from error


def read_task(row: Mapping[str, Any]) -> TaskConfig:
    """Return the task that a row names: a folder, or an entry that Harbor's client fetches.

    Raises:
        DataError: it names none.
    """
    folder = task_folder(row)
    if folder is not None:
        return TaskConfig(path=folder.resolve())
    extra_info = row.get("extra_info")
    entry = extra_info.get("task") if isinstance(extra_info, Mapping) else None
    if not isinstance(entry, Mapping):
        raise DataError(
            "extra_info.task of a row for agent 'harbor' is a task's folder, or a mapping with"
            f" `name`, or `git_url` and `path`; got {entry!r}"
        )
    known = {name: value for name, value in entry.items() if value is not None}
    try:
        return TaskConfig.model_validate(known)
    except ValidationError as error:
        raise DataError(f"extra_info.task={known!r} names no task of Harbor: {error}") from None


def trial_config(
    settings: HarborConfig,
    task: TaskConfig,
    access: ModelAccess,
    *,
    name: str,
    trials_dir: Path,
    agent_seconds: float,
) -> TrialConfig:
    """Return the configuration of a trial.

    Args:
        name: the trial's, and of its folder in ``trials_dir``.
        agent_seconds: limit of the harness, besides the task's own.
    """
    return TrialConfig(
        task=task,
        trial_name=name,
        trials_dir=trials_dir,
        agent=_agent_config(settings, access, agent_seconds),
        environment=_environment_config(settings),
        # What such a trial left is not scored, so its tests need not run.
        override_error_policy={"AgentTimeoutError": ErrorPolicyOverride(should_grade=False)},
    )


def _agent_config(settings: HarborConfig, access: ModelAccess, seconds: float) -> AgentConfig:
    return AgentConfig(
        name=settings.agent,
        model_name=settings.model,
        kwargs=access.fill_in(settings.agent_options),
        env={**access.env, **access.fill_in(settings.agent_env)},
        max_timeout_sec=seconds,
    )


def _environment_config(settings: HarborConfig) -> EnvironmentConfig:
    options = dict(settings.environment_options)
    if settings.environment == LOCAL:
        return EnvironmentConfig(import_path=_LOCAL_CLASS, kwargs=options)
    if ":" in settings.environment:
        return EnvironmentConfig(import_path=settings.environment, kwargs=options)
    return EnvironmentConfig.model_validate({"type": settings.environment, "kwargs": options})


# --- the trial ------------------------------------------------------------------------------------


class HarborTrial:
    """A trial that runs once; create it with :meth:`create`."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        environment = trial.agent_environment
        self._local = environment if isinstance(environment, LocalEnvironment) else None
        self._environment_problem: str | None = None

    @classmethod
    async def create(cls, config: TrialConfig, machine: LocalMachine | None) -> HarborTrial:
        """Prepare a trial; Harbor's client fetches its task if need be.

        Args:
            machine: for trials in the sandbox.

        Raises:
            EnvironmentFailedError: the task cannot be had, or the environment cannot run it.
        """
        try:
            trial = await Trial.create(await _with_limit(config))
        except Exception as error:  # of Harbor, its client and its environments: any
            raise EnvironmentFailedError(
                f"task {config.task.path or config.task.name}: {type(error).__name__}: {error}"
            ) from error

        harbor_trial = cls(trial)
        if harbor_trial._local is not None:
            assert machine is not None
            harbor_trial._refuse_unsafe_verifiers()
            harbor_trial._local.connect(machine)
            trial.add_hook(TrialEvent.VERIFICATION_START, harbor_trial._begin_tests)
        else:
            trial.add_hook(TrialEvent.VERIFICATION_START, harbor_trial._check_environment)
        return harbor_trial

    def _refuse_unsafe_verifiers(self) -> None:
        """Refuse tasks whose tests the sandbox cannot keep from what a program left."""
        config = self._trial.task.config
        problem = None
        if config.steps:
            problem = "has several steps"
        elif task_has_any_separate_verifier(config):
            problem = "has an environment of its own for the verifier"
        if problem is not None:
            raise EnvironmentFailedError(
                f"task {self._trial.task.name} {problem}, which the sandbox does not have; set"
                " agent.harbor.environment"
            )

    async def _begin_tests(self, event: TrialHookEvent) -> None:
        assert self._local is not None
        await self._local.begin_tests()

    async def _check_environment(self, event: TrialHookEvent) -> None:
        """Find out whether a harness failed because its environment is gone."""
        if failure_of(event.result) is None:
            return
        try:
            async with asyncio.timeout(_CHECK_SECONDS):
                await self._trial.agent_environment.exec("true", cwd="/")
        except Exception as error:  # of a provider's package: any
            self._environment_problem = f"{type(error).__name__}: {error}"
            raise

    async def run(self) -> TrialResult:
        """Run the trial to its end; nothing of it is left, also if it is cancelled.

        Harbor stops the environment. The sandbox is stopped once more, for a cancellation may come
        while Harbor does so.
        """
        try:
            return await self._trial.run()
        finally:
            if self._local is not None:
                await self._local.stop(delete=True)

    def verdict(self, result: TrialResult, *, is_cut: bool) -> Verdict:
        """Return what the verifier said.

        Args:
            is_cut: whether a budget of the run refused the model's next turn, which can be why the
                harness failed.

        Raises:
            TrajectoryError: there is no verdict; of the class that says whose failure it is.
        """
        if self._environment_problem is not None:
            raise EnvironmentFailedError(
                f"trial {result.trial_name}: the environment ended while the harness ran:"
                f" {self._environment_problem[:1000]}"
            )
        output = _tail(self._trial.paths.test_stdout_path)
        local = self._local
        note = ""
        if local is not None:
            if local.tests_failure is not None:
                raise EnvironmentFailedError(
                    f"trial {result.trial_name}: the tests' sandbox: {local.tests_failure}"
                )
            if local.tests_problem is not None:
                return Verdict(rewards={"reward": 0.0}, note=local.tests_problem)
            note = local.tests_note

        failure = failure_of(result)
        if failure is None or (is_cut and result.verifier_result is not None):
            rewards = None
            if result.verifier_result is not None:
                rewards = result.verifier_result.rewards or {}
            return Verdict(rewards=rewards, note=note, test_output=output)

        is_no_reward = failure.exception_type in _NO_REWARD or local is not None
        if _is_of_verifier(failure, result) and is_no_reward:
            note += f"{failure.exception_type}: {failure.exception_message[:500]}"
            return Verdict(rewards={"reward": 0.0}, note=note, test_output=output)
        raise as_error(failure, result)


async def _with_limit(config: TrialConfig) -> TrialConfig:
    """Return a configuration in which the harness has a time limit, also where the task has none.

    Harbor takes ``max_timeout_sec`` for the maximum of the task's own limit alone.
    """
    task = config.task
    fetched = await TaskClient().download_tasks(
        task_ids=[task.get_task_id()], overwrite=task.overwrite, output_dir=task.download_dir
    )
    folder = fetched.results[0].path
    settings = await asyncio.to_thread(lambda: Task(task_dir=folder).config)
    if settings.agent.timeout_sec is not None:
        return config
    limit = {"override_timeout_sec": config.agent.max_timeout_sec}
    return config.model_copy(update={"agent": config.agent.model_copy(update=limit)})


def failure_of(result: TrialResult) -> ExceptionInfo | None:
    """Return what went wrong first in a trial; None if nothing did."""
    return next(iter(result.recorded_exceptions()), None)


def _is_of_verifier(failure: ExceptionInfo, result: TrialResult) -> bool:
    timing = result.verifier
    if timing is None or timing.started_at is None:
        return False
    return failure.occurred_at >= timing.started_at


def as_error(failure: ExceptionInfo, result: TrialResult) -> TrajectoryError:
    """Return the error of a trial that failed."""
    message = f"{failure.exception_type}: {failure.exception_message.strip()[:1000]}"
    if failure.exception_type in _ENVIRONMENT_ENDED:
        return EnvironmentFailedError(
            f"trial {result.trial_name}: the environment ended while the harness ran: {message}"
        )

    error_class = _TIMEOUTS.get(failure.exception_type)
    if error_class is None:
        if _is_of_verifier(failure, result):
            error_class = RewardError
        elif result.agent_execution is not None:
            error_class = TrajectoryError
        else:
            error_class = EnvironmentFailedError
    return error_class(f"trial {result.trial_name}: {message}")


def reward_of(rewards: Mapping[str, float], key: str) -> float:
    """Return the reward among the verifier's.

    Raises:
        RewardError: there are several, none of which has the name ``key``, or it is not a score.
    """
    if key in rewards:
        reward = rewards[key]
    elif len(rewards) == 1:
        (reward,) = rewards.values()
    else:
        raise RewardError(
            f"the verifier gave {sorted(rewards)} and no {key!r}; set agent.harbor.reward_key"
        )
    try:
        return as_score(reward, "the verifier's reward")
    except ValueError as error:
        raise RewardError(str(error)) from None


def _tail(path: Path) -> str:
    """Return the end of a text file; empty if there is none."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _OUTPUT_BYTES))
        return file.read(_OUTPUT_BYTES).decode("utf-8", "replace")
    return ""
