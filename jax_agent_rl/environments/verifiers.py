"""Tasks of verifiers' tasksets (its v1 interface), played token-exactly by our own loop instead of a harness.

A row names the task::

    "extra_info": {"environment_kwargs": {"name": "verifiers", "taskset": "my_taskset", "index": 3, "config": {…}}}

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
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jax_agent_rl.chat.thinking import answer_of
from jax_agent_rl.environments.base import Environment, Observation, in_thread, register_environment
from jax_agent_rl.errors import EnvironmentFailedError, ToolArgumentError, ToolNotFoundError
from jax_agent_rl.tools.function_tool import FunctionTool
from jax_agent_rl.tools.schema import check_arguments
from jax_agent_rl.types import FinishReason, ToolCallRecord

if TYPE_CHECKING:
    from jax_agent_rl.chat.reply import Reply, ToolCall


@register_environment("verifiers")
class VerifiersEnvironment(Environment):
    """One task: the policy calls its tools until it answers; rewards are computed when the trajectory is over."""

    def __init__(self) -> None:
        self._task: Any = None
        self._trace: Any = None
        self._tools: dict[str, FunctionTool] = {}

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
        settings = (
            config if isinstance(config, str) else json.dumps(dict(config or {}), sort_keys=True)
        )
        self._task = await in_thread(lambda: _tasks(taskset, settings)[index], name="taskset")
        _require_supported(self._task)
        self._trace = _new_trace(self._task)
        for hook in _own_hooks(self._task, "setup"):
            await hook(trace=self._trace)
        self._tools = await _start_tools(self._task)
        messages = _opening(self._task.data)
        for message in messages:
            self._record(message)
        return Observation(
            messages=tuple({"role": m.role, "content": _text(m.content)} for m in messages)
        )

    async def step(self, reply: Reply) -> Observation:
        """Run the reply's tool calls; a reply without calls is the answer."""
        from verifiers.v1 import AssistantMessage, ToolMessage
        from verifiers.v1 import ToolCall as VerifiersCall

        number = len(self._trace.nodes)
        calls: list[VerifiersCall] = []
        records: list[ToolCallRecord] = []
        for part in reply.calls:
            if part.call is None:
                text = f"Error: Failed to decode tool call: {part.problem:.200}"
                records.append(
                    ToolCallRecord(name="", arguments=None, observation=text, error="malformed")
                )
                continue
            call_id = f"call_{number}_{len(calls)}"
            calls.append(
                VerifiersCall(
                    id=call_id, name=part.call.name, arguments=json.dumps(part.call.arguments)
                )
            )
            records.append(replace(await self._call(part.call), call_id=call_id))
        self._record(
            AssistantMessage(content=reply.content, tool_calls=calls or None), sampled=True
        )
        if records and not calls:
            return Observation.say(records[0].observation)
        messages: list[Mapping[str, Any]] = []
        for record in records:
            if record.call_id is not None:
                self._record(
                    ToolMessage(
                        tool_call_id=record.call_id, name=record.name, content=record.observation
                    )
                )
            named = {"name": record.name} if record.name else {}
            messages.append({"role": "tool", "content": record.observation, **named})
        done = not records or await self._stopped()
        return Observation(messages=tuple(messages), tool_calls=tuple(records), done=done)

    async def conclude(
        self, messages: Sequence[Mapping[str, Any]], reason: FinishReason
    ) -> Mapping[str, float]:
        """Return the weighted sum of the task's rewards, and each reward and metric by name."""
        from verifiers.v1 import AssistantMessage

        if reason is FinishReason.RESPONSE_LENGTH and messages[-1]["role"] == "assistant":
            self._record(
                AssistantMessage(content=answer_of(str(messages[-1]["content"]))), sampled=True
            )
        self._trace.ok = True
        self._trace.stop(_STOP_CONDITIONS.get(reason, "agent_completed"))
        for hook in _own_hooks(self._task, "finalize"):
            await hook(trace=self._trace)
        await self._task.score(self._trace)
        parts = {
            name: reward.score for name, reward in self._trace.rewards.items() if reward is not None
        }
        parts |= {name: value for name, value in self._trace.metrics.items() if value is not None}
        return {
            "score": self._trace.reward,
            **{f"verifiers/{name}": value for name, value in parts.items()},
        }

    def _record(self, message: Any, *, sampled: bool = False) -> None:
        """Add a message to the trace that rewards read."""
        from verifiers.v1 import MessageNode

        nodes = self._trace.nodes
        nodes.append(
            MessageNode(parent=len(nodes) - 1 if nodes else None, message=message, sampled=sampled)
        )

    async def _call(self, call: ToolCall) -> ToolCallRecord:
        """Run one tool call; the model reads any failure."""
        began, error = time.perf_counter(), None
        try:
            text = await self._execute(call)
        except ToolNotFoundError as failure:
            text, error = f"Error: {failure}", "unknown_tool"
        except ToolArgumentError as failure:
            text, error = f"Error: {failure}", "bad_arguments"
        except Exception as failure:
            text, error = f"Error: {call.name} raised {type(failure).__name__}: {failure}", "raised"
        seconds = time.perf_counter() - began
        return ToolCallRecord(
            name=call.name, arguments=call.arguments, observation=text, error=error, seconds=seconds
        )

    async def _execute(self, call: ToolCall) -> str:
        tool = self._tools.get(call.name)
        if tool is None:
            raise ToolNotFoundError(
                f"there is no tool {call.name[:100]!r}; available tools: {', '.join(self._tools)}"
            )
        result = await tool.execute(
            self._trace.id, check_arguments(tool.parameters, call.arguments)
        )
        return (
            result
            if isinstance(result, str)
            else json.dumps(result, ensure_ascii=False, default=str)
        )

    async def _stopped(self) -> bool:
        for predicate in self._task.hooks("stop"):
            result = predicate(self._trace)
            if await result if inspect.isawaitable(result) else result:
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
        self._loaded += itertools.islice(self._tasks, max(0, index + 1 - len(self._loaded)))
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
            "verifiers is not installed; install the extra: pip install 'jax_agent_rl[verifiers]'"
        ) from None
    config = vf.taskset_config_type(taskset).model_validate({**json.loads(settings), "id": taskset})
    return _LazyTasks(iter(vf.load_taskset(config)), taskset)


def _new_trace(task: Any) -> Any:
    from verifiers.v1 import AgentConfig, AgentInfo, Trace, TraceTask
    from verifiers.v1.state import state_cls

    about = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    return Trace(task=about, agent=AgentInfo(config=AgentConfig()), state=state_cls(type(task))())


def _require_supported(task: Any) -> None:
    """Raise EnvironmentFailedError for a task that cannot run or be scored correctly here."""
    from verifiers.v1 import State
    from verifiers.v1.state import state_cls
    from verifiers.v1.utils.decorators import discover_decorated

    hooks = [
        *_own_hooks(task, "setup"),
        *_own_hooks(task, "finalize"),
        *task.hooks("reward"),
        *task.hooks("metric"),
    ]
    hooks += [judge.score for judge in task.plugged_judges()]
    problems = [f"{hook.__name__} takes a runtime" for hook in hooks if _needs_runtime(hook)]
    problems += ["it needs a container"] * bool(task.NEEDS_CONTAINER or task.data.image)
    problems += [
        f"it intercepts messages ({hook.__name__})"
        for hook in discover_decorated(task, "intercept")
    ]
    problems += [
        f"{stop.__name__} looks at requests"
        for stop in task.hooks("stop")
        if not _reads_trace(stop)
    ]
    if task.toolsets(task.config) and state_cls(type(task)) is not State:
        problems.append("its tools share state with its rewards")
    if problems:
        raise EnvironmentFailedError(
            f"verifiers task {type(task).__name__} cannot run here: {'; '.join(problems)}. Run it"
            " under verifiers' own harness, as a client of an OpenAI-compatible endpoint"
        )


def _own_hooks(task: Any, name: str) -> list[Any]:
    """Return the task's own ``setup`` or ``finalize``, if any."""
    from verifiers.v1 import Task

    return [] if getattr(type(task), name) is getattr(Task, name) else [getattr(task, name)]


def _needs_runtime(hook: Any) -> bool:
    parameter = inspect.signature(hook).parameters.get("runtime")
    return parameter is not None and parameter.default is parameter.empty


def _reads_trace(predicate: Any) -> bool:
    parameters = list(inspect.signature(predicate).parameters.values())
    return len(parameters) == 1 and "Trace" in str(parameters[0].annotation)


async def _start_tools(task: Any) -> dict[str, FunctionTool]:
    """Return the tools of the task's toolsets under the names a harness would give them."""
    from verifiers.v1.utils.decorators import discover_decorated

    tools: dict[str, FunctionTool] = {}
    for toolset in task.toolsets(task.config):
        await toolset.setup()
        await toolset.setup_task(task.data)
        for function in discover_decorated(toolset, "tool"):
            name = getattr(function, "tool_name", None) or function.__name__
            full = f"{toolset.server_name}_{name}" if toolset.server_name else name
            tools[full] = FunctionTool(function, name=full)
    return tools


def _opening(data: Any) -> list[Any]:
    """Return system prompt and prompt as verifiers' messages."""
    from verifiers.v1 import SystemMessage, UserMessage

    prompt = (
        [UserMessage(content=data.prompt)]
        if isinstance(data.prompt, str)
        else list(data.prompt or ())
    )
    if not prompt:
        raise EnvironmentFailedError(
            f"verifiers task {data.idx} has no prompt: its user opens the conversation"
        )
    return [*([SystemMessage(content=data.system_prompt)] if data.system_prompt else []), *prompt]


def _text(content: Any) -> str:
    """Return message content as text; images are not supported."""
    if isinstance(content, str) or content is None:
        return content or ""
    if others := [part.type for part in content if part.type != "text"]:
        raise EnvironmentFailedError(
            f"a message of the task holds {others[0]}, which cannot be shown here"
        )
    return "\n".join(part.text for part in content)
