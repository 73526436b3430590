"""Clients of tool servers and retrieval servers.

``POST /get_observation``, with one entry per trajectory in each list; an observation is text, or ``{obs, reward?,
metrics?, image?, audio?}``::

    {trajectory_ids, actions, extra_fields, finish, is_last_step}  ──►  {observations, dones, valids}

A retrieval server's API is that of Search-R1's; a passage may also be plain text or ``{contents}``::

    {queries, topk, return_scores}  ──►  {result: [[{document: {contents}, score}]]}
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError

from jax_agent_rl.config import SearchConfig, ToolClientConfig
from jax_agent_rl.errors import ConfigError, ToolServerError
from jax_agent_rl.utils.json_service import JsonService, ServiceSettings, bearer
from jax_agent_rl.utils.media import read_images
from jax_agent_rl.utils.text import replace_lone_surrogates

logger = logging.getLogger(__name__)
PATH = "/get_observation"
CLOSE_SECONDS = 5.0  # for environments that are still being closed
NO_TOOL = "Error: no tool accepted this action; check its format."
"""Default observation of an action that no tool accepts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerAction:
    """Action of one trajectory.

    Attributes:
        trajectory_id: id of the trajectory, and so of its environment.
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
    """Client of one tool server, whose ``url`` ends with :data:`PATH` (see :func:`observation_url`)."""

    def __init__(self, service: JsonService):
        self._service = service
        self._detached: set[asyncio.Future[None]] = set()

    async def get_observation(
        self, actions: Sequence[ServerAction], *, repeatable: bool = False
    ) -> list[ServerObservation | ToolServerError]:
        """Run one action of each of several trajectories; an unusable entry becomes an error of its own.

        A server that takes too long gives observations with the error ``timeout``, for the model to read. For
        ``repeatable`` see :meth:`~jax_agent_rl.utils.json_service.JsonService.post`.

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
            seconds = self._service.settings.timeout
            text = f"Error: the tool did not answer within {seconds:g} seconds."
            return [ServerObservation(text=text, error="timeout") for _ in actions]
        return _observations(answer, len(actions), self._service.settings.url)

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
            raise ToolServerError(f"{self._service.settings.url}: closing {trajectory_id} took too long")

    async def check(self) -> None:
        """Check the server's ``GET /health``; raise :class:`ConfigError` if it is not healthy, or not there."""
        try:
            await self._service.ping(self._service.settings.url.removesuffix(PATH) + "/health")
        except (ToolServerError, TimeoutError) as error:
            raise ConfigError(f"the tool server is not ready: {error}") from None
        finally:
            await self.close()  # a run may still end before its first trajectory

    async def complete(self, work: Awaitable[None]) -> None:
        """Await work on this server that goes on if the waiting is cancelled, but not beyond :meth:`close`."""
        task = asyncio.ensure_future(work)
        self._detached.add(task)
        task.add_done_callback(self._detached.discard)
        await asyncio.shield(task)

    async def close(self) -> None:
        """Give detached work :data:`CLOSE_SECONDS`, cancel the rest, and disconnect."""
        if self._detached:
            _, pending = await asyncio.wait(self._detached, timeout=CLOSE_SECONDS)
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            if pending:
                logger.warning("%s: %d environments may still be open", self._service.settings.url, len(pending))
        await self._service.close()


def observation_url(url: str) -> str:
    """Complete a server's URL: ``http://host:5000`` stands for ``http://host:5000/get_observation``.

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
    reward: FiniteFloat | None = None
    metrics: dict[str, FiniteFloat] = {}
    image: str | list[str] | None = None
    audio: Any = None


def _observations(answer: Any, count: int, url: str) -> list[ServerObservation | ToolServerError]:
    try:
        frame = _Answer.model_validate(answer)
    except ValidationError as error:
        raise ToolServerError(f"{url} gave a wrong answer: {_first(error)}; is it a tool server?") from None
    lengths = {name: len(values) for name, values in vars(frame).items()}
    if set(lengths.values()) != {count}:
        raise ToolServerError(f"{url} gave a wrong answer: {lengths} entries for {count} actions")
    rows = zip(frame.observations, frame.dones, frame.valids, strict=True)
    return [_observation(content, done, valid, url) for content, done, valid in rows]


def _observation(content: Any, done: bool, valid: bool, url: str) -> ServerObservation | ToolServerError:
    try:
        detailed = _Detailed.model_validate({"obs": content} if isinstance(content, str) else content)
    except ValidationError as error:
        return ToolServerError(f"{url} gave a wrong observation: {_first(error)}")
    # verl-tool's tools report the answer that ends a trajectory as an invalid action; it is not a mistake.
    answered = done and content == ""
    text, kind = replace_lone_surrogates(detailed.obs), None if valid or answered else "invalid_action"
    images = [detailed.image] if isinstance(detailed.image, str) else detailed.image or []
    media: dict[str, tuple[Any, ...]] = {}
    try:
        if detailed.audio:
            raise ValueError("the tool returned audio, which cannot be shown here")
        if images:
            media = {"image": read_images(images)}
    except ValueError as error:
        text, kind = f"Error: {error}.", "raised"
    if kind == "invalid_action" and not text:
        text = NO_TOOL
    return ServerObservation(
        text=text, done=done, error=kind, reward=detailed.reward or 0.0, metrics=detailed.metrics, media=media
    )


def _first(error: ValidationError) -> str:
    problem = error.errors()[0]
    place = ".".join(map(str, problem["loc"])) or "the answer"
    return f"{place}: {problem['msg']}, got {problem['input']!r:.200}"


class RateLimiter:
    """Rate limiter: at most ``max_workers`` at a time, and no two starts within ``interval`` seconds.

    Once requests have waited longer for their start than they took, it warns that the interval is the bottleneck.

    Args:
        max_workers: ``tool_config.max_workers``.
        interval: ``tool_config.request_interval``.
        clock: monotonic seconds.
        sleep: waits.
    """

    _CHECKED_AFTER = 50  # requests

    def __init__(
        self,
        *,
        max_workers: int,
        interval: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        self._workers = asyncio.Semaphore(max_workers)
        self._interval = interval
        self._clock = clock
        self._sleep = sleep
        self._next_start = float("-inf")
        self._requests, self._waited, self._ran = 0, 0.0, 0.0
        self._warned = False

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a turn, and occupy a worker for the duration of the block."""
        async with self._workers:
            arrived = self._clock()
            start = max(arrived, self._next_start)
            self._next_start = start + self._interval  # taken before waiting, so that others queue behind it
            if start > arrived:
                await self._sleep(start - arrived)
            began = self._clock()
            try:
                yield
            finally:
                self._check_interval(waited=began - arrived, ran=self._clock() - began)

    def _check_interval(self, *, waited: float, ran: float) -> None:
        self._requests += 1
        self._waited += waited
        self._ran += ran
        if self._warned or not self._interval or self._requests < self._CHECKED_AFTER or self._waited <= self._ran:
            return
        self._warned = True
        logger.warning(
            "tool_config.request_interval=%g is the bottleneck of tool calls: %d requests waited %.1f s to start "
            "and took %.1f s; no more than %.3g start in a second. Set tool_config.request_interval=0 if the tool "
            "server is yours alone, or lower it",
            self._interval,
            self._requests,
            self._waited,
            self._ran,
            1 / self._interval,
        )


def _service(config: ToolClientConfig | SearchConfig, url: str, *, section: str) -> JsonService:
    settings = ServiceSettings(
        url=url,
        url_key=f"{section}.server_url",
        timeout=config.timeout,
        timeout_key=f"{section}.timeout",
        max_retries=config.max_retries,
        retry_delay=config.retry_delay,
        headers=bearer(config.token_env, key=f"{section}.token_env"),
        token_hint=f"set {section}.token_env to the environment variable that holds it",
    )
    return JsonService(settings, error=ToolServerError)


class ToolClient:
    """Client of a tool server for single actions, with the limits of ``tool_config``.

    Raises:
        ConfigError: ``tool_config.server_url`` is not set or not a URL.
    """

    def __init__(self, config: ToolClientConfig):
        if config.server_url is None:
            raise ConfigError(
                "text_tool_agent needs a tool server; set tool_config.server_url (or TOOL_SERVER_URL), e.g. "
                "http://localhost:5000, or tool_config.enabled=false"
            )
        self.server = ToolServerClient(_service(config, observation_url(config.server_url), section="tool_config"))
        self._limiter = RateLimiter(max_workers=config.max_workers, interval=config.request_interval)

    async def execute(self, action: ServerAction) -> ServerObservation:
        """Run one piece of code.

        Raises:
            ToolServerError: the server cannot be reached, refuses, or sends an invalid answer.
        """
        async with self._limiter.slot():
            result = await self.server.step(action, repeatable=True)
        return replace(result, text=bare_result(result.text))

    async def close(self) -> None:
        await self.server.close()


def bare_result(text: str) -> str:
    r"""Return the output of code without the tags of the tool server.

    >>> bare_result("\n<result>\n42\n</result>\n")
    '42'
    """
    inner = text.strip()
    if inner.startswith("<result>") and inner.endswith("</result>"):
        return inner.removeprefix("<result>").removesuffix("</result>").strip("\n")
    return text


class SearchClient:
    """Client of a retrieval server.

    Raises:
        ConfigError: ``search.server_url`` is not set or not a URL.
    """

    def __init__(self, config: SearchConfig):
        if config.server_url is None:
            raise ConfigError(
                "search_agent needs a retrieval server; set search.server_url, e.g. http://localhost:8000/retrieve, "
                "or agent.enable_search=false"
            )
        self._service = _service(config, config.server_url, section="search")
        self._topk = config.topk

    async def search(self, query: str) -> list[str]:
        """Return the passages found for a query, best first.

        Raises:
            ToolServerError: the server cannot be reached, refuses, or sends an invalid answer.
            TimeoutError: it took longer than ``search.timeout``.
        """
        payload = {"queries": [query], "topk": self._topk, "return_scores": True}
        answer = await self._service.post(payload, repeatable=True)
        try:
            (found,) = answer["result"]
            return [_contents(passage) for passage in found][: self._topk]
        except (TypeError, KeyError, ValueError) as error:
            raise ToolServerError(
                f"{self._service.settings.url} gave a wrong answer ({type(error).__name__}: {error}): "
                f"{answer!r:.200}; expected {{result: [[{{document: {{contents}}}}]]}}"
            ) from None

    async def check(self) -> None:
        """Send a query, the only request of Search-R1's servers; raise :class:`ConfigError` if it fails."""
        try:
            await self.search("Is anyone there?")
        except (ToolServerError, TimeoutError) as error:
            raise ConfigError(f"the retrieval server is not ready: {error}") from None
        finally:
            await self.close()  # a run may still end before its first trajectory

    async def close(self) -> None:
        await self._service.close()


def _contents(passage: Any) -> str:
    if isinstance(passage, dict):
        return _contents(passage["document"] if "document" in passage else passage["contents"])
    if not isinstance(passage, str):
        raise TypeError(f"a passage must be text, got {type(passage).__name__}")
    return passage.encode("utf-8", "replace").decode()
