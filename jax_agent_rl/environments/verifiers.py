"""Tasks of verifiers' tasksets (its v1 interface), played token-exactly without a harness.

A row names the task::

    "extra_info": {
        "environment_kwargs": {
            "name": "verifiers", "taskset": "my_taskset", "index": 3, "config": {…}
        }
    }

Prompt, system prompt, toolsets (called in this process), trace stops, rewards and metrics are the
task's. What needs a place to run commands in (containers, hooks and rewards that take a
``runtime``) or sees raw requests is refused, never skipped: such an environment runs under
verifiers' own harness as a client of an OpenAI-compatible endpoint.

Needs the extra ``verifiers``.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax_agent_rl.chat.thinking import answer_of
from jax_agent_rl.environments.base import Environment, Observation, in_thread, register_environment
from jax_agent_rl.environments.calls import EpisodeTool, call_messages, run_calls, tools_by_name
from jax_agent_rl.errors import EnvironmentFailedError
from jax_agent_rl.tools.function_tool import FunctionTool
from jax_agent_rl.types import FinishReason
from jax_agent_rl.utils.packages import install_command

if TYPE_CHECKING:
    from jax_agent_rl.chat.reply import Reply


@register_environment("verifiers")
class VerifiersEnvironment(Environment):
    """One task: the policy calls its tools until it answers.

    Rewards are computed when the trajectory is over.
    """

    def __init__(self) -> None:
        self._task: Any = None
        self._trace: Any = None
        self._tools: dict[str, EpisodeTool] = {}

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, Any]]:
        return [tool.schema for tool in self._tools.values()]

    async def reset(
        self, *, taskset: str, index: int, config: Mapping[str, Any] | str | None = None
    ) -> Observation:
        """Begin a task.

        Args:
            taskset: an installed taskset package, by the id verifiers knows it under.
            index: position of the task in the taskset.
            config: the taskset's configuration (JSON text where a Parquet file cannot hold a
                mapping).
        """
        settings = config
        if not isinstance(settings, str):
            settings = json.dumps(dict(settings or {}), sort_keys=True)
        self._task = await in_thread(lambda: _tasks(taskset, settings)[index], name="taskset")
        _require_supported(self._task)

        self._trace = _new_trace(self._task)
        for hook in _overridden_hooks(self._task, "setup"):
            await hook(trace=self._trace)
        self._tools = await _start_tools(self._task, self._trace.id)

        opening = _opening(self._task.data)
        for message in opening:
            self._record(message)
        messages = [
            {"role": message.role, "content": _text(message.content)} for message in opening
        ]
        return Observation(messages=tuple(messages))

    async def step(self, reply: Reply) -> Observation:
        """Run the reply's tool calls; a reply without calls is the answer."""
        from verifiers.v1 import AssistantMessage, ToolMessage
        from verifiers.v1 import ToolCall as VerifiersCall

        records = await run_calls(self._tools, reply, turn=len(self._trace.nodes))
        calls: list[VerifiersCall] = []
        for record in records:
            if record.call_id is not None:
                arguments = json.dumps(record.arguments)
                calls.append(
                    VerifiersCall(id=record.call_id, name=record.name, arguments=arguments)
                )
        turn = AssistantMessage(content=reply.content, tool_calls=calls or None)
        self._record(turn, sampled=True)
        for record in records:
            if record.call_id is not None:
                self._record(
                    ToolMessage(
                        tool_call_id=record.call_id, name=record.name, content=record.observation
                    )
                )

        done = not records or (bool(calls) and await self._stopped())
        return Observation(messages=call_messages(records), tool_calls=tuple(records), done=done)

    async def conclude(
        self, messages: Sequence[Mapping[str, Any]], reason: FinishReason
    ) -> Mapping[str, float]:
        """Return the weighted sum of the task's rewards, and each reward and metric by name."""
        from verifiers.v1 import AssistantMessage

        if reason is FinishReason.RESPONSE_LENGTH and messages[-1]["role"] == "assistant":
            # A turn that was cut off did not get to `step`, but rewards have to read it.
            text = answer_of(str(messages[-1]["content"]))
            self._record(AssistantMessage(content=text), sampled=True)
        self._trace.ok = True
        self._trace.stop(_STOP_CONDITIONS.get(reason, "agent_completed"))
        for hook in _overridden_hooks(self._task, "finalize"):
            await hook(trace=self._trace)
        await self._task.score(self._trace)

        result = {"score": self._trace.reward}
        for name, reward in self._trace.rewards.items():
            if reward is not None:
                result[f"verifiers/{name}"] = reward.score
        for name, value in self._trace.metrics.items():
            if value is not None:
                result[f"verifiers/{name}"] = value
        return result

    def _record(self, message: Any, *, sampled: bool = False) -> None:
        """Add a message to the trace that rewards read."""
        from verifiers.v1 import MessageNode

        nodes = self._trace.nodes
        parent = len(nodes) - 1 if nodes else None
        nodes.append(MessageNode(parent=parent, message=message, sampled=sampled))

    async def _stopped(self) -> bool:
        """Return whether one of the task's stop conditions holds."""
        for predicate in self._task.hooks("stop"):
            result = predicate(self._trace)
            if inspect.isawaitable(result):
                result = await result
            if result:
                return True
        return False


_STOP_CONDITIONS = {
    FinishReason.MAX_ASSISTANT_TURNS: "max_turns",
    FinishReason.MAX_USER_TURNS: "max_turns",
    FinishReason.RESPONSE_LENGTH: "max_total_tokens",
}


class _LazyTasks:
    """Tasks by index, loaded on demand: a taskset may be endless."""

    def __init__(self, tasks: Iterator[Any], name: str):
        self._tasks = tasks
        self._name = name
        self._loaded: list[Any] = []

    def __getitem__(self, index: int) -> Any:
        missing = max(0, index + 1 - len(self._loaded))
        self._loaded += itertools.islice(self._tasks, missing)
        if not 0 <= index < len(self._loaded):
            raise EnvironmentFailedError(
                f"taskset {self._name!r} has {len(self._loaded)} tasks, not number {index}"
            )
        return self._loaded[index]


@functools.lru_cache(maxsize=16)
def _tasks(taskset: str, settings: str) -> _LazyTasks:
    try:
        import verifiers.v1 as vf
    except ImportError:
        raise EnvironmentFailedError(
            f"verifiers is not installed; install the extra: {install_command('verifiers')}"
        ) from None
    config = vf.taskset_config_type(taskset).model_validate({**json.loads(settings), "id": taskset})
    return _LazyTasks(iter(vf.load_taskset(config)), taskset)


def _new_trace(task: Any) -> Any:
    from verifiers.v1 import AgentConfig, AgentInfo, Trace, TraceTask
    from verifiers.v1.state import state_cls

    trace_task = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    agent = AgentInfo(config=AgentConfig())
    return Trace(task=trace_task, agent=agent, state=state_cls(type(task))())


def _require_supported(task: Any) -> None:
    """Raise EnvironmentFailedError for a task that cannot run or be scored correctly here."""
    from verifiers.v1 import State
    from verifiers.v1.state import state_cls
    from verifiers.v1.utils.decorators import discover_decorated

    hooks = [
        *_overridden_hooks(task, "setup"),
        *_overridden_hooks(task, "finalize"),
        *task.hooks("reward"),
        *task.hooks("metric"),
    ]
    hooks += [judge.score for judge in task.plugged_judges()]

    problems = []
    for hook in hooks:
        if _needs_runtime(hook):
            problems.append(f"{hook.__name__} takes a runtime")
    if task.NEEDS_CONTAINER or task.data.image:
        problems.append("it needs a container")
    for hook in discover_decorated(task, "intercept"):
        problems.append(f"it intercepts messages ({hook.__name__})")
    for stop in task.hooks("stop"):
        if not _reads_trace(stop):
            problems.append(f"{stop.__name__} looks at requests")
    if task.toolsets(task.config) and state_cls(type(task)) is not State:
        problems.append("its tools share state with its rewards")
    if problems:
        raise EnvironmentFailedError(
            f"verifiers task {type(task).__name__} cannot run here: {'; '.join(problems)}. Run it"
            " under verifiers' own harness, as a client of an OpenAI-compatible endpoint"
        )


def _overridden_hooks(task: Any, name: str) -> list[Any]:
    """Return the task's ``setup`` or ``finalize``, or nothing if its class does not define it."""
    from verifiers.v1 import Task

    if getattr(type(task), name) is getattr(Task, name):
        return []
    return [getattr(task, name)]


def _needs_runtime(hook: Any) -> bool:
    parameter = inspect.signature(hook).parameters.get("runtime")
    return parameter is not None and parameter.default is parameter.empty


def _reads_trace(predicate: Any) -> bool:
    parameters = list(inspect.signature(predicate).parameters.values())
    return len(parameters) == 1 and "Trace" in str(parameters[0].annotation)


async def _start_tools(task: Any, trace_id: str) -> dict[str, EpisodeTool]:
    """Return the tools of the task's toolsets under the names a harness would give them."""
    from verifiers.v1.utils.decorators import discover_decorated

    tools: list[EpisodeTool] = []
    for toolset in task.toolsets(task.config):
        await toolset.setup()
        await toolset.setup_task(task.data)
        for function in discover_decorated(toolset, "tool"):
            name = getattr(function, "tool_name", None) or function.__name__
            if toolset.server_name:
                name = f"{toolset.server_name}_{name}"
            tool = FunctionTool(function, name=name)
            tools.append(
                EpisodeTool(
                    name=name,
                    description=tool.description,
                    parameters=tool.parameters,
                    run=functools.partial(_run_function, tool, trace_id),
                )
            )
    return tools_by_name(tools)


async def _run_function(tool: FunctionTool, trace_id: str, arguments: dict[str, Any]) -> str:
    result = await tool.execute(trace_id, arguments)
    if isinstance(result, str):
        return result
    return json.dumps(result, ensure_ascii=False, default=str)


def _opening(data: Any) -> list[Any]:
    """Return system prompt and prompt as verifiers' messages."""
    from verifiers.v1 import SystemMessage, UserMessage

    if isinstance(data.prompt, str):
        prompt = [UserMessage(content=data.prompt)]
    else:
        prompt = list(data.prompt or ())
    if not prompt:
        raise EnvironmentFailedError(
            f"verifiers task {data.idx} has no prompt: its user opens the conversation"
        )
    if not data.system_prompt:
        return prompt
    return [SystemMessage(content=data.system_prompt), *prompt]


def _text(content: Any) -> str:
    """Return message content as text; images are not supported."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    for part in content:
        if part.type != "text":
            raise EnvironmentFailedError(
                f"a message of the task holds {part.type}, which cannot be shown here"
            )
    return "\n".join(part.text for part in content)
