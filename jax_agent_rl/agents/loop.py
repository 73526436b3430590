"""The agent loop interface and registry: from a dataset row to a finished trajectory.

A loop is registered by name and chosen by the row's ``agent_name``::

    @register_agent("my_agent")
    class MyAgent(AgentLoop):
        async def play(self, request):
            episode = self.start(request)
            await episode.generate()
            return episode.finish(FinishReason.ANSWER)

:class:`~jax_agent_rl.agents.episode.Episode` does the bookkeeping of ids, budgets and checks, so a
loop only decides what happens next.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from jax_agent_rl.agents.context import AgentContext
from jax_agent_rl.agents.episode import Episode
from jax_agent_rl.agents.request import EpisodeRequest
from jax_agent_rl.config import Config
from jax_agent_rl.config.default_agent import default_agent
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.tools.base import BaseTool
from jax_agent_rl.types import Trajectory
from jax_agent_rl.utils.near_names import did_you_mean
from jax_agent_rl.utils.plugins import installed, load_installed, load_user_module


class AgentLoop(ABC):
    """One kind of agent; it holds no state of a trajectory, so one instance runs many at once."""

    name: ClassVar[str]
    """The name it is registered under."""
    roles: ClassVar[tuple[str, ...]] = ()
    """The roles it plays, if there are several: each has a conversation, a reward and a baseline of
    its own."""
    describes_tools: ClassVar[bool] = False
    """Whether its prompts describe the run's tools, unless ``agent.tool_prompt`` is ``none``."""
    continues_prefix: ClassVar[bool] = False
    """Whether :meth:`play` goes on from a request's ``prefix``: trajectories can then branch, and a
    resumed run continues them. A subclass with a ``play`` of its own says so again."""

    def __init__(self, context: AgentContext):
        self.context = context

    @abstractmethod
    async def play(self, request: EpisodeRequest) -> Trajectory | Sequence[Trajectory]:
        """Run one trajectory to its end; with several roles, one for each role that took a turn.

        Raises:
            ReplayError: a replay of the request's prefix gave other answers than the recorded ones.
            TrajectoryError: this trajectory is lost, for the reason in ``drop_reason``.
        """

    def start(
        self,
        request: EpisodeRequest,
        *,
        tools: Mapping[str, BaseTool] | None = None,
        opening: Sequence[Mapping[str, Any]] = (),
        tool_schemas: Sequence[Mapping[str, Any]] = (),
    ) -> Episode:
        """Start the trajectory of a request.

        With a role (:meth:`EpisodeRequest.as_role`), the model or adapter that plays it samples the
        turns. The others go to :class:`~jax_agent_rl.agents.episode.Episode`.

        Raises:
            DataError, PromptTooLongError, TemplateError: see
                :class:`~jax_agent_rl.agents.episode.Episode`.
            ValueError: the loop has no such role.
        """
        role = request.role
        if role is not None and role not in self.roles:
            raise ValueError(
                f"agent {self.name!r} starts role {role!r}, its roles are {self.roles};"
                " add it there"
            )
        return Episode(
            self.context.for_request(request),
            request,
            agent_name=self.name,
            tools=tools or {},
            opening=opening,
            tool_schemas=tool_schemas,
        )

    @classmethod
    def can_branch(cls) -> bool:
        """Return whether :meth:`play` goes on from prefixes, as the class that defines it says."""
        return vars(_class_of_play(cls)).get("continues_prefix", False)

    def branching_problem(self, row: Mapping[str, Any]) -> str | None:
        """Return why trajectories of this row cannot go on from a prefix, or None."""
        if self.roles:
            return f"agent {self.name!r} plays several roles, which do not branch"
        if self.can_branch():
            return None
        return f"agent {self.name!r} cannot branch; there are {branching_agents()}"

    async def close(self) -> None:
        """Close what the loop keeps open between trajectories (servers, connections).

        The default does nothing.
        """
        return None

    async def preflight(self) -> None:
        """Check, before a run, what the loop depends on outside this process.

        The default does nothing.

        Raises:
            ConfigError: a dependency is unavailable; names the key to change.
        """
        return None


def _class_of_play(cls: type[AgentLoop]) -> type:
    """Return the class that defines the :meth:`AgentLoop.play` of ``cls``."""
    return next(ancestor for ancestor in cls.__mro__ if "play" in vars(ancestor))


AGENTS: dict[str, type[AgentLoop]] = {}
"""The registered agents, by name."""

_EARLIER_METHODS = ("run", "branch", "resume")
"""What agents implemented before ``play``; overriding only these would play the base class."""

_Loop = TypeVar("_Loop", bound=type[AgentLoop])


def register_agent(name: str) -> Callable[[_Loop], _Loop]:
    """Register an :class:`AgentLoop` subclass under the name that rows give in ``agent_name``.

    Raises:
        ConfigError: the name is taken, or the class does not say how it plays.
    """

    def register(cls: _Loop) -> _Loop:
        if inspect.isabstract(cls):
            raise ConfigError(
                f"agent {name!r} ({cls.__module__}.{cls.__qualname__}) has no `play`; define"
                " `async def play(self, request)`, which returns the trajectory of a request"
            )
        # A class with a `play` of its own may have methods of any name.
        derived_classes = cls.__mro__[: cls.__mro__.index(_class_of_play(cls))]
        for method in _EARLIER_METHODS:
            if any(method in vars(derived) for derived in derived_classes):
                raise ConfigError(
                    f"agent {name!r} ({cls.__module__}.{cls.__qualname__}) defines `{method}`,"
                    " which nothing calls; define `async def play(self, request)` instead, which"
                    " goes on from `request.prefix` if the class says `continues_prefix = True`"
                )
        if name in AGENTS:
            known = AGENTS[name]
            raise ConfigError(
                f"two agents are called {name!r}: {known.__module__}.{known.__qualname__} and"
                f" {cls.__module__}.{cls.__qualname__}; rename one"
            )
        cls.name = name
        AGENTS[name] = cls
        return cls

    return register


def get_agent(name: str) -> type[AgentLoop]:
    """Return the loop registered as ``name``.

    Raises:
        ConfigError: there is none; the message lists the nearest name and all names.
    """
    if name not in AGENTS:
        cls = load_installed("agents", name, fits=_is_loop, expected="a subclass of AgentLoop")
        is_registered = name in AGENTS  # its module may have done so when it was imported
        if cls is not None and not is_registered:
            register_agent(name)(cls)
    if name not in AGENTS:
        guess = did_you_mean(name, agent_names())
        raise ConfigError(
            f"no agent is called {name!r}; {guess}there are {agent_names()} (see @register_agent)"
        )
    return AGENTS[name]


def load_agents(path: str | None) -> None:
    """Import ``agent.module``, a file or module that registers more loops; None does nothing.

    Raises:
        ConfigError: it cannot be imported or registers a name twice.
    """
    if path is not None:
        load_user_module(path, key="agent.module")


def agent_names() -> list[str]:
    """Return the names of all loops, those that installed packages register included."""
    return sorted({*AGENTS, *installed("agents")})


def _is_loop(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, AgentLoop)


def branching_agents() -> list[str]:
    """Return the names of the loops that can branch."""
    return sorted(name for name, cls in AGENTS.items() if cls.can_branch())


def select_agents(config: Config, rows: Iterable[Mapping[str, Any]]) -> frozenset[str] | None:
    """Return the names of the loops that rows can select, including the default.

    None if one of them is the user's own. They are a part of
    :class:`~jax_agent_rl.config.base.Facts`.

    Raises:
        ConfigError: a name is not registered.
    """
    names = {default_agent(config.agent, config.tool_config)}
    for row in rows:
        if row.get("agent_name"):
            names.add(row["agent_name"])

    agents = [get_agent(name) for name in sorted(names)]

    package = __name__.partition(".")[0]
    selected = set()
    for agent in agents:
        # The agents that it derives from count as well: their settings are its settings.
        for cls in agent.__mro__:
            if not issubclass(cls, AgentLoop):
                continue
            if cls.__module__.partition(".")[0] != package:
                return None
            if "name" in vars(cls):
                selected.add(cls.name)
    return frozenset(selected)


class AgentSelector:
    """Chooses the loop of each row and keeps one instance of each; all share the ``context``."""

    def __init__(self, context: AgentContext):
        self._context = context
        self._loops: dict[str, AgentLoop] = {}

    def for_row(self, row: Mapping[str, Any]) -> AgentLoop:
        """Return the loop named by ``row["agent_name"]``, or the configured default.

        Raises:
            ConfigError: the name is not registered, or the loop's settings are wrong.
        """
        name = row.get("agent_name")
        if not name:
            name = default_agent(self._context.limits, self._context.tool_config)
        if name not in self._loops:
            self._loops[name] = get_agent(name)(self._context)
        return self._loops[name]

    async def close(self) -> None:
        """Close every loop, then raise the first failure."""
        loops = list(self._loops.values())
        self._loops.clear()
        results = await asyncio.gather(*(loop.close() for loop in loops), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def preflight(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Check, before a run, every loop that these rows will use.

        Raises:
            ConfigError: a loop cannot run; says what to change.
        """
        loops = list(dict.fromkeys(self.for_row(row) for row in rows))
        roles: set[str] = set()
        for loop in loops:
            roles.update(loop.roles)
        for key in ("role_models", "role_adapters"):
            for role in getattr(self._context.limits, key).keys() - roles:
                raise ConfigError(
                    f"agent.{key}: no agent of these rows has a role {role!r};"
                    f" {did_you_mean(role, roles)}there are {sorted(roles)}"
                )

        for loop in loops:
            await loop.preflight()

    def require_branching(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Check that trajectories of all these rows can branch.

        Raises:
            ConfigError: some cannot; names their agents and environments.
        """
        problems = set()
        for row in rows:
            problem = self.for_row(row).branching_problem(row)
            if problem is not None:
                problems.add(problem)
        if problems:
            raise ConfigError(
                f"rollout.strategy branches trajectories, but {'; '.join(sorted(problems))}; use"
                " others, or set rollout.strategy.name=chain"
            )
