'''``@environment_tool``: a tool whose function is handed an environment, leased from a pool.

::

    class Shell:
        async def reset(self, **create_kwargs): ...     # before a trajectory uses it
        async def close(self): ...                      # in the end, or when it broke

    @environment_tool(env_cls=Shell, pool_size=8)
    async def run(command: str, env: Shell) -> str:
        """Runs a command."""
        return await env.run(command)

The parameter ``env`` is not part of the schema. Life of a lease::

    scope trajectory    first call ─► acquire ─► reset ─► call, call, …      ─► released at the end
    scope global        each call  ─► acquire ─► reset if it is new ─► call  ─► released
                                       │ waits for one of pool_size          │
                                                    a call broke it: closed ◄┘

A call breaks its environment if it is cut off by a timeout or cancelled, or raises anything but
ToolError. A new environment takes its place in the pool. With scope trajectory, later calls of the
trajectory fail: what it did in the broken environment is gone.
'''

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from jax_agent_rl.environments.base import Acquired, EnvironmentPool
from jax_agent_rl.errors import ToolDefinitionError, ToolError
from jax_agent_rl.tools.base import ToolResult
from jax_agent_rl.tools.function_tool import FunctionTool


class Resettable(Protocol):
    """An environment of tools."""

    async def reset(self, *args: Any, **kwargs: Any) -> Any: ...

    async def close(self) -> None: ...


@dataclass(eq=False)
class _Instance:
    """An environment in a pool."""

    environment: Resettable
    is_reset: bool = False

    async def close(self) -> None:
        await self.environment.close()


_Pool = EnvironmentPool[_Instance]


@dataclass
class _Trajectory:
    """A trajectory whose tools use the pool.

    Attributes:
        reset_kwargs: arguments of ``reset``.
        tools: names of the tools that have not released it.
        lock: held by the call that uses its environment.
        lease: its environment, and the pool that it goes back to; None before the first call and
            after the lease ended.
        waiting: number of calls that wait for a free environment.
        end_reason: why its lease ended, so that no further call gets an environment.
    """

    reset_kwargs: dict[str, Any] = field(default_factory=dict)
    tools: set[str] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    lease: tuple[_Pool, Acquired[_Instance]] | None = None
    waiting: int = 0
    end_reason: str | None = None


class EnvironmentLeases:
    """Leases of one pool, for all trajectories; see :func:`environment_tool`."""

    def __init__(
        self,
        create: Callable[[], Resettable],
        *,
        name: str,
        pool_size: int,
        shared: bool,
        close_timeout: float,
    ):
        self.shared = shared
        self.in_use_message = (
            f"all {pool_size} of its {name} environments are in use (pool_size={pool_size})"
        )
        self._new_pool: Callable[[], _Pool] = lambda: EnvironmentPool(
            lambda: _Instance(create()),
            name=name,
            scope="global",
            max_instances=pool_size,
            timeout=close_timeout,
            timeout_key="close_timeout",
        )
        self._name = name
        self._pool = self._new_pool()
        self._trajectories: dict[str, _Trajectory] = {}

    def join(self, instance_id: str, tool: str, reset_kwargs: Mapping[str, Any]) -> None:
        """Note that a trajectory may use a tool.

        Args:
            instance_id: the trajectory's id.
            tool: the tool's name.
            reset_kwargs: arguments of ``reset``; arguments of its other tools are added to them.
        """
        if reset_kwargs and self.shared:
            raise TypeError(
                f"all trajectories share the environments of {tool!r}, so it takes no"
                f" create_kwargs, got {sorted(reset_kwargs)}; set env_kwargs, or scope='trajectory'"
            )
        trajectory = self._trajectories.setdefault(instance_id, _Trajectory())
        trajectory.tools.add(tool)
        trajectory.reset_kwargs |= reset_kwargs

    async def leave(self, instance_id: str, tool: str) -> None:
        """End the trajectory's lease if this was the last of its tools.

        An environment that a call still uses is closed.
        """
        trajectory = self._trajectories.get(instance_id)
        if trajectory is None:
            return
        trajectory.tools.discard(tool)
        if trajectory.tools:
            return

        del self._trajectories[instance_id]
        in_use = trajectory.lock.locked()
        await self._end_lease(trajectory, "its trajectory is over", reusable=not in_use)

    def waits(self, instance_id: str) -> bool:
        """Return whether a call of the trajectory waits for a free environment."""
        trajectory = self._trajectories.get(instance_id)
        return trajectory is not None and trajectory.waiting > 0

    @asynccontextmanager
    async def lease(self, instance_id: str) -> AsyncIterator[Resettable]:
        """Provide the environment of one call.

        Raises:
            ToolError: the trajectory's environment broke.
            EnvironmentFailedError: none can be made.
        """
        trajectory = self._trajectories[instance_id]
        if self.shared:
            lease = self._lease_for_call(trajectory)
        else:
            lease = self._lease_for_trajectory(trajectory)
        async with lease as environment:
            yield environment

    async def close(self) -> None:
        """Close all environments; those in use, when their lease ends."""
        pool = self._pool
        self._pool = self._new_pool()
        await pool.close()

    @asynccontextmanager
    async def _lease_for_call(self, trajectory: _Trajectory) -> AsyncIterator[Resettable]:
        pool, acquired = await self._acquire(trajectory)
        reusable = False
        try:
            yield acquired.instance.environment
            reusable = True
        except ToolError:
            reusable = True
            raise
        finally:
            await pool.release(acquired, reusable=reusable)

    @asynccontextmanager
    async def _lease_for_trajectory(self, trajectory: _Trajectory) -> AsyncIterator[Resettable]:
        async with trajectory.lock:
            if trajectory.end_reason is None and trajectory.lease is None:
                trajectory.lease = await self._acquire(trajectory)
                if trajectory.end_reason is not None:
                    # The trajectory ended meanwhile, and `reset` ignored the cancellation.
                    await self._end_lease(trajectory, trajectory.end_reason, reusable=False)
            if trajectory.lease is None:
                raise ToolError(f"its {self._name} is gone: {trajectory.end_reason}")

            _, acquired = trajectory.lease
            try:
                yield acquired.instance.environment
            except ToolError:
                raise
            except BaseException as error:
                reason = f"a call raised {type(error).__name__}: {error}"
                await self._end_lease(trajectory, reason, reusable=False)
                raise

    async def _acquire(self, trajectory: _Trajectory) -> tuple[_Pool, Acquired[_Instance]]:
        """Return an instance that is ready for a call, and the pool that it goes back to."""
        pool = self._pool
        trajectory.waiting += 1
        try:
            acquired = await pool.acquire()
        finally:
            trajectory.waiting -= 1

        instance = acquired.instance
        try:
            if not self.shared or not instance.is_reset:
                await instance.environment.reset(**trajectory.reset_kwargs)
                instance.is_reset = True
        except BaseException:
            await pool.release(acquired, reusable=False)
            raise
        return pool, acquired

    async def _end_lease(self, trajectory: _Trajectory, reason: str, *, reusable: bool) -> None:
        trajectory.end_reason = reason
        lease = trajectory.lease
        trajectory.lease = None  # before anything is awaited, since a lease ends once
        if lease is not None:
            pool, acquired = lease
            await pool.release(acquired, reusable=reusable)


class EnvironmentTool(FunctionTool):
    """A function as a tool; its parameter ``env`` is the environment leased for the call.

    Args:
        function: see :class:`FunctionTool`; ``env`` needs no annotation.
        leases: leases of its environments; other tools may share them.

    Raises:
        ToolDefinitionError: there is no parameter ``env``, or as for :class:`FunctionTool`.
    """

    def __init__(self, function: Callable[..., Any], leases: EnvironmentLeases):
        super().__init__(function, supplied_parameters=("env",))
        if "env" not in inspect.signature(function).parameters:
            raise ToolDefinitionError(
                f"tool function {function.__qualname__} must take its environment as env"
            )
        self.stateful = not leases.shared
        self._leases = leases

    async def create(self, instance_id: str, **create_kwargs: Any) -> None:
        self._leases.join(instance_id, self.name, create_kwargs)

    async def execute(
        self, instance_id: str, arguments: Mapping[str, Any], **execute_kwargs: Any
    ) -> ToolResult:
        async with self._leases.lease(instance_id) as environment:
            return await super().execute(instance_id, arguments, env=environment, **execute_kwargs)

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        await self._leases.leave(instance_id, self.name)
        await super().release(instance_id, **release_kwargs)

    def waits_for(self, instance_id: str) -> str | None:
        if not self._leases.waits(instance_id):
            return None
        return self._leases.in_use_message

    async def close(self) -> None:
        await self._leases.close()


def environment_tool(
    *,
    env_cls: Callable[..., Resettable],
    pool_size: int,
    scope: Literal["trajectory", "global"] = "trajectory",
    env_kwargs: Mapping[str, Any] | None = None,
    close_timeout: float = 30.0,
) -> Callable[[Callable[..., Any]], EnvironmentTool]:
    """Return a decorator for tool functions with an environment.

    The functions that it decorates share the environments.

    Args:
        env_cls: makes an environment, with coroutines ``reset`` and ``close``.
        pool_size: maximum number of environments; further calls wait for one, within their time
            limit.
        scope: ``trajectory``: a trajectory has an environment to itself from its first call to its
            end, reset with its ``create_kwargs``. ``global``: a call has one to itself, in the
            state in which other calls left it.
        env_kwargs: arguments of ``env_cls``.
        close_timeout: seconds that closing an environment may take.

    Raises:
        ToolDefinitionError: ``pool_size`` or ``scope`` is not one of these.
    """
    if pool_size < 1 or scope not in ("trajectory", "global"):
        raise ToolDefinitionError(
            "an environment_tool has a pool_size of 1 or more and scope 'trajectory' or 'global',"
            f" got {pool_size} and {scope!r}"
        )
    leases = EnvironmentLeases(
        functools.partial(env_cls, **(env_kwargs or {})),
        name=getattr(env_cls, "__name__", repr(env_cls)),
        pool_size=pool_size,
        shared=scope == "global",
        close_timeout=close_timeout,
    )
    return functools.partial(EnvironmentTool, leases=leases)
