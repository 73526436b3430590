"""Simulated users: their interface, one conversation with one, and the users of a run, from YAML.

Life of one conversation (``instance_id`` is the trajectory's id)::

    start_interaction(id, **kwargs)
      ──► generate_response(id, messages, **kwargs), for each answer
      ──► finalize_interaction(id)

``start_interaction`` and ``finalize_interaction`` are called exactly once, the latter also when the
trajectory fails or is cancelled. ``kwargs`` are the row's ``extra_info.interaction_kwargs`` without
``name``, which chooses the user.

The YAML file (``interactions.interaction_config_path``)::

    interaction:
      - name: gsm8k
        class_name: jax_agent_rl.environments.users.Gsm8kInteraction
        config: {answer_format: flexible}
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from jax_agent_rl.checks import as_score, brief_repr
from jax_agent_rl.errors import ConfigError, InteractionError, TrajectoryError
from jax_agent_rl.utils.failures import FailureLog, user_code
from jax_agent_rl.utils.plugins import find_class, read_entries
from jax_agent_rl.utils.timeouts import in_time

Message = Mapping[str, Any]


class UserReply(NamedTuple):
    """A user's answer; a plain ``(terminate, text, score, metadata)`` is accepted as well.

    Attributes:
        terminate: the conversation is over; ``text`` is not shown to the policy any more.
        text: the user's message.
        score: the score of the policy's last turn.
        metadata: the numbers in it are added to the trajectory's metrics.
    """

    terminate: bool
    text: str
    score: float = 0.0
    metadata: Mapping[str, Any] = {}


class UserModel(Protocol):
    """Continues a conversation."""

    async def complete(
        self, messages: Sequence[Message], *, request_id: str, max_tokens: int, temperature: float
    ) -> str: ...

    async def close(self) -> None: ...


class BaseInteraction(ABC):
    """Base class of simulated users; one instance serves all conversations of a run.

    Args:
        config: the ``config`` mapping of its YAML entry.
    """

    stateful: ClassVar[bool] = True
    """Whether a conversation has state besides ``messages`` and ``kwargs``. Where trajectories
    branch (``rollout.strategy``), a stateful user answers the inherited turns once more, and has to
    answer alike."""

    def __init__(self, config: Mapping[str, Any]):
        self.config = config

    def attach(self, engine: UserModel) -> None:  # noqa: B027 - few users need one
        """Receive the run's own engine, once, before the first conversation."""

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:  # noqa: B027
        """Begin a conversation."""

    @abstractmethod
    async def generate_response(
        self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> UserReply | tuple[bool, str, float, Mapping[str, Any]]:
        """Answer the policy.

        Args:
            instance_id: the trajectory's id.
            messages: the conversation so far; the last one is the assistant's.
            kwargs: the row's ``interaction_kwargs`` without ``name``.
        """

    async def finalize_interaction(self, instance_id: str) -> None:  # noqa: B027
        """End a conversation and free its state."""

    async def close(self) -> None:  # noqa: B027
        """Close what the instance holds open, after the last conversation."""


class InteractionSession:
    """One conversation with a user, as an async context manager.

    The user is started, answers in time, and is always finalized.

    Args:
        name: the user's name, for messages.
        instance_id: the trajectory's id.
        kwargs: the row's ``interaction_kwargs``, without ``name``.
        timeout: seconds each of start, one reply and finalize may take, ``interactions.timeout``.
        failures: log of what goes wrong after a conversation; None: a new one.
    """

    def __init__(
        self,
        user: BaseInteraction,
        *,
        name: str,
        instance_id: str,
        kwargs: Mapping[str, Any],
        timeout: float,
        failures: FailureLog | None = None,
    ):
        self._failures = failures or FailureLog()
        self.name = name
        self.stateful = user.stateful
        self._user = user
        self._id = instance_id
        self._kwargs = kwargs
        self._timeout = timeout

    async def __aenter__(self) -> InteractionSession:
        """Start the user; if that fails, finalize it and raise InteractionError."""
        try:
            await self._in_time(
                lambda: self._user.start_interaction(self._id, **self._kwargs), "start"
            )
        except BaseException:  # __aexit__ will not run
            await asyncio.shield(self._finalize())
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        # A second cancellation ends the waiting, not the finalizing.
        await asyncio.shield(self._finalize())

    async def reply(self, messages: Sequence[Mapping[str, Any]]) -> UserReply:
        """Return the user's answer to the assistant's last message.

        Raises:
            InteractionError: the user raised, took too long, or returned an invalid reply.
        """
        answer = await self._in_time(
            lambda: self._user.generate_response(self._id, messages, **self._kwargs), "reply"
        )
        return _checked(answer, self.name)

    async def _finalize(self) -> None:
        try:
            await self._in_time(lambda: self._user.finalize_interaction(self._id), "finalize")
        except TrajectoryError as error:
            kind = f"interaction {self.name!r} could not be finalized"
            self._failures.report(kind, f"{self._id}: {error}", error=error.__cause__)

    async def _in_time(self, call: Callable[[], Awaitable[Any]], action: str) -> Any:
        """Call the user's code in a task of its own, abandoned if it ignores its cancellation."""
        user = f"interaction {self.name!r}"

        def timeout_error() -> InteractionError:
            return InteractionError(
                f"{user} did not {action} within interactions.timeout={self._timeout:g} seconds"
            )

        with user_code(InteractionError, f"{user}: {action}"):
            return await in_time(
                call,
                self._timeout,
                what=f"{user}: {action}",
                late=timeout_error,
                error=lambda problem: InteractionError(f"{user} {problem}"),
            )


def _checked(answer: Any, name: str) -> UserReply:
    """Return an answer as a UserReply; raise InteractionError if it does not have that form."""
    match answer:
        case (bool(terminate), str(text), score, Mapping() as metadata):
            try:
                return UserReply(terminate, text, as_score(score, "its score"), metadata)
            except ValueError as error:
                problem = str(error)
        case _:
            problem = f"got {brief_repr(answer)}"
    raise InteractionError(
        f"interaction {name!r} must answer (terminate: bool, text, score, metadata): {problem}"
    )


KEY = "interactions.interaction_config_path"
_FIELDS = {"name", "class_name", "config"}


class InteractionRegistry(Mapping[str, BaseInteraction]):
    """Users by name.

    Args:
        timeout: seconds a user may take for one reply, ``interactions.timeout``.
    """

    def __init__(
        self, users: Mapping[str, BaseInteraction] | None = None, *, timeout: float = 60.0
    ):
        self.timeout = timeout
        self._users = dict(users or {})

    @classmethod
    def from_path(cls, path: str | None, *, timeout: float = 60.0) -> InteractionRegistry:
        """Load the users of ``interactions.interaction_config_path``; None gives none.

        Raises:
            ConfigError: the file is missing or malformed, a class cannot be found or refuses its
                ``config``, or two users have one name.
        """
        if path is None:
            return cls(timeout=timeout)
        users: dict[str, BaseInteraction] = {}
        entries = read_entries(Path(path).expanduser(), key=KEY, name="interaction")
        for number, entry in enumerate(entries):
            where = f"{KEY}={path!r}, interaction[{number}]"
            name, user = _build(entry, where)
            if name in users:
                raise ConfigError(f"{where}: two interactions are called {name!r}; rename one")
            users[name] = user
        return cls(users, timeout=timeout)

    def attach(self, engine: UserModel) -> None:
        """Give every user the run's own engine."""
        for user in self._users.values():
            user.attach(engine)

    async def close(self) -> None:
        """Close all users."""
        for user in self._users.values():
            await user.close()

    def __getitem__(self, name: str) -> BaseInteraction:
        return self._users[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._users)

    def __len__(self) -> int:
        return len(self._users)


def _build(entry: Any, where: str) -> tuple[str, BaseInteraction]:
    """Return name and user of a file's entry; ``where`` names the entry in messages."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("class_name"), str):
        raise ConfigError(f"{where}: must be {{name, class_name, config}}, got {entry!r:.200}")
    unknown = sorted(map(str, entry.keys() - _FIELDS))
    if unknown:
        raise ConfigError(f"{where}: unknown fields {unknown}; there are {sorted(_FIELDS)}")
    config = entry.get("config") or {}
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where}: config must be a mapping, got {config!r:.80}")

    cls = find_class(entry["class_name"], "interactions", where=where)
    if not isinstance(cls, type) or not issubclass(cls, BaseInteraction):
        raise ConfigError(
            f"{where}: class_name={entry['class_name']!r} is not a subclass of BaseInteraction"
        )
    try:
        user = cls(config)
    except ConfigError as error:
        raise ConfigError([f"{where}.config.{problem}" for problem in error.problems]) from None

    name = entry.get("name")
    if not name:  # Gsm8kInteraction is called gsm8k
        name = cls.__name__.removesuffix("Interaction").lower() or cls.__name__
    return str(name), user
