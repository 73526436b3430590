"""Pools of environment instances: their number, time limits and reuse.

::

    acquire ──► waits for one of max_instances ──► an idle instance (scope global), or a new one
                                                    │ reset, step, conclude, each in bounded time
    release ◄── scope global and nothing went wrong: idle again ◄──┤
                else: closed                                  ◄────┘     exactly once, also on cancellation

:meth:`EnvironmentPool.lease` does both for one trajectory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from jax_agent_rl.environments.base import Environment, Observation, get_environment
from jax_agent_rl.errors import EnvironmentFailedError, EnvironmentTimeoutError, TrajectoryError
from jax_agent_rl.types import FinishReason
from jax_agent_rl.utils.threads import in_time

if TYPE_CHECKING:
    from jax_agent_rl.chat.formats.base import Reply

logger = logging.getLogger(__name__)

Scope = Literal["rollout", "global"]
T = TypeVar("T")


class Closable(Protocol):
    """What a pool holds."""

    async def close(self) -> None: ...


E = TypeVar("E", bound=Closable)
W = TypeVar("W", bound=Environment)


async def _bounded(work: Awaitable[T], where: str, timeout: float, key: str) -> T:
    """Await code of an environment; whatever goes wrong becomes an EnvironmentFailedError that names ``where``."""
    try:
        return await in_time(
            work,
            timeout,
            late=lambda: EnvironmentTimeoutError(f"{where} did not return within {key}={timeout:g} seconds"),
            error=lambda problem: EnvironmentFailedError(f"{where} {problem}"),
        )
    except TrajectoryError:
        raise
    except Exception as error:
        raise EnvironmentFailedError(f"{where} raised {type(error).__name__}: {error}") from error


class LeasedEnvironment:
    """An instance leased to one trajectory: every call is bounded, every failure loses this trajectory only.

    All methods raise EnvironmentFailedError or EnvironmentTimeoutError.
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
        return await self._call("reset", self._environment.reset(**environment_kwargs))

    async def step(self, reply: Reply) -> Observation:
        return await self._call("step", self._environment.step(reply))

    async def conclude(self, messages: Sequence[Mapping[str, Any]], reason: FinishReason) -> Mapping[str, float]:
        return await self._call("conclude", self._environment.conclude(messages, reason))

    async def _call(self, what: str, work: Awaitable[T]) -> T:
        return await _bounded(work, f"environment {self.name!r}: {what}", self._timeout, "environments.timeout")


class EnvironmentPool(Generic[E]):
    """The instances of one environment. Use it from one event loop.

    Args:
        create: makes an instance.
        name: of the environment, for messages.
        scope: ``rollout`` makes an instance for each trajectory; ``global`` keeps instances and resets them.
        max_instances: at the same time; more leases wait.
        timeout: seconds each call may take.
        timeout_key: its name in messages.
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
    ):
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
            return self._idle.pop() if self._idle else self._make()
        except BaseException:
            self._slots.release()
            raise

    async def release(self, environment: E, *, reusable: bool) -> None:
        """End a lease; ``reusable`` if nothing went wrong with the instance."""
        try:
            if reusable and self._scope == "global":
                self._idle.append(environment)
            else:  # a second cancellation ends the waiting, not the closing
                await asyncio.shield(asyncio.ensure_future(self._close(environment)))
        finally:
            self._slots.release()

    @asynccontextmanager
    async def lease(self: EnvironmentPool[W]) -> AsyncIterator[LeasedEnvironment]:
        """Lease an instance for one trajectory.

        Raises:
            EnvironmentFailedError: it cannot be made.
        """
        environment, reusable = await self.acquire(), False
        try:
            yield LeasedEnvironment(environment, self._name, self._timeout)
            reusable = True
        finally:
            await self.release(environment, reusable=reusable)

    async def close(self) -> None:
        """Close the idle instances; leased ones are closed when they are released."""
        idle, self._idle = self._idle, []
        self._scope = "rollout"
        for environment in idle:
            await self._close(environment)

    async def _close(self, environment: E) -> None:
        """Close an instance; a failure is logged, not raised: the trajectory is over."""
        try:
            await _bounded(environment.close(), f"environment {self._name!r}: close", self._timeout, self._timeout_key)
        except TrajectoryError as error:
            logger.warning("%s", error)

    def _make(self) -> E:
        try:
            return self._create()
        except TrajectoryError:
            raise
        except Exception as error:
            raise EnvironmentFailedError(
                f"environment {self._name!r} cannot be made: {type(error).__name__}: {error}"
            ) from error


class EnvironmentPools:
    """All environments of a run, each with a pool of its own.

    Args:
        scope, max_instances, timeout: see :class:`EnvironmentPool`.
    """

    def __init__(self, *, scope: Scope = "rollout", max_instances: int = 64, timeout: float = 30.0):
        self._settings: dict[str, Any] = {"scope": scope, "max_instances": max_instances, "timeout": timeout}
        self._pools: dict[str, EnvironmentPool[Environment]] = {}

    def pool(self, name: str) -> EnvironmentPool[Environment]:
        """Return the pool of the environment called ``name``; raise ConfigError if there is none."""
        if name not in self._pools:
            self._pools[name] = EnvironmentPool(get_environment(name), name=name, **self._settings)
        return self._pools[name]

    async def close(self) -> None:
        """Close all idle instances."""
        for pool in self._pools.values():
            await pool.close()
