"""Environments: their interface, their names and their pools.

An environment is a world that answers and scores the policy's replies. Life of an instance in one
trajectory::

    reset(**environment_kwargs) ──► step(reply) … ──► conclude(messages, reason)
                                                                 │
                                                                 ▼
                                                   close(), or the next reset

The keyword arguments come from the dataset row: ``extra_info.environment_kwargs = {"name":
"textworld", "game": …}``. What takes long to start an instance and is the same for many
trajectories is done in ``prepare``, before the first ``reset``. An instance serves one trajectory
at a time. Methods are coroutines; wrap blocking code with :func:`in_thread`.

A pool bounds the number of instances and the time of every call::

    acquire ──► waits for one of max_instances ──► an idle instance (scope global), or
                                                   a prepared one (warm_instances), or a new one
                                                    │ reset, step, conclude, each in bounded time
    release ◄── scope global and nothing went wrong: idle again ◄──┤
                otherwise: closed                             ◄────┘

An instance is released exactly once, also on cancellation. With scope ``rollout`` it never serves a
second trajectory, also if it was prepared (:mod:`jax_agent_rl.utils.instance_pool`).
:meth:`EnvironmentPool.lease` does both for one trajectory.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar

from jax_agent_rl.checks import as_float, as_score
from jax_agent_rl.environments.snapshots import SnapshotStore
from jax_agent_rl.errors import (
    ConfigError,
    DataError,
    EnvironmentFailedError,
    EnvironmentTimeoutError,
    TrajectoryError,
)
from jax_agent_rl.types import FinishReason, ToolCallRecord
from jax_agent_rl.utils.failures import FailureLog, user_code
from jax_agent_rl.utils.instance_pool import InstancePool, Started
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
    """Return the metrics as floats; raise ValueError for one that is not a number."""
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
    prepared_by: ClassVar[tuple[str, ...]] = ()
    """The arguments of ``reset`` that :meth:`prepare` takes, e.g. ``("image",)``; None where a row
    leaves one out."""

    async def prepare(self, **environment_kwargs: Any) -> None:
        """Do what takes long to start an instance and does not depend on the trajectory.

        It is called once, before the first ``reset``, perhaps long before
        (``environments.warm_instances``). Its instances are then interchangeable for all rows that
        have the same arguments. The default does nothing.
        """
        return None

    takes_snapshots: ClassVar[bool] = False
    """Whether :meth:`snapshot` and :meth:`restore` are there. A branch then begins with a snapshot
    of its parent's instance instead of a replay, and a resumed run goes on from the newest one."""

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

    async def snapshot(self) -> bytes:
        """Return the state of the episode, between two steps.

        It is called after every step if :attr:`takes_snapshots` is set and something may go on from
        there.
        """
        raise NotImplementedError

    async def restore(self, snapshot: bytes) -> None:
        """Bring the episode into the state of a snapshot.

        It is called after a ``reset`` with the arguments of the episode that the snapshot is of,
        perhaps in another process. The bytes may come from a file, so check them.

        Raises:
            EnvironmentFailedError: it cannot be restored. Any other exception counts as this one.
        """
        raise NotImplementedError

    async def conclude(
        self, messages: Sequence[Mapping[str, Any]], reason: FinishReason
    ) -> Mapping[str, float]:
        """Finish the episode with the whole conversation.

        It is called once, when the trajectory is over, whatever ended it.

        Args:
            messages: the conversation. The last one is the policy's if that was cut off and did not
                get to :meth:`step`; an observation that did not fit is there as well.

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

    Attributes:
        name: the environment's.
        start_metrics: how the instance was started, for ``Trajectory.metrics``; empty if it needs
            no preparation.
    """

    def __init__(
        self,
        environment: Environment,
        name: str,
        timeout: float,
        start_metrics: Mapping[str, float],
    ):
        self.name = name
        self.start_metrics = start_metrics
        self._environment = environment
        self._timeout = timeout

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, Any]]:
        """Tools of this episode; see :class:`Environment`."""
        return self._environment.tool_schemas

    @property
    def replayable(self) -> bool:
        """See :class:`Environment`."""
        return self._environment.replayable

    @property
    def takes_snapshots(self) -> bool:
        """See :class:`Environment`."""
        return self._environment.takes_snapshots

    async def reset(self, **environment_kwargs: Any) -> Observation:
        return await self._call("reset", lambda: self._environment.reset(**environment_kwargs))

    async def step(self, reply: Reply) -> Observation:
        return await self._call("step", lambda: self._environment.step(reply))

    async def snapshot(self) -> bytes:
        async def checked() -> bytes:
            snapshot = await self._environment.snapshot()
            if not isinstance(snapshot, bytes):
                raise TypeError(f"it must be bytes, got {type(snapshot).__name__}")
            return snapshot

        return await self._call("snapshot", checked)

    async def restore(self, snapshot: bytes) -> None:
        await self._call("restore", lambda: self._environment.restore(snapshot))

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


_NO_KWARGS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Acquired(Generic[E]):
    """An instance that was acquired from a pool.

    Attributes:
        key: what it was prepared with.
        start: how it was started; None: it was idle.
    """

    instance: E
    key: str
    start: Started[E] | None

    @property
    def start_metrics(self) -> dict[str, float]:
        """Seconds of its start, whether it was ready, and preparations that failed before it."""
        if self.start is None:
            return {"environment_start_seconds": 0.0, "environment_was_ready": 1.0}
        return {
            "environment_start_seconds": self.start.seconds,
            "environment_was_ready": float(self.start.was_ready),
            "environment_failed_preparations": float(self.start.failed_preparations),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Preparation:
    """How a pool prepares its instances.

    Attributes:
        prepare: is given an instance, and the arguments below by name.
        arguments: names of the row's arguments that it takes.
        timeout: seconds that it may take.
        warm_instances: maximum number of instances that are prepared ahead.
    """

    prepare: Callable[..., Awaitable[None]]
    arguments: tuple[str, ...]
    timeout: float
    warm_instances: int


class EnvironmentPool(Generic[E]):
    """The instances of one environment. Use it from one event loop.

    Args:
        create: makes an instance.
        name: the environment's name, for messages.
        scope: ``rollout`` makes an instance for each trajectory; ``global`` keeps instances and
            resets them.
        max_instances: number of instances at the same time; further leases wait. Instances that are
            prepared ahead come on top.
        timeout: seconds each call may take.
        timeout_key: the setting that holds ``timeout``, for messages.
        preparation: how instances are prepared; None: they are not.
        failures: log of what goes wrong outside of a trajectory; None: a new one.
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
        preparation: Preparation | None = None,
        failures: FailureLog | None = None,
    ):
        self._failures = failures or FailureLog()
        self._create = create
        self._name = name
        self._scope = scope
        self._timeout = timeout
        self._timeout_key = timeout_key
        self._max_instances = max_instances
        self._slots = asyncio.Semaphore(max_instances)
        self._num_leased = 0
        self._idle: list[Acquired[E]] = []
        self._preparation = preparation
        warm_instances = 0 if preparation is None else preparation.warm_instances
        self._warm: InstancePool[str, E] = InstancePool(
            close=self._close, size=warm_instances, report=self._report_preparation
        )

    async def acquire(self, environment_kwargs: Mapping[str, Any] = _NO_KWARGS) -> Acquired[E]:
        """Lease an instance, when one is free; :meth:`release` it once.

        Args:
            environment_kwargs: arguments of its ``reset``, some of which it may be prepared with.

        Raises:
            EnvironmentFailedError, EnvironmentTimeoutError: it cannot be made or prepared.
        """
        await self._slots.acquire()
        self._num_leased += 1
        try:
            arguments: dict[str, Any] = {}
            if self._preparation is not None:
                for name in self._preparation.arguments:
                    arguments[name] = environment_kwargs.get(name)
            key = json.dumps(arguments, sort_keys=True, default=repr)

            for idle in reversed(self._idle):
                if idle.key == key:
                    self._idle.remove(idle)
                    return idle
            if self._idle and self._num_leased + len(self._idle) > self._max_instances:
                await asyncio.shield(self._close(self._idle.pop(0).instance))

            started = await self._warm.take(key, lambda: self._start(arguments))
            return Acquired(instance=started.instance, key=key, start=started)
        except BaseException:
            self._num_leased -= 1
            self._slots.release()
            raise

    async def release(self, acquired: Acquired[E], *, reusable: bool) -> None:
        """End a lease; ``reusable`` if nothing went wrong with the instance."""
        try:
            if reusable and self._scope == "global":
                self._idle.append(replace(acquired, start=None))
            else:  # a second cancellation ends the waiting, not the closing
                await asyncio.shield(self._close(acquired.instance))
        finally:
            self._num_leased -= 1
            self._slots.release()

    @asynccontextmanager
    async def lease(
        self: EnvironmentPool[W], environment_kwargs: Mapping[str, Any] = _NO_KWARGS
    ) -> AsyncIterator[LeasedEnvironment]:
        """Lease an instance for one trajectory; arguments and errors as for :meth:`acquire`."""
        acquired = await self.acquire(environment_kwargs)
        start_metrics: Mapping[str, float] = {}
        if self._preparation is not None:
            start_metrics = acquired.start_metrics
        reusable = False
        try:
            yield LeasedEnvironment(acquired.instance, self._name, self._timeout, start_metrics)
            reusable = True
        finally:
            await self.release(acquired, reusable=reusable)

    async def close(self) -> None:
        """Close idle and prepared instances; leased ones are closed when they are released."""
        idle = self._idle
        self._idle = []
        self._scope = "rollout"  # whatever is released from now on is closed
        await self._warm.close()
        for acquired in idle:
            await self._close(acquired.instance)

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

    async def _start(self, arguments: Mapping[str, Any]) -> E:
        """Make an instance and prepare it; nothing is left of one that cannot be prepared."""
        with user_code(EnvironmentFailedError, f"environment {self._name!r}: making it"):
            environment = self._create()
        preparation = self._preparation
        if preparation is None:
            return environment

        try:
            await _bounded(
                lambda: preparation.prepare(environment, **arguments),
                f"environment {self._name!r}: prepare",
                preparation.timeout,
                "environments.start_timeout",
            )
        except BaseException:
            await asyncio.shield(self._close(environment))
            raise
        return environment

    def _report_preparation(self, error: BaseException) -> None:
        self._failures.report(
            f"environment {self._name!r} could not be prepared ahead",
            f"environment {self._name!r} could not be prepared ahead: {error}",
            error=error.__cause__,
        )


class EnvironmentPools:
    """All environments of a run, each with a pool of its own.

    Args:
        scope: ``rollout`` makes an instance for each trajectory; ``global`` keeps instances and
            resets them.
        max_instances: number of instances of each environment at the same time; further leases
            wait.
        timeout: seconds each call may take.
        warm_instances: number of instances of each environment that are prepared ahead, besides
            those in use.
        start_timeout: seconds that preparing an instance may take.
        snapshot_mb: maximum size of all snapshots together, in MiB; 0 keeps none.
        failures: log of what goes wrong outside of a trajectory; None: a new one for each pool.

    Attributes:
        snapshots: of running trajectories, and of trajectories that others may branch off.
    """

    def __init__(
        self,
        *,
        scope: Scope = "rollout",
        max_instances: int = 64,
        timeout: float = 30.0,
        warm_instances: int = 0,
        start_timeout: float = 120.0,
        snapshot_mb: int = 256,
        failures: FailureLog | None = None,
    ):
        self.snapshots = SnapshotStore(snapshot_mb << 20)
        self._warm_instances = warm_instances
        self._start_timeout = start_timeout
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
            cls = get_environment(name)
            preparation = None
            if cls.prepare is not Environment.prepare:
                preparation = Preparation(
                    prepare=cls.prepare,
                    arguments=cls.prepared_by,
                    timeout=self._start_timeout,
                    warm_instances=self._warm_instances,
                )
            self._pools[name] = EnvironmentPool(
                cls, name=name, preparation=preparation, **self._settings
            )
        return self._pools[name]

    async def close(self) -> None:
        """Close all idle and prepared instances."""
        for pool in self._pools.values():
            await pool.close()
