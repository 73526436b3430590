"""The agent loop interface and registry: from a dataset row to a finished trajectory.

A loop is registered by name and chosen by the row's ``agent_name``::

    @register_agent("my_agent")
    class MyAgent(AgentLoop):
        async def run(self, row, *, trajectory_id, group_id, sampling):
            episode = self.start(
                row, trajectory_id=trajectory_id, group_id=group_id, sampling=sampling
            )
            await episode.generate()
            return episode.finish(FinishReason.ANSWER)

:class:`~jax_agent_rl.agents.episode.Episode` does the bookkeeping of ids, budgets and checks, so a
loop only decides what happens next.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from jax_agent_rl.agents.context import AgentContext, Prefix, derive_seed
from jax_agent_rl.agents.episode import Episode
from jax_agent_rl.config import Config
from jax_agent_rl.config.run import default_agent
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.tools.base import BaseTool
from jax_agent_rl.types import Fork, SamplingParams, Trajectory
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

    def __init__(self, context: AgentContext):
        self.context = context

    @abstractmethod
    async def run(
        self, row: Mapping[str, Any], *, trajectory_id: str, group_id: str, sampling: SamplingParams
    ) -> Trajectory | Sequence[Trajectory]:
        """Run one trajectory to its end; with several roles, one for each role that took a turn.

        Args:
            row: ``prompt`` (messages), ``data_source``, ``agent_name``,
                ``reward_model.ground_truth``, ``extra_info`` (``tools_kwargs``, ``tool_selection``,
                …).
            trajectory_id: unique within the run; also the session id of its requests.
            group_id: shared by the trajectories of one prompt.
            sampling: ``max_tokens`` caps each turn, besides the budgets. Every turn derives its own
                seed from ``seed``.

        Raises:
            TrajectoryError: this trajectory is lost, for the reason in ``drop_reason``.
        """

    async def branch(
        self, parent: Trajectory, fork: Fork, *, trajectory_id: str, sampling: SamplingParams
    ) -> Trajectory:
        """Run a trajectory that shares ``parent``'s beginning up to ``fork``.

        Args:
            parent: a finished trajectory of this loop.
            fork: where to leave it; not at its prompt, that is :meth:`run`.
            trajectory_id: id of the branch.

        Raises:
            ConfigError: this loop cannot branch, see :meth:`can_branch`.
            ReplayError: a replay gave other answers than the parent got.
            TrajectoryError: as :meth:`run`.
        """
        raise ConfigError(
            f"agent {self.name!r} cannot go on from the middle of another trajectory; set"
            f" rollout.strategy.name=chain, or use one of {branching_agents()}"
        )

    async def resume(
        self,
        prefix: Prefix,
        row: Mapping[str, Any],
        *,
        trajectory_id: str,
        group_id: str,
        sampling: SamplingParams,
    ) -> Trajectory:
        """Run a trajectory from its prefix to its end; see :meth:`run` for the other arguments.

        Args:
            prefix: what was sampled before the interruption, see :meth:`Episode.progress`.

        Raises:
            ReplayError: a replay gave other answers than the recorded ones.
            TrajectoryError: as :meth:`run`.
        """
        raise NotImplementedError(
            f"agent {self.name!r} cannot go on from the middle of a trajectory"
        )

    @classmethod
    def can_branch(cls) -> bool:
        """Return whether :meth:`branch` continues what :meth:`run` begins.

        It does if the same class defines both.
        """
        for ancestor in cls.__mro__:
            defines_run = "run" in vars(ancestor)
            defines_branch = "branch" in vars(ancestor)
            if defines_run or defines_branch:
                return defines_run and defines_branch
        return False

    def branching_problem(self, row: Mapping[str, Any]) -> str | None:
        """Return why trajectories of this row cannot branch, or None; asked before a run."""
        if self.can_branch():
            return None
        return f"agent {self.name!r} cannot branch; there are {branching_agents()}"

    def can_resume(self, row: Mapping[str, Any]) -> bool:
        """Return whether :meth:`resume` continues trajectories of this row.

        It does only if they could branch as well.
        """
        return type(self).resume is not AgentLoop.resume and self.branching_problem(row) is None

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

    def start(
        self,
        row: Mapping[str, Any],
        *,
        trajectory_id: str,
        group_id: str,
        sampling: SamplingParams,
        tools: Mapping[str, BaseTool] | None = None,
        opening: Sequence[Mapping[str, Any]] = (),
        tool_schemas: Sequence[Mapping[str, Any]] = (),
        prefix: Prefix | None = None,
        role: str | None = None,
    ) -> Episode:
        """Start a trajectory of this loop.

        With ``role``, one of :attr:`roles`, the model or adapter that plays it samples the turns.
        Give the ids and the sampling that :meth:`run` was called with; the row may differ, in its
        prompt for one. The other arguments are those of
        :class:`~jax_agent_rl.agents.episode.Episode`.

        Raises:
            DataError, PromptTooLongError, TemplateError: see
                :class:`~jax_agent_rl.agents.episode.Episode`.
            ValueError: the loop has no such role.
        """
        context = self.context
        if role is not None:
            if role not in self.roles:
                raise ValueError(
                    f"agent {self.name!r} starts role {role!r}, its roles are {self.roles};"
                    " add it there"
                )
            context = context.as_role(role)
            trajectory_id = role_id(trajectory_id, role)
            if sampling.seed is not None:
                sampling = replace(sampling, seed=derive_seed(sampling.seed, role))
        return Episode(
            context.for_row(row),
            row,
            agent_name=self.name,
            trajectory_id=trajectory_id,
            group_id=group_id,
            sampling=sampling,
            tools=tools or {},
            opening=opening,
            tool_schemas=tool_schemas,
            prefix=prefix,
        )


def role_id(trajectory_id: str, role: str) -> str:
    """Return the id of a role's trajectory in the episode with this id."""
    return f"{trajectory_id}/{role}"


_AGENTS: dict[str, type[AgentLoop]] = {}
_Loop = TypeVar("_Loop", bound=type[AgentLoop])


def register_agent(name: str) -> Callable[[_Loop], _Loop]:
    """Register an :class:`AgentLoop` subclass under the name that rows give in ``agent_name``.

    Raises:
        ConfigError: the name is taken.
    """

    def register(cls: _Loop) -> _Loop:
        if name in _AGENTS:
            known = _AGENTS[name]
            raise ConfigError(
                f"two agents are called {name!r}: {known.__module__}.{known.__qualname__} and"
                f" {cls.__module__}.{cls.__qualname__}; rename one"
            )
        cls.name = name
        _AGENTS[name] = cls
        return cls

    return register


def get_agent(name: str) -> type[AgentLoop]:
    """Return the loop registered as ``name``.

    Raises:
        ConfigError: there is none; the message lists the nearest name and all names.
    """
    if name not in _AGENTS:
        cls = load_installed("agents", name, fits=_is_loop, expected="a subclass of AgentLoop")
        is_registered = name in _AGENTS  # its module may have done so when it was imported
        if cls is not None and not is_registered:
            register_agent(name)(cls)
    if name not in _AGENTS:
        guess = did_you_mean(name, agent_names())
        raise ConfigError(
            f"no agent is called {name!r}; {guess}there are {agent_names()} (see @register_agent)"
        )
    return _AGENTS[name]


def load_agents(path: str | None) -> None:
    """Import ``agent.module``, a file or module that registers more loops; None does nothing.

    Raises:
        ConfigError: it cannot be imported or registers a name twice.
    """
    if path is not None:
        load_user_module(path, key="agent.module")


def agent_names() -> list[str]:
    """Return the names of all loops, those that installed packages register included."""
    return sorted({*_AGENTS, *installed("agents")})


def _is_loop(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, AgentLoop)


def branching_agents() -> list[str]:
    """Return the names of the loops that can branch."""
    return sorted(name for name, cls in _AGENTS.items() if cls.can_branch())


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
