"""The tools of one trajectory: created, called, released; every failure becomes something the model can read.

::

    async with ToolSession(tools, instance_id, limits=…, …) as session:      create(…) of every tool
        record = await session.call("calculator", {"expression": "1 + 1"})
                 │ unknown name · create failed ─┐
                 │ check_arguments ──────────────┤
                 │ tool.execute, with a timeout ─┼──► ToolCallRecord(observation="Error: …", error=kind)
                 │ as_response · truncate ───────┘
                                                                             release(…) of every tool, always
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping
from types import TracebackType
from typing import Any

from jax_agent_rl.errors import ToolArgumentError, ToolError, ToolNotFoundError, ToolTimeoutError
from jax_agent_rl.tools.arguments import check_arguments
from jax_agent_rl.tools.base import BaseTool, ToolResponse, as_response
from jax_agent_rl.tools.truncate import Decode, Encode, Side, truncate_text
from jax_agent_rl.types import ToolCallRecord

logger = logging.getLogger(__name__)


class ToolSession:
    """An async context manager; see the module's drawing.

    Args:
        tools: the tools of this sample, by name.
        instance_id: the trajectory's id.
        kwargs: the row's ``extra_info.tools_kwargs``: ``{tool: {"create_kwargs": {…}, …}}``.
        timeout: seconds that create, one call and release may each take.
        max_response_length: most tokens of one observation.
        truncate_side: the side cut off a longer one.
        encode, decode: the policy's tokenizer.

    Attributes:
        metrics: numbers the tools reported, added up, named ``tool/<name>/<key>``.
    """

    def __init__(
        self,
        tools: Mapping[str, BaseTool],
        instance_id: str,
        *,
        kwargs: Mapping[str, Mapping[str, Any]],
        timeout: float,
        max_response_length: int,
        truncate_side: Side,
        encode: Encode,
        decode: Decode,
    ):
        self.metrics: dict[str, float] = {}
        self._tools = tools
        self._id = instance_id
        self._kwargs = kwargs
        self._timeout = timeout
        self._limit = max_response_length
        self._side: Side = truncate_side
        self._encode = encode
        self._decode = decode
        self._created: list[str] = []
        self._broken: dict[str, str] = {}  # tools whose create failed, and why

    async def __aenter__(self) -> ToolSession:
        try:
            for name in self._tools:
                await self._create(name)
        except BaseException:  # cancelled half-way: __aexit__ will not run
            await self._release_all_shielded()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None):
        await self._release_all_shielded()

    async def call(self, name: str, arguments: Any) -> ToolCallRecord:
        """Runs one call. Never raises for what the tool or the model did wrong."""
        began = time.perf_counter()
        response, error = ToolResponse(), None
        try:
            response = await self._execute(name, arguments)
        except ToolError as failure:
            response, error = ToolResponse(text=f"Error: {failure}"), _KINDS.get(type(failure), "raised")
        except Exception as failure:
            logger.info("tool %s raised", name, exc_info=True)
            response, error = ToolResponse(text=f"Error: {name} raised {type(failure).__name__}: {failure}"), "raised"
        return ToolCallRecord(
            name=name,
            arguments=arguments if isinstance(arguments, Mapping) else None,
            observation=self.shorten(response.text),
            error=error,
            reward=response.reward,
            seconds=time.perf_counter() - began,
        )

    def shorten(self, text: str) -> str:
        """An observation within the token limit."""
        return truncate_text(text, self._limit, self._side, encode=self._encode, decode=self._decode)

    async def _execute(self, name: str, arguments: Any) -> ToolResponse:
        tool = self._tools.get(name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            raise ToolNotFoundError(f"there is no tool {name[:100]!r}; available tools: {known}")
        if name in self._broken:
            raise ToolError(f"{name} is not available: {self._broken[name]}")
        try:
            checked = check_arguments(tool.parameters, arguments)
        except ToolArgumentError as error:
            raise ToolArgumentError(f"wrong arguments for {name}: {error}") from None
        call = tool.execute(self._id, checked, **self._kwargs_for(name, "execute_kwargs"))
        response = as_response(await self._in_time(call, f"{name} did not answer"))
        if response.image or response.video:
            raise ToolError(f"{name} returned images or video, which cannot be shown here")
        for key, value in response.metrics.items():
            key = f"tool/{name}/{key}"
            self.metrics[key] = self.metrics.get(key, 0.0) + value
        return response

    async def _create(self, name: str) -> None:
        self._created.append(name)
        try:
            creating = self._tools[name].create(self._id, **self._kwargs_for(name, "create_kwargs"))
            await self._in_time(creating, f"{name} was not created")
        except Exception as error:
            logger.warning("tool %s could not be created for %s: %s", name, self._id, error, exc_info=True)
            self._broken[name] = str(error)

    async def _release_all_shielded(self) -> None:
        """A second cancellation ends the waiting, not the releasing."""
        await asyncio.shield(asyncio.ensure_future(self._release_all()))

    async def _release_all(self) -> None:
        """Releases what was created, last first; a failure of one does not keep the others."""
        while self._created:
            name = self._created.pop()
            try:
                releasing = self._tools[name].release(self._id, **self._kwargs_for(name, "release_kwargs"))
                await self._in_time(releasing, f"{name} was not released")
            except Exception:
                logger.warning("tool %s could not be released for %s", name, self._id, exc_info=True)

    def _kwargs_for(self, name: str, kind: str) -> Mapping[str, Any]:
        return (self._kwargs.get(name) or {}).get(kind) or {}

    async def _in_time(self, work: Awaitable[Any], what: str) -> Any:
        """Awaits ``work`` in a task of its own, which is left behind if it ignores its cancellation.

        Raises:
            ToolTimeoutError: it took longer than the timeout.
        """
        task = asyncio.ensure_future(_no_exit(work))
        try:
            done, _ = await asyncio.wait({task}, timeout=self._timeout)
        finally:
            task.cancel()
        if not done:
            raise ToolTimeoutError(f"{what} within {self._timeout:g} seconds")
        if task.cancelled():  # by the tool itself; must not look like a cancellation of the trajectory
            raise ToolError(f"{what}: it cancelled itself")
        return task.result()


_KINDS: dict[type[ToolError], str] = {
    ToolNotFoundError: "unknown_tool",
    ToolArgumentError: "bad_arguments",
    ToolTimeoutError: "timeout",
}


async def _no_exit(work: Awaitable[Any]) -> Any:
    """``sys.exit()`` in a tool ends the call, not the run."""
    try:
        return await work
    except SystemExit as error:
        raise ToolError(f"the tool tried to exit with {error.code!r}") from None
