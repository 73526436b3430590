"""Tasks of Inspect (``inspect-ai``), solved by the policy and scored by their own scorers.

::

    TASK ──► task_rows: a row per sample ──► eval, train
                                               │ a session per trajectory, on the endpoint
    the task's solver, tools included ◄────────┘ as model openai-api/…
    └─► the task's scorers ──► agent_output ──► the reward of data_source ``inspect``

Solvers run in this process, with their plain tools, and may edit the conversation or ask in several
ones. What needs a sandbox is refused: ``inspect eval --model openai-api/…`` runs it against
``jax-agent-rl serve``. A scorer that asks a model has to be given one by the row's ``model_roles``:
the policy never grades itself.

Needs the extra ``inspect``.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import yaml

from jax_agent_rl.agents.frameworks import OpenAIAgentLoop
from jax_agent_rl.agents.loop import register_agent
from jax_agent_rl.agents.prompt import openai_prompt
from jax_agent_rl.checks import brief_repr
from jax_agent_rl.errors import ConfigError, DataError, TrajectoryError
from jax_agent_rl.utils.packages import install_command, is_installed
from jax_agent_rl.utils.timeouts import DaemonThreads
from jax_agent_rl.utils.yaml_text import load_yaml

if TYPE_CHECKING:
    from inspect_ai import Task  # pyright: ignore[reportMissingImports]
    from inspect_ai.dataset import Sample  # pyright: ignore[reportMissingImports]
    from inspect_ai.model import Model  # pyright: ignore[reportMissingImports]
    from inspect_ai.solver import TaskState  # pyright: ignore[reportMissingImports]

NAME = "inspect"
"""Name of the agent, of its rows' data source, and of what they hold in ``extra_info``."""
_MODEL = "openai-api/jax-agent-rl/policy"
"""Inspect's name for the endpoint."""
_THREADS = DaemonThreads(kind="agent", error=TrajectoryError)


def task_rows(task: str, arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each sample of a task.

    Args:
        task: ``FILE.py@name``, or the name of an installed task.
        arguments: the task's.

    Raises:
        ConfigError: there is no such task, it has no scorer, or cannot run here.
    """
    settings = json.dumps(dict(arguments), sort_keys=True)
    loaded = load_task(task, settings)
    for index, sample in enumerate(loaded.dataset):
        problem = problem_of(loaded, sample)
        if problem:
            raise ConfigError(f"Inspect's task {task} cannot run here: {problem}")
        target = sample.target
        yield {
            "data_source": NAME,
            "agent_name": NAME,
            "prompt": _prompt(sample),
            "reward_model": {"ground_truth": target if isinstance(target, str) else list(target)},
            "extra_info": {NAME: {"task": task, "arguments": settings, "sample": index}},
        }


def task_arguments(words: Iterable[str]) -> dict[str, Any]:
    """Return the arguments of a task from ``key=value``, values in YAML.

    Raises:
        ConfigError: a word is none.
    """
    arguments = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"{word!r} is not an argument of a task: write key=value")
        try:
            arguments[key] = load_yaml(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{word!r}: the value is not valid YAML ({error})") from None
    return arguments


@register_agent(NAME)
class InspectAgentLoop(OpenAIAgentLoop):
    """Solves the sample of an Inspect task that ``extra_info.inspect`` names."""

    async def preflight(self) -> None:
        """See :class:`AgentLoop`.

        Raises:
            ConfigError: Inspect is not installed.
        """
        require_inspect()

    @staticmethod
    async def function(base_url: str, api_key: str, row: Mapping[str, Any]) -> dict[str, Any]:
        """Solve and score one sample; the result is the reward function's ``agent_output``."""
        settings = (row.get("extra_info") or {}).get(NAME)
        if not isinstance(settings, Mapping) or not isinstance(settings.get("task"), str):
            raise DataError(
                "extra_info.inspect must name a task and a sample, as `jax-agent-rl inspect-rows`"
                f" writes it, got {brief_repr(settings)}"
            )
        task = await _THREADS.run(
            lambda: load_task(settings["task"], settings.get("arguments", "{}")),
            name="Inspect task",
        )
        sample = copy.deepcopy(task.dataset[settings["sample"]])
        problem = problem_of(task, sample)
        if problem:
            raise TrajectoryError(f"Inspect's task {settings['task']} cannot run here: {problem}")
        _check_prompt(settings, row["prompt"], sample)

        roles = settings.get("model_roles") or {}
        # In tasks of their own: what Inspect keeps in context variables belongs to one sample.
        state = await asyncio.create_task(_solve(task, sample, base_url, api_key, roles))
        scores = await asyncio.create_task(_score(task, state, sample, roles))
        return {"scores": scores}


@functools.lru_cache(maxsize=16)
def load_task(task: str, arguments: str) -> Task:
    """Return a task.

    Args:
        task: ``FILE.py@name``, or the name of an installed task.
        arguments: the task's, as JSON text.

    Raises:
        ConfigError: there is none, or several.
    """
    require_inspect()
    from inspect_ai._eval.loader import load_tasks  # pyright: ignore[reportMissingImports]
    from inspect_ai._util.registry import (  # pyright: ignore[reportMissingImports]
        registry_params,
    )

    settings = json.loads(arguments)

    try:
        tasks = load_tasks([task], settings)
    except Exception as error:
        raise ConfigError(
            f"Inspect's task {task!r} cannot be loaded with {arguments}:"
            f" {type(error).__name__}: {error}"
        ) from error
    if len(tasks) != 1:
        raise ConfigError(
            f"{task!r} names {len(tasks)} tasks of Inspect; name one, as in FILE.py@name"
        )
    unknown = sorted(settings.keys() - registry_params(tasks[0]).keys())
    if unknown:  # which Inspect would pass over
        raise ConfigError(f"Inspect's task {task!r} has no argument {', '.join(unknown)}")
    return tasks[0]


def require_inspect() -> None:
    """Raise ConfigError if Inspect is not installed."""
    if not is_installed("inspect_ai"):
        raise ConfigError(
            f"Inspect is not installed; install the extra: {install_command('inspect')}"
        )


def problem_of(task: Task, sample: Sample) -> str | None:
    """Return why a sample cannot be solved or scored here; None if it can."""
    if task.sandbox is not None or sample.sandbox is not None or sample.files or sample.setup:
        return "it needs a sandbox; run it by `inspect eval` against `jax-agent-rl serve`"
    if not task.scorer:
        return "it has no scorer"
    if task.approval is not None:
        return "it asks for approval of tool calls"
    if task.cost_limit is not None:
        return "it has a limit on cost, and a policy has no price"
    return None


def _prompt(sample: Sample) -> list[dict[str, str]]:
    """Return a sample's input as messages, for people: its solver makes the prompt."""
    if isinstance(sample.input, str):
        return [{"role": "user", "content": sample.input}]
    return [{"role": message.role, "content": message.text} for message in sample.input]


def _check_prompt(settings: Mapping[str, Any], prompt: Any, sample: Sample) -> None:
    """Check that a sample is the one that the row was written of.

    A data set that is shuffled without a seed has others at the same places each time it is loaded,
    so that the members of a group, or training and held-out rows, could be mixed up.

    Raises:
        TrajectoryError: it is another one.
    """
    loaded_prompt = openai_prompt({"prompt": _prompt(sample)})
    if loaded_prompt != prompt:
        raise TrajectoryError(
            f"sample {settings['sample']} of Inspect's task {settings['task']} is now"
            f" {brief_repr(loaded_prompt)}, and was {brief_repr(prompt)} when the row was written;"
            " give the task's data set a seed, and run `jax-agent-rl inspect-rows` again"
        )


async def _solve(
    task: Task, sample: Sample, base_url: str, api_key: str, roles: Mapping[str, str]
) -> TaskState:
    """Return the state in which the task's solver leaves a sample."""
    # Inspect has no public function that solves one sample with a given model.
    from inspect_ai._eval.context import init_task_context  # pyright: ignore[reportMissingImports]
    from inspect_ai._eval.task.generate import (  # pyright: ignore[reportMissingImports]
        task_generate,
    )
    from inspect_ai._util.notgiven import NOT_GIVEN  # pyright: ignore[reportMissingImports]
    from inspect_ai.model import GenerateConfig, get_model  # pyright: ignore[reportMissingImports]
    from inspect_ai.solver import chain  # pyright: ignore[reportMissingImports]
    from inspect_ai.util import (  # pyright: ignore[reportMissingImports]
        LimitExceededError,
        apply_limits,
        message_limit,
        time_limit,
        token_limit,
        turn_limit,
    )

    config = GenerateConfig(max_retries=0).merge(task.config)
    model = get_model(_MODEL, base_url=base_url, api_key=api_key, config=config, memoize=False)
    # Inspect's working time leaves out waits for a model's rate limits, which a policy has not.
    seconds = [limit for limit in (task.time_limit, task.working_limit) if limit is not None]
    limits = [
        message_limit(task.message_limit),
        token_limit(task.token_limit, task.token_limit_type or "all"),
        turn_limit(task.turn_limit),
        time_limit(min(seconds, default=None)),
    ]
    async with model:
        init_task_context(model, _role_models(roles), config)
        state = _new_state(sample, model)

        async def generate(state: TaskState, tool_calls: Any = "loop", **kwargs: Any) -> TaskState:
            return await task_generate(
                model=model,
                state=state,
                tool_calls=tool_calls,
                cache=NOT_GIVEN,
                config=config.merge(kwargs),
            )

        solvers = [task.solver]
        if isinstance(task.setup, list):
            solvers = [*task.setup, task.solver]
        elif task.setup is not None:
            solvers = [task.setup, task.solver]
        try:
            with apply_limits(limits):
                return await chain(*solvers)(state, generate)
        except LimitExceededError:
            return state  # what was said so far is scored


def _new_state(sample: Sample, model: Model) -> TaskState:
    """Return the state in which a solver gets a sample; its store and transcript are new."""
    from inspect_ai.log._transcript import (  # pyright: ignore[reportMissingImports]
        Transcript,
        init_transcript,
    )
    from inspect_ai.model import (  # pyright: ignore[reportMissingImports]
        ChatMessageUser,
        ModelName,
    )
    from inspect_ai.scorer import Target  # pyright: ignore[reportMissingImports]
    from inspect_ai.solver import TaskState  # pyright: ignore[reportMissingImports]
    from inspect_ai.util._store import init_subtask_store  # pyright: ignore[reportMissingImports]

    messages = sample.input
    if isinstance(messages, str):
        messages = [ChatMessageUser(content=messages)]
    state = TaskState(
        model=ModelName(model),
        sample_id=sample.id or 0,
        epoch=1,
        input=sample.input,
        messages=copy.deepcopy(messages),
        target=Target(sample.target),
        choices=sample.choices,
        metadata=sample.metadata or {},
    )
    init_subtask_store(state.store)
    init_transcript(Transcript())
    return state


async def _score(
    task: Task, state: TaskState, sample: Sample, roles: Mapping[str, str]
) -> dict[str, float]:
    """Return the number of each scorer, by its name; a scorer of several numbers gives each."""
    from inspect_ai.model._model import init_model_roles  # pyright: ignore[reportMissingImports]
    from inspect_ai.scorer import Target, value_to_float  # pyright: ignore[reportMissingImports]
    from inspect_ai.util import registry_info  # pyright: ignore[reportMissingImports]

    # No model is active here: a scorer has to ask for a role.
    init_model_roles(_role_models(roles))
    to_float = value_to_float()
    numbers: dict[str, float] = {}
    for scorer in task.scorer:
        score = await scorer(state, Target(sample.target))
        if score is None:
            continue
        name = registry_info(scorer).name.rpartition("/")[2]
        if isinstance(score.value, Mapping):
            for key, value in score.value.items():
                numbers[f"{name}/{key}"] = to_float(value)
        else:
            numbers[name] = to_float(score.value)
    return numbers


def _role_models(roles: Mapping[str, str]) -> dict[str, Model]:
    from inspect_ai.model import get_model  # pyright: ignore[reportMissingImports]

    return {role: get_model(name) for role, name in roles.items()}
