"""The environment interface (a world that answers and scores the policy's replies), and environments by name.

Life of an instance in one trajectory::

    reset(**environment_kwargs) ──► step(reply) … ──► conclude(messages, reason) ──► close(), or the next reset

The keyword arguments come from the dataset row: ``extra_info.environment_kwargs = {"name": "textworld", "game": …}``.
An instance serves one trajectory at a time. Methods are coroutines; wrap blocking code with :func:`in_thread`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from jax_agent_rl.errors import ConfigError, DataError, EnvironmentFailedError
from jax_agent_rl.types import FinishReason, ToolCallRecord
from jax_agent_rl.utils.plugins import installed, load_installed, load_user_module
from jax_agent_rl.utils.text import did_you_mean
from jax_agent_rl.utils.threads import DaemonThreads

if TYPE_CHECKING:
    from jax_agent_rl.chat.formats.base import Reply


T = TypeVar("T")
_THREADS = DaemonThreads(kind="environment", error=EnvironmentFailedError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """An environment's answer to a reply, with its score.

    Attributes:
        messages: appended to the conversation; :meth:`say` makes the usual single user message.
        score: reward of the reply it answers; becomes ``Turn.score``.
        done: the episode is over; ``messages`` are not shown any more.
        tool_calls: calls it ran itself for that reply.
        metrics: numbers to add up over the trajectory, by name.
    """

    messages: tuple[Mapping[str, Any], ...] = ()
    score: float = 0.0
    done: bool = False
    tool_calls: tuple[ToolCallRecord, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def say(cls, text: str, **fields: Any) -> Observation:
        """Return an observation of one user message."""
        return cls(messages=({"role": "user", "content": text},), **fields)


class Environment(ABC):
    """Base class of environments; give it a name with ``@register_environment``."""

    name: ClassVar[str]
    """The name it is registered under."""
    replayable: ClassVar[bool] = True
    """Whether the same arguments and replies give the same observations again. Trajectories that branch
    (``rollout.strategy``) need it: a branch gets an instance of its own, which replays the turns it inherits."""

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, Any]]:
        """Tools this episode offers, in OpenAI's format, for the prompt; read after ``reset``. The default is none."""
        return ()

    @abstractmethod
    async def reset(self, **environment_kwargs: Any) -> Observation:
        """Begin an episode; its messages follow the row's prompt. Subclasses name the arguments rows may give.

        Raises:
            EnvironmentFailedError: there is no such episode. Any other exception counts as this one.
        """

    @abstractmethod
    async def step(self, reply: Reply) -> Observation:
        """Answer a reply: text without reasoning, and decoded calls. Those that were cut off do not get here."""

    async def conclude(self, messages: Sequence[Mapping[str, Any]], reason: FinishReason) -> Mapping[str, float]:
        """Finish the episode with the whole conversation; called once when the trajectory is over, for any reason.

        Returns:
            ``score`` is added to the score of the last turn; other numbers become metrics. The default adds nothing.
        """
        return {}

    async def close(self) -> None:
        """Free what the instance holds. The default does nothing."""
        return None


async def in_thread(function: Callable[[], T], *, name: str) -> T:
    """Run blocking code of an environment in a daemon thread of its own."""
    return await _THREADS.run(function, name=name)


_ENVIRONMENTS: dict[str, type[Environment]] = {}
_Class = TypeVar("_Class", bound=type[Environment])


def register_environment(name: str) -> Callable[[_Class], _Class]:
    """Register an :class:`Environment` class, constructed without arguments, under the name that rows give.

    Raises:
        ConfigError: the name is taken.
    """

    def register(cls: _Class) -> _Class:
        if name in _ENVIRONMENTS:
            raise ConfigError(f"two environments are called {name!r}: {_ENVIRONMENTS[name]!r} and {cls!r}; rename one")
        cls.name = name
        _ENVIRONMENTS[name] = cls
        return cls

    return register


def get_environment(name: str) -> type[Environment]:
    """Return the class registered as ``name``.

    Raises:
        ConfigError: there is none; the message lists the nearest name and all names.
    """
    if name not in _ENVIRONMENTS:
        cls = load_installed("environments", name, fits=_is_environment, expected="a subclass of Environment")
        if cls is not None and name not in _ENVIRONMENTS:  # its module may have registered it
            register_environment(name)(cls)
    if name not in _ENVIRONMENTS:
        known = sorted({*_ENVIRONMENTS, *installed("environments")})
        raise ConfigError(
            f"no environment is called {name!r}; {did_you_mean(name, known)}there are {known} (see "
            "@register_environment)"
        )
    return _ENVIRONMENTS[name]


def _is_environment(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, Environment)


def load_environments(path: str | None) -> None:
    """Import ``environments.path``, a Python file or module that registers more; None does nothing.

    Raises:
        ConfigError: it cannot be imported or registers a name twice.
    """
    if path is not None:
        load_user_module(path, key="environments.path")


def row_environment(row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name of a row's environment and the arguments of its ``reset``.

    Nulls are left out: Parquet writes one wherever another row has the argument.

    Raises:
        DataError: the row names none.
    """
    given = (row.get("extra_info") or {}).get("environment_kwargs")
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise DataError(
            "extra_info.environment_kwargs must be an object with the environment's 'name', like "
            f"{{'name': 'textworld', 'game': …}}, got {given!r:.100}"
        )
    return given["name"], {key: value for key, value in given.items() if key != "name" and value is not None}


def require_environments(rows: Iterable[Mapping[str, Any]]) -> None:
    """Refuse rows whose environment does not exist or does not take their arguments; call it before a run.

    Raises:
        ConfigError, DataError: the first problem.
    """
    for row in rows:
        name, kwargs = row_environment(row)
        reset = inspect.signature(get_environment(name).reset)
        try:
            reset.bind(None, **kwargs)
        except TypeError as error:
            raise DataError(
                f"environment {name!r} cannot be reset with {kwargs!r:.200}: {error}; correct "
                "extra_info.environment_kwargs"
            ) from None
