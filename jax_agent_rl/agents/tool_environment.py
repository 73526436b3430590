"""One trajectory's environment on a tool server, and the batching of requests in lockstep.

::

    async     each action is a request of its own, sent at once
    sync      Lockstep: actions wait until every trajectory in flight has finished its turn, then go out as one batch

              A generates ─────► action ┐
              B generates ─► action     ├─► one request ─► observations ─► A, B generate
              C generates ──► answers, leaves
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from jax_agent_rl.errors import ToolServerError
from jax_agent_rl.tools.client import ServerAction, ServerObservation, ToolServerClient
from jax_agent_rl.tracing import span
from jax_agent_rl.types import ToolCallRecord

logger = logging.getLogger(__name__)

Send = Callable[[ServerAction], Awaitable[ServerObservation]]
"""Delivers one action; raises ToolServerError."""
Result = ServerObservation | ToolServerError
REPLAY_REMEDY = "make the tool server answer the same actions alike (rollout.strategy branches trajectories)"


class Lockstep:
    """Sends the actions of all members together, once none of them is still generating.

    member    consumes: an observation.   produces: an action.   waits for: the slowest member's turn, then the tools.
    batch     consumes: actions.          produces: results.     waits for: the tool server.

    Args:
        send_batch: delivers actions; one result each.
    """

    def __init__(self, send_batch: Callable[[Sequence[ServerAction]], Awaitable[Sequence[Result]]]):
        self._send_batch = send_batch
        self._members = 0
        self._waiting: dict[asyncio.Future[Result], ServerAction] = {}
        self._batches: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> None:
        """Join; the other members wait for this one from now on."""
        self._members += 1

    async def __aexit__(self, *_: object) -> None:
        self._members -= 1
        self._send_if_complete()

    async def send(self, action: ServerAction) -> ServerObservation:
        """Send a member's action and return its observation, once the whole batch has been answered."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting[future] = action
        self._send_if_complete()
        try:
            result = await future
        finally:
            self._waiting.pop(future, None)  # cancelled while it waited
        if isinstance(result, ToolServerError):
            raise result
        return result

    def _send_if_complete(self) -> None:
        if self._waiting and len(self._waiting) == self._members:
            batch, self._waiting = self._waiting, {}
            # A task of its own: a member that is cancelled must not take the others' results with it.
            task = asyncio.create_task(self._deliver(batch))
            self._batches.add(task)
            task.add_done_callback(self._batches.discard)

    async def _deliver(self, batch: Mapping[asyncio.Future[Result], ServerAction]) -> None:
        try:
            results = await self._send_batch(list(batch.values()))
        except ToolServerError as error:
            results = [ToolServerError(str(error)) for _ in batch]
        except BaseException as error:  # no member may wait forever
            results = [ToolServerError(f"the batch was lost: {type(error).__name__}: {error}") for _ in batch]
            raise
        finally:
            for future, result in zip(batch, results, strict=True):
                if not future.done():
                    future.set_result(result)


class ToolEnvironment:
    """An async context manager; the environment is closed exactly once, also when the trajectory fails.

    Args:
        server: closes environments.
        send: delivers actions.
        trajectory_id: whose environment it is.
        modalities: kinds of media its agent can show the model; an observation with others becomes an error.

    Attributes:
        close_failures: 1 if closing it on the server failed, else 0.
    """

    def __init__(
        self,
        server: ToolServerClient,
        send: Send,
        trajectory_id: str,
        *,
        modalities: frozenset[str] = frozenset(),
    ):
        self.close_failures = 0
        self._modalities = modalities
        self._server = server
        self._send = send
        self._id = trajectory_id
        self._used = False

    async def __aenter__(self) -> ToolEnvironment:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None):
        """Close the environment; a second cancellation ends the waiting, not the closing."""
        if self._used:
            await self._server.complete(self._close())

    async def step(
        self, text: str, *, name: str, extra_fields: Mapping[str, Any], shorten: Callable[[str], str]
    ) -> tuple[ServerObservation, ToolCallRecord]:
        """Take one action.

        Args:
            text: the action.
            name: the tool's name on record.
            extra_fields: passed to the tool only.
            shorten: cuts an observation to its limit.

        Returns:
            The observation, and its record with the shortened text.

        Raises:
            ToolServerError: the server gave no observation.
        """
        self._used = True  # before sending: the server may know of it although the answer is lost
        began = time.perf_counter()
        sent = ServerAction(trajectory_id=self._id, text=text, extra_fields=extra_fields)
        with span("tool", name) as traced:
            traced.set(arguments={"action": text})
            observation = self._check_media(await self._send(sent))
            traced.set(observation=observation.text, tool_error=observation.error)
        record = ToolCallRecord(
            name=name,
            arguments={"action": text},
            observation=shorten(observation.text),
            error=observation.error,
            reward=observation.reward,
            seconds=time.perf_counter() - began,
            media=observation.media,
        )
        return observation, record

    def _check_media(self, observation: ServerObservation) -> ServerObservation:
        unseen = sorted(observation.media.keys() - self._modalities)
        if not unseen:
            return observation
        logger.warning(
            "the tool server returned media %s for %s, which cannot be shown: that takes a model, chat template and "
            "engine for them, server_tool_agent and agent.enable_mtrl=true without agent.mtrl_sep",
            unseen,
            self._id,
        )
        text = f"Error: the tool returned {' and '.join(unseen)} data, which cannot be shown here."
        return replace(observation, text=text, error="raised", media={})

    async def _close(self) -> None:
        try:
            await self._server.finish(self._id)
        except ToolServerError as error:
            self.close_failures += 1
            logger.warning("the environment of %s may still be open: %s", self._id, error)
