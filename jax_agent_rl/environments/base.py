"""Environments: their interface, their names and their pools.

An environment is a world that answers and scores the policy's replies. Life of an instance in one
trajectory::

    reset(**environment_kwargs) ──► step(reply) … ──► conclude(messages, reason)
                                                                 │
                                                                 ▼
                                                   close(), or the next reset

The keyword arguments come from the dataset row: ``extra_info.environment_kwargs = {"name":
"textworld", "game": …}``. An instance serves one trajectory at a time. Methods are coroutines; wrap
blocking code with :func:`in_thread`.

A pool bounds the number of instances and the time of every call::

    acquire ──► waits for one of max_instances ──► an idle instance (scope global), or a new one
                                                    │ reset, step, conclude, each in bounded time
    release ◄── scope global and nothing went wrong: idle again ◄──┤
                otherwise: closed                             ◄────┘

An instance is released exactly once, also on cancellation.
:meth:`EnvironmentPool.lease` does both for one trajectory.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar

from jax_agent_rl.checks import as_float, as_score
from jax_agent_rl.errors import (
    ConfigError,
    DataError,
    EnvironmentFailedError,
    EnvironmentTimeoutError,
    TrajectoryError,
)
from jax_agent_rl.types import FinishReason, ToolCallRecord
from jax_agent_rl.utils.failures import FailureLog, user_code
from jax_agent_rl.utils.near_names import did_you_mean
from jax_agent_rl.utils.plugins import installed, load_installed, load_user_module
from jax_agent_rl.utils.timeouts import DaemonThreads, in_time

if TYPE_CHECKING:
    from jax_agent_rl.chat.reply import Reply

Scope = Literal["rollout", "global"]
T = TypeVar("T")
_THREADS = DaemonThreads(kind="environment", error=EnvironmentFailedError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """An environment's answer to a reply, with its score.

    Attributes:
        messages: appended to the conversation; :meth:`say` makes the usual single user message.
        score: reward of the reply it answers; becomes ``Turn.score``. Any number that float32
            holds.
        done: the episode is over; ``messages`` are not shown any more.
        tool_calls: calls it ran itself for that reply.
        metrics: numbers to add up over the trajectory, by name.
    """

    messages: tuple[Mapping[str, Any], ...] = ()
    score: float = 0.0
    done: bool = False
    tool_calls: tuple[ToolCallRecord, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "score", as_score(self.score, "an environment's score"))
        object.__setattr__(self, "metrics", _numbers(self.metrics))

    @classmethod
    def say(cls, text: str, **fields: Any) -> Observation:
        """Return an observation of one user message."""
        return cls(messages=({"role": "user", "content": text},), **fields)


def _numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics as floats; raise ValueError for one that is no number."""
    numbers = {}
    for key, value in metrics.items():
        numbers[key] = as_float(value, f"an environment's metric {key!r}")
    return numbers


class Environment(ABC):
    """Base class of environments; give it a name with ``@register_environment``."""

    name: ClassVar[str]
    """The name it is registered under."""
    replayable: ClassVar[bool] = True
    """Whether the same arguments and replies give the same observations again. Trajectories that
    branch (``rollout.strategy``) need it: a branch gets an instance of its own, which replays the
    turns it inherits."""

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, Any]]:
        """Tools this episode offers, in OpenAI's format, for the prompt.

        They are read after ``reset``. By default there are none.
        """
        return ()

    @abstractmethod
    async def reset(self, **environment_kwargs: Any) -> Observation:
        """Begin an episode; its messages follow the row's prompt.

        Subclasses name the arguments that rows may give.

        Raises:
            EnvironmentFailedError: there is no such episode. Any other exception counts as this
                one.
        """

    @abstractmethod
    async def step(self, reply: Reply) -> Observation:
        """Answer a reply: text without reasoning, and decoded calls.

        A reply that was cut off does not get here.
        """

    async def conclude(
        self, messages: Sequence[Mapping[str, Any]], reason: FinishReason
    ) -> Mapping[str, float]:
        """Finish the episode with the whole conversation.

        It is called once, when the trajectory is over, whatever ended it.

        Returns:
            ``score`` is added to the score of the last turn; other numbers become metrics. The
            default adds nothing.
        """
        return {}

    async def close(self) -> None:
        """Free what the instance holds. The default does nothing."""
        return None


async def in_thread(function: Callable[[], T], *, name: str) -> T:
    """Run blocking code of an environment in a daemon thread of its own."""
    return await _THREADS.run(function, name=name)


ENVIRONMENTS: dict[str, type[Environment]] = {}
"""The registered environments, by name."""
_Class = TypeVar("_Class", bound=type[Environment])


def register_environment(name: str) -> Callable[[_Class], _Class]:
    """Register an :class:`Environment` class under the name that rows give.

    It is constructed without arguments.

    Raises:
        ConfigError: the name is taken.
    """

    def register(cls: _Class) -> _Class:
        if name in ENVIRONMENTS:
            raise ConfigError(
                f"two environments are called {name!r}: {ENVIRONMENTS[name]!r} and {cls!r};"
                " rename one"
            )
        cls.name = name
        ENVIRONMENTS[name] = cls
        return cls

    return register


def get_environment(name: str) -> type[Environment]:
    """Return the class registered as ``name``.

    Raises:
        ConfigError: there is none; the message lists the nearest name and all names.
    """
    if name not in ENVIRONMENTS:
        cls = load_installed(
            "environments", name, fits=_is_environment, expected="a subclass of Environment"
        )
        is_registered = name in ENVIRONMENTS  # its module may have done so when it was imported
        if cls is not None and not is_registered:
            register_environment(name)(cls)
    if name not in ENVIRONMENTS:
        known = sorted({*ENVIRONMENTS, *installed("environments")})
        raise ConfigError(
            f"no environment is called {name!r}; {did_you_mean(name, known)}there are {known} (see "
            "@register_environment)"
        )
    return ENVIRONMENTS[name]


def _is_environment(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Environment)


def load_environments(path: str | None) -> None:
    """Import ``environments.path``, a Python file or module that registers more; None does nothing.

    Raises:
        ConfigError: it cannot be imported or registers a name twice.
    """
    if path is not None:
        load_user_module(path, key="environments.path")


def row_environment(row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name of a row's environment and the arguments of its ``reset``.

    Raises:
        DataError: the row names none.
    """
    kwargs = (row.get("extra_info") or {}).get("environment_kwargs")
    if not isinstance(kwargs, Mapping) or not isinstance(kwargs.get("name"), str):
        raise DataError(
            "extra_info.environment_kwargs must be an object with the environment's 'name', like "
            f"{{'name': 'textworld', 'game': …}}, got {kwargs!r:.100}"
        )
    return kwargs["name"], {key: value for key, value in kwargs.items() if key != "name"}


def require_environment(row: Mapping[str, Any]) -> None:
    """Check, before a run, that a row's environment exists and takes the row's arguments.

    Raises:
        ConfigError: there is no such environment.
        DataError: the row names none, or gives it other arguments.
    """
    name, kwargs = row_environment(row)
    reset = inspect.signature(get_environment(name).reset)
    try:
        reset.bind(None, **kwargs)
    except TypeError as error:
        raise DataError(
            f"environment {name!r} cannot be reset with {kwargs!r:.200}: {error}; correct"
            " extra_info.environment_kwargs"
        ) from None


# --- pools ----------------------------------------------------------------------------------------


class Closable(Protocol):
    """What a pool holds."""

    async def close(self) -> None: ...


E = TypeVar("E", bound=Closable)
W = TypeVar("W", bound=Environment)


async def _bounded(call: Callable[[], Awaitable[T]], where: str, timeout: float, key: str) -> T:
    """Call code of an environment; any failure becomes an EnvironmentFailedError.

    Args:
        where: environment and method, for the messages.
        key: the setting that holds ``timeout``, for the message.
    """

    def timeout_error() -> EnvironmentTimeoutError:
        return EnvironmentTimeoutError(f"{where} did not return within {key}={timeout:g} seconds")

    with user_code(EnvironmentFailedError, where):
        return await in_time(
            call,
            timeout,
            what=where,
            late=timeout_error,
            error=lambda problem: EnvironmentFailedError(f"{where} {problem}"),
        )


class LeasedEnvironment:
    """An instance leased to one trajectory.

    Every call is bounded, and a failure loses this trajectory only. All methods raise
    EnvironmentFailedError or EnvironmentTimeoutError.
    """

    def __init__(self, environment: Environment, name: str, timeout: float):
        self.name = name
        self._environment = environment
        self._timeout = timeout

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, Any]]:
        """Tools of this episode; see :class:`Environment`."""
        return self._environment.tool_schemas

    async def reset(self, **environment_kwargs: Any) -> Observation:
        return await self._call("reset", lambda: self._environment.reset(**environment_kwargs))

    async def step(self, reply: Reply) -> Observation:
        return await self._call("step", lambda: self._environment.step(reply))

    async def conclude(
        self, messages: Sequence[Mapping[str, Any]], reason: FinishReason
    ) -> Mapping[str, float]:
        async def checked() -> Mapping[str, float]:
            outcome = await self._environment.conclude(messages, reason)
            score = as_score(outcome.get("score", 0.0), "its score")
            metrics = {key: value for key, value in outcome.items() if key != "score"}
            return {"score": score, **_numbers(metrics)}

        return await self._call("conclude", checked)

    async def _call(self, method: str, call: Callable[[], Awaitable[T]]) -> T:
        where = f"environment {self.name!r}: {method}"
        return await _bounded(call, where, self._timeout, "environments.timeout")


class EnvironmentPool(Generic[E]):
    """The instances of one environment. Use it from one event loop.

    Args:
        create: makes an instance.
        name: the environment's name, for messages.
        scope: ``rollout`` makes an instance for each trajectory; ``global`` keeps instances and
            resets them.
        max_instances: number of instances at the same time; further leases wait.
        timeout: seconds each call may take.
        timeout_key: the setting that holds ``timeout``, for messages.
        failures: log of what goes wrong after a trajectory; None: a new one.
    """

    def __init__(
        self,
        create: Callable[[], E],
        *,
        name: str,
        scope: Scope,
        max_instances: int,
        timeout: float,
        timeout_key: str = "environments.timeout",
        failures: FailureLog | None = None,
    ):
        self._failures = failures or FailureLog()
        self._create = create
        self._name = name
        self._scope = scope
        self._timeout = timeout
        self._timeout_key = timeout_key
        self._slots = asyncio.Semaphore(max_instances)
        self._idle: list[E] = []

    async def acquire(self) -> E:
        """Lease an instance, when one is free; :meth:`release` it once.

        Raises:
            EnvironmentFailedError: it cannot be made.
        """
        await self._slots.acquire()
        try:
            if self._idle:
                return self._idle.pop()
            return self._make()
        except BaseException:
            self._slots.release()
            raise

    async def release(self, environment: E, *, reusable: bool) -> None:
        """End a lease; ``reusable`` if nothing went wrong with the instance."""
        try:
            if reusable and self._scope == "global":
                self._idle.append(environment)
            else:  # a second cancellation ends the waiting, not the closing
                await asyncio.shield(self._close(environment))
        finally:
            self._slots.release()

    @asynccontextmanager
    async def lease(self: EnvironmentPool[W]) -> AsyncIterator[LeasedEnvironment]:
        """Lease an instance for one trajectory.

        Raises:
            EnvironmentFailedError: it cannot be made.
        """
        environment = await self.acquire()
        reusable = False
        try:
            yield LeasedEnvironment(environment, self._name, self._timeout)
            reusable = True
        finally:
            await self.release(environment, reusable=reusable)

    async def close(self) -> None:
        """Close the idle instances; leased ones are closed when they are released."""
        idle = self._idle
        self._idle = []
        self._scope = "rollout"  # whatever is released from now on is closed
        for environment in idle:
            await self._close(environment)

    async def _close(self, environment: E) -> None:
        """Close an instance; a failure is logged, not raised: the trajectory is over."""
        try:
            await _bounded(
                environment.close,
                f"environment {self._name!r}: close",
                self._timeout,
                self._timeout_key,
            )
        except TrajectoryError as error:
            self._failures.report(
                f"environment {self._name!r} could not be closed", str(error), error=error.__cause__
            )

    def _make(self) -> E:
        with user_code(EnvironmentFailedError, f"environment {self._name!r}: making it"):
            return self._create()


class EnvironmentPools:
    """All environments of a run, each with a pool of its own.

    Args:
        scope: ``rollout`` makes an instance for each trajectory; ``global`` keeps instances and
            resets them.
        max_instances: number of instances of each environment at the same time; further leases
            wait.
        timeout: seconds each call may take.
        failures: log of what goes wrong after a trajectory; None: a new one for each pool.
    """

    def __init__(
        self,
        *,
        scope: Scope = "rollout",
        max_instances: int = 64,
        timeout: float = 30.0,
        failures: FailureLog | None = None,
    ):
        self._settings: dict[str, Any] = {
            "scope": scope,
            "max_instances": max_instances,
            "timeout": timeout,
            "failures": failures,
        }
        self._pools: dict[str, EnvironmentPool[Environment]] = {}

    def pool(self, name: str) -> EnvironmentPool[Environment]:
        """Return the pool of the environment ``name``; raise ConfigError if there is none."""
        if name not in self._pools:
            self._pools[name] = EnvironmentPool(get_environment(name), name=name, **self._settings)
        return self._pools[name]

    async def close(self) -> None:
        """Close all idle instances."""
        for pool in self._pools.values():
            await pool.close()
