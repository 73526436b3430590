"""Client of a tool server, a trajectory's environment on it, and requests in lockstep.

``POST /get_observation``, with one entry per trajectory in each list; an observation is text, or
``{obs, reward?, metrics?, image?, audio?}``::

    {trajectory_ids, actions, extra_fields, finish, is_last_step}
        ──►  {observations, dones, valids}

When requests are sent::

    async     each action is a request of its own, sent at once
    sync      Lockstep: actions wait until every trajectory in flight has finished its turn, then
              go out as one batch

              A generates ─────► action ┐
              B generates ─► action     ├─► one request ─► observations ─► A, B generate
              C generates ──► answers, leaves
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, FiniteFloat, ValidationError

from jax_agent_rl.checks import as_score
from jax_agent_rl.errors import ConfigError, ToolServerError
from jax_agent_rl.utils.media import read_images
from jax_agent_rl.utils.network import JsonService
from jax_agent_rl.utils.surrogates import replace_lone_surrogates
from jax_agent_rl.utils.wrong_values import describe_first

logger = logging.getLogger(__name__)
PATH = "/get_observation"
CLOSE_SECONDS = 5.0  # for environments that are still being closed
NO_TOOL = "Error: no tool accepted this action; check its format."
"""Default observation of an action that no tool accepts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerAction:
    """Action of one trajectory.

    Attributes:
        trajectory_id: names the environment as well.
        text: the model's text, up to the end of the action.
        extra_fields: fields of the dataset row, unseen by the model.
        finish: close the environment.
        is_last_step: no further action will follow.
    """

    trajectory_id: str
    text: str = ""
    extra_fields: Mapping[str, Any] = field(default_factory=dict)
    finish: bool = False
    is_last_step: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerObservation:
    """Observation of one trajectory.

    Attributes:
        text: what the model reads.
        done: whether the trajectory is over.
        error: None, or the kind as in :class:`~jax_agent_rl.types.ToolCallRecord`.
        reward: reward of the action.
        metrics: numbers the tool reported.
        media: images it returned, ``{"image": (PIL image, …)}``.
    """

    text: str
    done: bool = False
    error: str | None = None
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    media: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


class ToolServerClient:
    """Client of one tool server.

    Args:
        service: its ``url`` ends with :data:`PATH`, see :func:`observation_url`.
        max_turns: maximum number of actions in a trajectory, which tools are told with every
            action, besides how many are left; None tells them neither.
        in_lockstep: send actions as :class:`Lockstep` does, instead of at once.
    """

    def __init__(
        self, service: JsonService, *, max_turns: int | None = None, in_lockstep: bool = False
    ):
        self.max_turns = max_turns
        self._service = service
        self._lockstep = Lockstep(self.get_observation) if in_lockstep else None
        self._detached: set[asyncio.Future[None]] = set()

    @asynccontextmanager
    async def open(
        self, trajectory_id: str, extra_info: Mapping[str, Any]
    ) -> AsyncIterator[ToolEnvironment]:
        """Open the environment of a trajectory, and close it in the end.

        ``extra_info`` is the row's, for the tools.
        """
        environment = ToolEnvironment(self, trajectory_id, extra_info)
        async with environment, self._lockstep or nullcontext():
            yield environment

    async def execute(self, action: ServerAction) -> ServerObservation:
        """Deliver an action of an environment.

        Raises:
            ToolServerError: the server cannot be reached, refuses, or sends an invalid answer.
        """
        if self._lockstep is not None:
            return await self._lockstep.send(action)
        return await self.step(action)

    async def get_observation(
        self, actions: Sequence[ServerAction], *, repeatable: bool = False
    ) -> list[ServerObservation | ToolServerError]:
        """Run one action of each of several trajectories.

        An unusable entry of the answer becomes an error of that trajectory alone. A server that
        takes too long gives observations with the error ``timeout``, for the model to read. For
        ``repeatable`` see :meth:`~jax_agent_rl.utils.network.JsonService.post`.

        Raises:
            ToolServerError: the server cannot be reached, refuses, or sends an invalid answer.
        """
        payload = {
            "trajectory_ids": [action.trajectory_id for action in actions],
            "actions": [action.text for action in actions],
            "extra_fields": [dict(action.extra_fields) for action in actions],
            "finish": [action.finish for action in actions],
            "is_last_step": [action.is_last_step for action in actions],
        }
        try:
            answer = await self._service.post(payload, repeatable=repeatable)
        except TimeoutError:
            seconds = self._service.timeout
            text = f"Error: the tool did not answer within {seconds:g} seconds."
            return [ServerObservation(text=text, error="timeout") for _ in actions]
        return read_observations(answer, len(actions), self._service.url)

    async def step(self, action: ServerAction, *, repeatable: bool = False) -> ServerObservation:
        """Run one action, see :meth:`get_observation`; an unusable observation is raised."""
        (result,) = await self.get_observation([action], repeatable=repeatable)
        if isinstance(result, ToolServerError):
            raise result
        return result

    async def finish(self, trajectory_id: str) -> None:
        """Close the environment of a trajectory.

        Raises:
            ToolServerError: as :meth:`get_observation`, or it took too long.
        """
        action = ServerAction(trajectory_id=trajectory_id, finish=True, is_last_step=True)
        closed = await self.step(action, repeatable=True)
        if closed.error == "timeout":
            raise ToolServerError(f"{self._service.url}: closing {trajectory_id} took too long")

    async def check(self) -> None:
        """Check the server's ``GET /health``.

        Raises:
            ConfigError: it is not healthy, or not there.
        """
        try:
            await self._service.ping(self._service.url.removesuffix(PATH) + "/health")
        except (ToolServerError, TimeoutError) as error:
            raise ConfigError(f"the tool server is not ready: {error}") from None
        finally:
            await self.close()  # a run may still end before its first trajectory

    async def complete(self, work: Awaitable[None]) -> None:
        """Await work on this server.

        If the caller is cancelled, the work goes on, but not beyond :meth:`close`.
        """
        task = asyncio.ensure_future(work)
        self._detached.add(task)
        task.add_done_callback(self._detached.discard)
        await asyncio.shield(task)

    async def close(self) -> None:
        """Give detached work :data:`CLOSE_SECONDS`, cancel what still runs, and disconnect."""
        if self._detached:
            _, pending = await asyncio.wait(self._detached, timeout=CLOSE_SECONDS)
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            if pending:
                logger.warning(
                    "%s: %d environments may still be open", self._service.url, len(pending)
                )
        await self._service.close()


def observation_url(url: str) -> str:
    """Complete a server's URL: ``http://host:5000`` means ``http://host:5000/get_observation``.

    >>> observation_url("http://localhost:5000/")
    'http://localhost:5000/get_observation'
    """
    return url.rstrip("/").removesuffix(PATH) + PATH


class _Answer(BaseModel):
    observations: list[Any]  # validated one by one
    dones: list[bool]
    valids: list[bool]


class _Detailed(BaseModel):
    """An observation that is more than text; further fields are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)

    obs: str
    reward: (
        Annotated[FiniteFloat, AfterValidator(lambda reward: as_score(reward, "a reward"))] | None
    ) = None
    metrics: dict[str, FiniteFloat] = {}
    image: str | list[str] | None = None
    audio: Any = None


def read_observations(
    answer: Any, count: int, url: str
) -> list[ServerObservation | ToolServerError]:
    """Return the observations of an answer; raise ToolServerError if it has another form."""
    try:
        frame = _Answer.model_validate(answer)
    except ValidationError as error:
        raise ToolServerError(
            f"{url} gave a wrong answer: {describe_first(error)}; is it a tool server?"
        ) from None
    lengths = {name: len(values) for name, values in vars(frame).items()}
    if set(lengths.values()) != {count}:
        raise ToolServerError(f"{url} gave a wrong answer: {lengths} entries for {count} actions")

    observations = []
    for content, done, valid in zip(frame.observations, frame.dones, frame.valids, strict=True):
        observations.append(_observation(content, done, valid, url))
    return observations


def _observation(
    content: Any, done: bool, valid: bool, url: str
) -> ServerObservation | ToolServerError:
    """Return one observation; an unusable one becomes an error."""
    fields = {"obs": content} if isinstance(content, str) else content
    try:
        detailed = _Detailed.model_validate(fields)
    except ValidationError as error:
        return ToolServerError(f"{url} gave a wrong observation: {describe_first(error)}")

    text = replace_lone_surrogates(detailed.obs)
    error_kind = None
    # verl-tool's tools report the answer that ends a trajectory as an invalid action; it is not a
    # mistake.
    is_answer = done and content == ""
    if not valid and not is_answer:
        error_kind = "invalid_action"
        text = text or NO_TOOL

    media: dict[str, tuple[Any, ...]] = {}
    try:
        if detailed.audio:
            raise ValueError("the tool returned audio, which cannot be shown here")
        if isinstance(detailed.image, str):
            media["image"] = read_images([detailed.image])
        elif detailed.image:
            media["image"] = read_images(detailed.image)
    except ValueError as error:
        text = f"Error: {error}."
        error_kind = "raised"
    return ServerObservation(
        text=text,
        done=done,
        error=error_kind,
        reward=detailed.reward or 0.0,
        metrics=detailed.metrics,
        media=media,
    )


Result = ServerObservation | ToolServerError


class Lockstep:
    """Sends the actions of all members together, once none of them is still generating.

    ::

                  consumes         produces     waits for
        member    an observation   an action    the slowest member's turn, then the tools
        batch     actions          results      the tool server

    Args:
        send_batch: delivers actions; returns one result for each.
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
        """Send a member's action; return its observation once the whole batch is answered."""
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
        """Send the waiting actions if no member is still generating."""
        if not self._waiting or len(self._waiting) != self._members:
            return
        batch = self._waiting
        self._waiting = {}
        # In its own task: a member that is cancelled must not take the others' results with it.
        task = asyncio.create_task(self._deliver(batch))
        self._batches.add(task)
        task.add_done_callback(self._batches.discard)

    async def _deliver(self, batch: Mapping[asyncio.Future[Result], ServerAction]) -> None:
        try:
            results = await self._send_batch(list(batch.values()))
        except ToolServerError as error:
            results = [ToolServerError(str(error)) for _ in batch]
        except BaseException as error:  # no member may wait forever
            message = f"the batch was lost: {type(error).__name__}: {error}"
            results = [ToolServerError(message) for _ in batch]
            raise
        finally:
            for future, result in zip(batch, results, strict=True):
                if not future.done():
                    future.set_result(result)


class ToolEnvironment:
    """The environment of one trajectory, an async context manager.

    It is closed exactly once, also when the trajectory fails.

    Args:
        server: executes its actions, and closes it.
        extra_fields: passed to the tool only.
    """

    def __init__(
        self,
        server: ToolServerClient,
        trajectory_id: str,
        extra_fields: Mapping[str, Any],
    ):
        self._server = server
        self._id = trajectory_id
        self._extra_fields = extra_fields
        self._used = False
        self._close_failures = 0

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers to add to the trajectory once the environment is closed."""
        return {"tool_close_failures": self._close_failures}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the environment; a second cancellation ends the waiting, not the closing."""
        if self._used:
            await self._server.complete(self._close())

    async def ask(self, action: str, step: int) -> ServerObservation:
        """Take one action, after ``step`` earlier turns.

        Raises:
            ToolServerError: the server gave no observation.
        """
        extra_fields = dict(self._extra_fields)
        max_turns = self._server.max_turns
        if max_turns is not None:
            extra_fields["current_step"] = step
            extra_fields["max_turns"] = max_turns
            extra_fields["turns_left"] = max_turns - step

        # Before sending: the server may know of the environment although its answer is lost.
        self._used = True
        request = ServerAction(trajectory_id=self._id, text=action, extra_fields=extra_fields)
        return await self._server.execute(request)

    async def _close(self) -> None:
        try:
            await self._server.finish(self._id)
        except ToolServerError as error:
            self._close_failures += 1
            logger.warning("the environment of %s may still be open: %s", self._id, error)
