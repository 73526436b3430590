"""The tools of one trajectory: created, called, released.

Every failure becomes a message for the model::

    async with ToolSession(tools, instance_id, …) as session:          create(…) of every tool
        record = await session.call("calculator", {"expression": "1 + 1"})
                 │ unknown name · create failed ─┐
                 │ check_arguments ──────────────┤
                 │ tool.execute, with a timeout ─┼──► ToolCallRecord(observation="Error: …",
                 │ as_response · truncate ───────┘                   error=kind)
                                                                       release(…) of every tool,
                                                                       always
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from jax_agent_rl.checks import as_score
from jax_agent_rl.errors import ToolArgumentError, ToolError, ToolNotFoundError, ToolTimeoutError
from jax_agent_rl.tools.base import (
    BaseTool,
    ToolResponse,
    as_response,
    refuse_unseen,
)
from jax_agent_rl.tools.schema import check_arguments
from jax_agent_rl.tracing import span
from jax_agent_rl.types import ToolCallRecord
from jax_agent_rl.utils.failures import FailureLog, describe_error, error_place
from jax_agent_rl.utils.media import check_media
from jax_agent_rl.utils.text import counted
from jax_agent_rl.utils.timeouts import in_time


class ToolSession:
    """Tools of one trajectory, as an async context manager.

    Args:
        tools: the tools of this sample, by name.
        instance_id: the trajectory's id.
        kwargs: the row's ``extra_info.tools_kwargs``: ``{tool: {"create_kwargs": {…}, …}}``.
        timeout: time limit of create, of each call and of release, in seconds.
        shorten: cuts an observation to its maximum length.
        max_parallel_calls: maximum number of calls run per turn; None: any number.
        modalities: kinds of media the model and the engine accept, of ``image`` and ``video``.
        failures: told of what fails; None: a log of its own.

    Attributes:
        metrics: sums of the numbers the tools reported, named ``tool/<name>/<key>``.
    """

    def __init__(
        self,
        tools: Mapping[str, BaseTool],
        instance_id: str,
        *,
        kwargs: Mapping[str, Mapping[str, Any]],
        timeout: float,
        shorten: Callable[[str], str],
        max_parallel_calls: int | None = None,
        modalities: Collection[str] = (),
        failures: FailureLog | None = None,
    ):
        self.metrics: dict[str, float] = {}
        self._tools = tools
        self._id = instance_id
        self._kwargs = kwargs
        self._timeout = timeout
        self.shorten = shorten
        self._max_parallel_calls = max_parallel_calls
        self._modalities = modalities
        self._failures = failures or FailureLog()
        self._created: list[str] = []
        self._broken: dict[str, str] = {}  # tools whose create failed, and why

    async def __aenter__(self) -> ToolSession:
        try:
            for name in self._tools:
                await self._create(name)
        except BaseException:  # cancelled: __aexit__ will not run
            await asyncio.shield(self._release_all())
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(self._release_all())  # even if the caller is cancelled again

    async def call(
        self, name: str, arguments: Any, *, call_id: str | None = None, earlier_calls: int = 0
    ) -> ToolCallRecord:
        """Run one call; never raise for a mistake of the tool or the model.

        Args:
            arguments: as the model wrote them.
            call_id: the id that the model gave the call, kept in the record.
            earlier_calls: calls of the same turn before this one, which is answered with an error
                if they reach ``max_parallel_calls``.
        """
        limit = self._max_parallel_calls
        if limit is not None and earlier_calls >= limit:
            text = f"Error: {name} was not run: at most {counted(limit, 'tool call')} in one turn"
            return ToolCallRecord(
                name=name,
                arguments=arguments if isinstance(arguments, Mapping) else None,
                observation=self.shorten(text),
                error="over_parallel_limit",
                call_id=call_id,
            )
        with span("tool", name) as traced:
            record = await self._call(name, arguments, call_id)
            traced.set(arguments=arguments, observation=record.observation, tool_error=record.error)
        return record

    async def _call(self, name: str, arguments: Any, call_id: str | None) -> ToolCallRecord:
        start_time = time.perf_counter()
        error_kind = None
        try:
            response = await self._execute(name, arguments)
        except ToolError as error:
            response = ToolResponse(text=f"Error: {error}")
            error_kind = _KINDS.get(type(error), "raised")
        except Exception as error:
            error_type = type(error).__name__
            self._failures.report(
                f"tool {name!r} raised {error_type} at {error_place(error)}",
                f"{self._id}: tool {name!r} raised {describe_error(error)}",
                error=error,
            )
            response = ToolResponse(text=f"Error: {name} raised {error_type}: {error}")
            error_kind = "raised"
        return ToolCallRecord(
            name=name,
            arguments=arguments if isinstance(arguments, Mapping) else None,
            observation=self.shorten(response.text),
            error=error_kind,
            reward=response.reward,
            seconds=time.perf_counter() - start_time,
            call_id=call_id,
            media=response.media,
        )

    def is_stateful(self, name: str) -> bool:
        """Return whether the tool keeps state of this trajectory; False if it does not exist."""
        return name in self._tools and self._tools[name].stateful

    async def calc_rewards(self) -> dict[str, float]:
        """Return each tool's score of the whole trajectory, by name.

        Call it once, at the end of the conversation. A failing tool has no score; the failure is
        logged and counted as ``tool/<name>/calc_reward_errors``.
        """
        scores: dict[str, float] = {}
        for name in self._created:
            if name in self._broken:
                continue

            tool = self._tools[name]
            kwargs = self._kwargs_for(name, "calc_reward_kwargs")
            try:
                score = await self._in_time(
                    lambda tool=tool, kwargs=kwargs: tool.calc_reward(self._id, **kwargs),
                    name,
                    f"{name} gave no reward",
                )
                if score is not None:
                    scores[name] = as_score(score, "a tool's reward")
            except Exception as error:
                self._report(f"tool {name!r} could not score a trajectory", error)
                self._add_metric(name, "calc_reward_errors", 1)
        return scores

    async def _execute(self, name: str, arguments: Any) -> ToolResponse:
        """Run one call; raise ToolError for a mistake of the tool or the model."""
        tool = self._tools.get(name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            raise ToolNotFoundError(f"there is no tool {name[:100]!r}; available tools: {known}")
        if name in self._broken:
            raise ToolError(f"{name} is not available: {self._broken[name]}")

        try:
            valid_arguments = check_arguments(tool.parameters, arguments)
        except ToolArgumentError as error:
            raise ToolArgumentError(f"wrong arguments for {name}: {error}") from None

        kwargs = self._kwargs_for(name, "execute_kwargs")
        result = await self._in_time(
            lambda: tool.execute(self._id, valid_arguments, **kwargs),
            name,
            f"{name} did not answer",
            waits_for=tool.waits_for,
        )

        response = as_response(result)
        problem = refuse_unseen(
            response.media,
            self._modalities,
            source=name,
            logged_as=f"tool {name!r}",
            reason="this model, its chat template or its engine cannot take it",
            failures=self._failures,
        )
        if problem:
            raise ToolError(problem)
        try:
            check_media(response.media)
        except ValueError as error:
            raise ToolError(f"{name} returned something that cannot be shown: {error}") from None

        for key, value in response.metrics.items():
            self._add_metric(name, key, value)
        return response

    def _add_metric(self, name: str, key: str, value: float) -> None:
        key = f"tool/{name}/{key}"
        self.metrics[key] = self.metrics.get(key, 0.0) + value

    async def _create(self, name: str) -> None:
        """Create a tool; one that fails is unavailable to the trajectory."""
        self._created.append(name)
        kwargs = self._kwargs_for(name, "create_kwargs")
        try:
            await self._in_time(
                lambda: self._tools[name].create(self._id, **kwargs),
                name,
                f"{name} was not created",
            )
        except Exception as error:
            self._report(f"tool {name!r} could not be created", error)
            self._broken[name] = str(error)

    async def _release_all(self) -> None:
        """Release what was created, last first; one failure does not affect the others."""
        while self._created:
            name = self._created.pop()
            tool = self._tools[name]
            kwargs = self._kwargs_for(name, "release_kwargs")
            try:
                await self._in_time(
                    lambda tool=tool, kwargs=kwargs: tool.release(self._id, **kwargs),
                    name,
                    f"{name} was not released",
                )
            except Exception as error:
                self._report(f"tool {name!r} could not be released", error)

    def _report(self, problem: str, error: Exception) -> None:
        self._failures.report(
            f"{problem} at {error_place(error)}",
            f"{self._id}: {problem}: {describe_error(error)}",
            error=error,
        )

    def _kwargs_for(self, name: str, kind: str) -> Mapping[str, Any]:
        return (self._kwargs.get(name) or {}).get(kind) or {}

    async def _in_time(
        self,
        call: Callable[[], Awaitable[Any]],
        name: str,
        failure: str,
        *,
        waits_for: Callable[[str], str | None] = lambda instance_id: None,
    ) -> Any:
        """Call a tool's code, and raise ToolTimeoutError on timeout.

        Args:
            call: calls the tool's code.
            name: the tool's name.
            failure: says what a timeout means, e.g. ``add did not answer``.
            waits_for: says what the tool was waiting for.
        """

        def late() -> ToolTimeoutError:
            message = f"{failure} within {self._timeout:g} seconds"
            reason = waits_for(self._id)
            if reason:
                message += f": {reason}"
                self._failures.report(
                    f"{failure} in time",
                    f"{failure} within agent.tool_timeout={self._timeout:g} seconds: {reason}",
                )
            return ToolTimeoutError(message)

        return await in_time(
            call,
            self._timeout,
            what=f"tool {name!r}",
            late=late,
            error=lambda problem: ToolError(f"{failure}: it {problem}"),
        )


_KINDS: dict[type[ToolError], str] = {
    ToolNotFoundError: "unknown_tool",
    ToolArgumentError: "bad_arguments",
    ToolTimeoutError: "timeout",
}
